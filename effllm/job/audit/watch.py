"""Runs the checks of the audit at every window, and reports their results. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache

import msgspec
from msgspec import Struct

from effllm import metrics
from effllm.job.audit import token_counts
from effllm.job.audit.figures import FigureSums, KnownJob, compared
from effllm.job.audit.token_counts import CountSums
from effllm.job.rows import Rows
from effllm.job.window_energy import ROUNDING
from effllm.metrics import METRICS
from effllm.metrics.measurable import needs_of
from effllm.records.audit import Audit
from effllm.records.framework_figures import FIGURES
from effllm.records.job import ClusterReport, ClusterTotals
from effllm.records.rank import Event

#: SM clock at which the vendor's dense peak holds, by peak of a GPU in FLOP/s: the peak over SMs x FLOPs per SM and
#: clock (A100: 108 x 2,048; H100 SXM and H200: 132 x 4,096).
PEAK_CLOCK_HZ = {312e12: 1.41e9, 989.4e12: 1.83e9}
PEAK_ROUNDING = 1e-3
#: Precisions in which a tensor core at full activity reaches this peak; FP8 does twice as many FLOPs.
PRECISIONS = ("bf16", "fp16")
#: MFU may exceed the tensor cores' utilization by this share and by these points: activity and clock are sampled at
#: other times than the iterations are measured (5 % to 10 %), and the paper's error is two points.
SHARE, POINTS = 0.15, 0.02
#: What is in doubt: inputs of metrics, as in `effllm.metrics.measurable.NEEDS`.
TOKENS, FLOPS = "tokens", "FLOPs"
#: MFU is compared with the tensor activity after this many windows; both are means over the run.
MIN_MFU_WINDOWS = 10

Record = Callable[[Event, str], None]


class AuditWatch:
    """Checks closed windows.

    Args:
        state: the state of the audit, in the job's ledger.
        record: records an event once per key.
    """

    def __init__(self, state: AuditState, record: Record) -> None:
        self._state, self._record = state, record
        # Counts of all ranks since the last figure, by its name.  The first figure only starts the counts, because the
        # start of its interval is not known.
        self._since: dict[str, FigureSums] = {}

    def check(self, rows: Rows, known: KnownJob, *, has_gaps: bool) -> None:
        """Check the counts of all ranks, before the values of the window are computed from them."""
        state = self._state
        state.windows += 1
        if text := token_counts.broken_counts(state.counts, rows, known, has_gaps=has_gaps):
            self._doubt(TOKENS, text, rows[-1].end_time_s)

    def close(self, rows: Rows, report: ClusterReport, known: KnownJob, peak_source: str) -> None:
        """Check the values of a window, and compare the figures of the framework."""
        for kind, text in impossible_shares(report.last, peak_source):
            self._record(Event(report.time_s, kind, text), kind)
        if self._state.windows >= MIN_MFU_WINDOWS and (text := above_tensor_activity(report.run, known)):
            self._doubt(FLOPS, text, report.time_s)
        if self._since or not FIGURES.keys().isdisjoint(rows.values):
            self._compare(rows, report)

    def _doubt(self, what: str, text: str, time_s: float) -> None:
        self._state.doubts[what] = text
        self._record(Event(time_s, "audit", text), what)

    def _compare(self, rows: Rows, report: ClusterReport) -> None:
        # The framework's figure includes the ranks whose reports are missing.
        is_whole = report.coverage.ranks_reporting >= report.coverage.ranks_expected
        if report.warming_up or report.iteration_first <= 1 or not is_whole:
            self._since.clear()
            return
        for name, since in self._since.items():
            since.count_window(name, report.last)
        for name in FIGURES.keys() & rows.values.keys():
            if not rows.values[name].count:
                continue
            if name in self._since and not report.final:
                sums = self._state.figures.setdefault(name, FigureSums())
                sums.add(name, rows.values[name], self._since[name])
            self._since[name] = FigureSums()


def audit_of(state: AuditState, known: KnownJob) -> Audit:
    """Return the results of the audit so far."""
    figures = (compared(name, sums, known) for name, sums in sorted(state.figures.items()))
    return Audit(figures=tuple(filter(None, figures)), doubts=tuple(state.doubts.values()), windows=state.windows)


@cache
def _dependent(inputs: frozenset[str]) -> dict[str, str]:
    """Return the tags of all metrics with one of the inputs, with the first such input."""
    tags = {}
    for entry in METRICS.values():
        needed = inputs.intersection(needs_of(entry.name))
        for base in dict.fromkeys((*entry.bases, *entry.run_bases)) if needed else ():
            tags[entry.tag(base)] = min(needed)
    return tags


def doubtful_tags(state: AuditState, tags: Collection[str]) -> dict[str, str]:
    """Return the tags whose values depend on a count that failed a check, with the sentence about the check."""
    if not state.doubts:
        return {}
    known = _dependent(frozenset(state.doubts))
    return {tag: state.doubts[known[tag]] for tag in tags if tag in known}


class AuditState(Struct):
    """The totals that the audit compares, and its results so far."""

    counts: CountSums = msgspec.field(default_factory=CountSums)
    figures: dict[str, FigureSums] = {}  # by name of a figure
    doubts: dict[str, str] = {}  # TOKENS or FLOPS -> sentence about the failed check
    windows: int = 0  # number of windows whose counts were checked


def impossible_shares(totals: ClusterTotals, peak_source: str) -> Iterator[tuple[str, str]]:
    """Yield a kind of event and a sentence for MFU and HFU above 1."""
    constants = totals.constants
    for name, flops in (("MFU", constants.flops_per_token), ("HFU", constants.hardware_flops_per_token)):
        share = metrics.throughput.share_of_peak(totals, flops)
        if share is not None and share > 1 + ROUNDING:
            yield (
                "mfu",
                f"{name} would be {share:.3g}, which is impossible, so it is not shown: the {flops:.3g} FLOPs per "
                f"token, the tokens or the peak ({peak_source}) are wrong",
            )


def above_tensor_activity(totals: ClusterTotals, known: KnownJob) -> str:
    """Return a sentence if MFU exceeds the utilization of the tensor cores; empty otherwise, or if it is unknown."""
    mfu, found = metrics.throughput.mfu_ratio(totals), tensor_utilization(totals, known)
    if mfu is None or found is None or mfu <= found * (1 + SHARE) + POINTS:
        return ""
    used = f"MFU is {100 * mfu:.1f} %, but tensor activity x SM clock is {100 * found:.1f} %"
    factor = f" by a factor of at least {mfu / (found * (1 + SHARE)):.3g}" if found > 0 else ""
    return f"{used}: the FLOPs per token, the tokens or the peak are wrong{factor}"


def tensor_utilization(totals: ClusterTotals, known: KnownJob) -> float | None:
    """Return the utilization of the tensor cores, which cannot have done fewer FLOPs than the model needs.

    It is tensor activity times SM clock over the clock of the peak (OFU, arXiv 2605.20799), and ``None`` if a factor is
    unknown.  It predicts MFU within two percentage points in the paper's matrix products; this project has not measured
    it on a GPU.
    """
    devices, constants = totals.devices, totals.constants
    if devices.tensor_activity is None or devices.sm_clock_hz is None or known.precision not in PRECISIONS:
        return None
    peak = (constants.peak_flops_per_s or 0.0) / (constants.gpus or 1)
    clock_hz = next((hz for one, hz in PEAK_CLOCK_HZ.items() if abs(peak / one - 1) < PEAK_ROUNDING), None)
    return None if clock_hz is None else devices.tensor_activity * devices.sm_clock_hz / clock_hz
