"""Runs the checks of the audit at every window, and reports their results. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import compress

import msgspec
import numpy as np
from msgspec import Struct

from effllm import metrics
from effllm.job.account import TOKEN_COUNTS, Rows
from effllm.job.energy_account import ROUNDING
from effllm.metrics.measurable import dependent_tags
from effllm.records import framework_figures
from effllm.records.columns import Table
from effllm.records.job import ClusterReport, ClusterTotals
from effllm.records.rank import Event, ValueStatistics
from effllm.records.verdict import Audit, ComparedFigure

#: Smallest relative difference that is stated: logs do not end with windows, and logged figures are rounded.
MIN_DIFFERENCE = 0.05
MIN_WINDOWS = 5  # number of compared windows before a factor is stated
#: Rates of a window are not compared if their mean may be too high by more than this share.
MAX_EXCESS = 0.02
#: A larger figure or factor is no figure of a framework: any instrument can record a value under the name of a figure.
MAX_FIGURE = 1e15
MAX_NAMED = 8
#: Precisions in which a tensor core at full activity reaches this peak; FP8 does twice as many FLOPs.
PRECISIONS = ("bf16", "fp16")
#: MFU may exceed the tensor cores' utilization by this share and by these points: readings lie at other times than the
#: ends of iterations (5 % to 10 %), and the paper's error is two points.
MFU_EXCESS, MFU_EXCESS_POINTS = 0.15, 0.02
#: MFU is not compared with readings that cover less time in iterations than this number of intervals between samples.
MIN_READINGS = 20
#: What is in doubt: inputs of metrics, as in their decorators.
TOKENS, FLOPS = "tokens", "FLOPs"
Record = Callable[[Event, str], None]  # records an event, but only once for each text, its key


class KnownJob(Struct, frozen=True):
    """The constants of a job that the audit uses."""

    devices: int = 1  # GPUs, or ranks without GPUs
    peak_flops_per_s: float | None = None  # of the whole job
    flops_per_token: float | None = None
    max_positions: int = 0  # largest number of positions of a rank's iteration, if the framework fixes it; else 0
    precision: str = ""
    peak_clock_hz: float | None = None  # SM clock at which the vendor's dense peak holds, if it is that of all GPUs
    reading_s: float = 1.0  # time between two readings of a GPU


class FigureSums(Struct):
    """The sums of the windows in which a figure is compared."""

    figure: float = 0.0  # the framework's figure times `over`
    count: int = 0  # tokens without padding, or samples, of all ranks
    over: float = 0.0  # iteration time in seconds, or iterations
    windows: int = 0

    def add_values(self, name: str, values: ValueStatistics, since: FigureSums) -> None:
        """Add logged values of a figure, with the counts since it was logged before; none if their mean is not sure."""
        mean = values.total / values.count
        is_rate = name != framework_figures.TOKENS_PER_ITERATION
        if 0 < mean < MAX_FIGURE and (not is_rate or excess_of_mean(values) <= MAX_EXCESS):
            self.figure += mean * since.over
            self.count += since.count
            self.over += since.over
            self.windows += 1


def compared_figure(name: str, sums: FigureSums, job: KnownJob) -> ComparedFigure | None:
    """Return a framework's figure and our own over the same windows; ``None`` if they hardly differ, or have too few.

    A framework may count padding or only labels, and its clock may include evaluations or leave out the data wait.  So
    the factor between two figures says how much they differ, and not which of them is wrong.
    """
    own_sum = sums.count * _figure_per_count(name, job)
    if sums.windows < MIN_WINDOWS or own_sum <= 0:
        return None
    factor = sums.figure / own_sum
    if abs(factor - 1) <= MIN_DIFFERENCE or not 1 / MAX_FIGURE < factor < MAX_FIGURE:
        return None
    return ComparedFigure(name, sums.figure / sums.over, own_sum / sums.over, factor, sums.windows)


def _figure_per_count(name: str, job: KnownJob) -> float:
    """Return the figure of one token or sample in one second or iteration; 0 if a constant is unknown."""
    flops, peak = job.flops_per_token or 0.0, job.peak_flops_per_s or 0.0
    figures = {
        framework_figures.TOKENS_PER_S_PER_GPU: 1 / job.devices,
        framework_figures.TFLOPS_PER_GPU: flops / 1e12 / job.devices,
        framework_figures.MFU_RATIO: flops / peak if peak else 0.0,
    }
    return figures.get(name, 1.0)


def excess_of_mean(rates: ValueStatistics) -> float:
    """Return the largest share by which the mean of rates exceeds their count over their time.

    If each rate is of the same count, this is their harmonic mean.  With the mean, the variance and the smallest value
    known, the harmonic mean is lowest for two values, of which one is the smallest.
    """
    mean = rates.total / rates.count
    above_least, variance = mean - rates.least, rates.squares / rates.count
    if rates.least <= 0 or above_least <= 0 or not variance > 0:
        return 0.0
    return variance / (rates.least + variance / above_least) / mean


class CountSums(Table):
    """The counts of tokens and iterations of each rank so far."""

    NAMES = (*TOKEN_COUNTS, "iterations")

    def add_reports(self, rows: Rows) -> None:
        """Add reports; each report may be added only once."""
        counts = np.array([rows.token_counts[name] for name in TOKEN_COUNTS], np.float64)
        positions = self.find_or_add(rows.ranks)
        self.values[positions] += np.vstack((counts, rows.columns["iterations"])).T


class AuditState(Struct):
    """The totals that the audit compares, and its results so far."""

    counts: CountSums = msgspec.field(default_factory=CountSums)
    figures: dict[str, FigureSums] = {}  # by name of a figure
    doubts: dict[str, str] = {}  # TOKENS or FLOPS -> sentence about the failed check
    windows: int = 0  # number of windows whose counts were checked


class AuditWatch:
    """Checks closed windows; an event about each kind of doubt is recorded once."""

    def __init__(self, state: AuditState, record: Record) -> None:
        self._state, self._record_once = state, record
        # Counts of all ranks since the last figure, by its name.  The first figure only starts the counts, because the
        # start of its interval is not known.
        self._since_last_figure: dict[str, FigureSums] = {}

    def check_counts(self, rows: Rows, job: KnownJob, *, has_gaps: bool) -> None:
        """Check the counts of all ranks, before the values of the window are computed from them."""
        state = self._state
        state.windows += 1
        if text := impossible_count_text(state.counts, rows, job, has_gaps=has_gaps):
            self._set_doubt(TOKENS, text, rows[-1].end_time_s)

    def check_values(self, rows: Rows, report: ClusterReport, job: KnownJob, peak_source: str) -> None:
        """Check the values of a window, and compare the figures of the framework."""
        for kind, text in impossible_shares(report.last, peak_source):
            self._record_once(Event(report.time_s, kind, text), kind)
        if text := mfu_excess_text(report.run, job):
            self._set_doubt(FLOPS, text, report.time_s)
        if self._since_last_figure or not framework_figures.FIGURES.keys().isdisjoint(rows.values):
            self._compare_figures(rows, report)

    def _set_doubt(self, doubted_input: str, text: str, time_s: float) -> None:
        self._state.doubts[doubted_input] = text
        self._record_once(Event(time_s, "audit", text), doubted_input)

    def _compare_figures(self, rows: Rows, report: ClusterReport) -> None:
        """Add the figures that the framework logged in a window, with the counts since it logged each before."""
        # The framework's figure includes the ranks whose reports are missing.
        is_whole = report.coverage.ranks_reporting >= report.coverage.ranks_expected
        if report.warming_up or report.iteration_first <= 1 or not is_whole:
            self._since_last_figure.clear()
            return
        counts, time_s = report.last.counts, report.last.loop.time_s
        for name, since in self._since_last_figure.items():
            since.count += counts.samples if name == framework_figures.SAMPLES_PER_S else counts.tokens
            since.over += counts.iterations if name == framework_figures.TOKENS_PER_ITERATION else time_s
        for name in framework_figures.FIGURES.keys() & rows.values.keys():
            if not rows.values[name].count:
                continue
            if name in self._since_last_figure and not report.final:
                sums = self._state.figures.setdefault(name, FigureSums())
                sums.add_values(name, rows.values[name], self._since_last_figure[name])
            self._since_last_figure[name] = FigureSums()


def audit_of(state: AuditState, job: KnownJob) -> Audit:
    figures = (compared_figure(name, sums, job) for name, sums in sorted(state.figures.items()))
    return Audit(figures=tuple(filter(None, figures)), doubts=tuple(state.doubts.values()), windows=state.windows)


def doubts_by_tag(state: AuditState, tags: Collection[str]) -> dict[str, str]:
    """Return the tags whose values depend on a count that failed a check, with the sentence about the check."""
    if not state.doubts:
        return {}
    by_tag = dependent_tags(frozenset(state.doubts))
    return {tag: state.doubts[by_tag[tag].need] for tag in tags if tag in by_tag}


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


def mfu_excess_text(totals: ClusterTotals, job: KnownJob) -> str:
    """Return a sentence if MFU exceeds the utilization of the tensor cores; empty otherwise, or if it is unknown."""
    mfu, limit = metrics.throughput.mfu_ratio(totals), tensor_utilization(totals, job)
    if mfu is None or limit is None or mfu <= limit * (1 + MFU_EXCESS) + MFU_EXCESS_POINTS:
        return ""
    used = f"MFU is {100 * mfu:.1f} %, but tensor activity x SM clock is at most {100 * limit:.1f} %"
    factor = f" by a factor of at least {mfu / (limit * (1 + MFU_EXCESS)):.3g}" if limit > 0 else ""
    return f"{used}: the FLOPs per token, the tokens or the peak are wrong{factor}"


def tensor_utilization(totals: ClusterTotals, job: KnownJob) -> float | None:
    """Return the largest possible utilization of the tensor cores, which cannot have done fewer FLOPs than the model.

    It is tensor activity times SM clock over the clock of the peak (OFU, arXiv 2605.20799), and ``None`` if a factor is
    unknown or has too few readings.  In the time of iterations without readings, it is that of the largest reading:
    readings in the middle of short iterations, with pauses between them, are not like the rest.  OFU predicts MFU
    within two percentage points in the paper's matrix products; this project has not measured it on a GPU.
    """
    devices = totals.devices
    if not job.peak_clock_hz or devices.tensor_clock_hz is None or _why_not_comparable(totals, job):
        return None
    read_share = min(devices.tensor_clock_covered_s / (totals.loop.time_s * (totals.constants.gpus or 1)), 1.0)
    unread_hz = devices.tensor_clock_most_hz or devices.tensor_clock_hz
    return (read_share * devices.tensor_clock_hz + (1.0 - read_share) * unread_hz) / job.peak_clock_hz


def why_mfu_unchecked(totals: ClusterTotals, job: KnownJob) -> str:
    """Return why MFU is not compared with tensor activity; empty if it is, or cannot be on such a GPU."""
    is_comparable = totals.devices.tensor_activity is not None and job.peak_clock_hz is not None
    why = _why_not_comparable(totals, job)
    if not is_comparable or not why or metrics.throughput.mfu_ratio(totals) is None:
        return ""
    return f"check of MFU by tensor activity: {why}"


def _why_not_comparable(totals: ClusterTotals, job: KnownJob) -> str:
    """Return why tensor activity says nothing about MFU here; empty if it does."""
    if not job.precision:
        return "the precision is not stated (facts={'precision': 'bf16'})"
    if job.precision not in PRECISIONS:
        return f"the precision {job.precision} has another rate than the peak"
    if totals.devices.tensor_clock_covered_s < MIN_READINGS * job.reading_s:
        return f"the readings that lie wholly in iterations cover less than {MIN_READINGS} sampling intervals"
    return ""


#: Smaller count, larger count, and a text with both.
_ORDERED_COUNTS = (
    ("tokens", "tokens_processed", "{:,.0f} tokens without padding in {:,.0f} positions"),
    ("tokens_loss", "tokens_processed", "{:,.0f} positions with a label in {:,.0f} positions"),
)


def impossible_count_text(sums: CountSums, rows: Rows, job: KnownJob, *, has_gaps: bool) -> str:
    """Return a sentence about the first count that is impossible; empty if all counts are possible.

    There may be more labels than tokens without padding: some data sets have labels on padding.  The totals of each
    rank are compared, not its windows: tokens and labels counted on a GPU arrive some iterations after the positions of
    their batch.  With ``has_gaps``, reports were lost: then tokens of a batch may be here without its positions.
    """
    values = sums.values[sums.find_or_add(rows.ranks)]
    column = dict(zip(sums.NAMES, values.T, strict=True))
    lost = np.array(rows.token_counts["tokens_processed"], np.float64) if has_gaps else 0.0  # as many as in the window
    checks = [(column[small], column[large], text) for small, large, text in _ORDERED_COUNTS]
    if job.max_positions:
        max_positions = column["iterations"] * job.max_positions
        checks.append((column["tokens_processed"], max_positions, "{:,.0f} positions in batches of {:,.0f}"))
    for small, large, text in checks:
        is_wrong = small > large + lost
        if is_wrong.any() and (is_wrong := is_wrong & (large > 0)).any():  # a total of 0 is not counted
            factor = float((small[is_wrong] / large[is_wrong]).max())
            named = list(compress(rows.ranks, is_wrong))
            more = f" and {len(named) - MAX_NAMED} more" if len(named) > MAX_NAMED else ""
            counted = f"rank {', '.join(map(str, named[:MAX_NAMED]))}{more} counted"
            totals = text.format(small[is_wrong].sum(), large[is_wrong].sum())
            return f"{counted} {totals}: a factor of {factor:.3g}; the counts of tokens are wrong"
    return ""
