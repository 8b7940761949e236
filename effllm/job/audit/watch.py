"""Runs the checks of the audit at every window, and reports their results. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from msgspec.structs import replace

from effllm.job.audit import token_counts, utilization
from effllm.job.audit.figures import FigureWindow, judge, mean_gap
from effllm.job.audit.known import KnownJob
from effllm.job.audit.state import FLOPS, TOKENS, AuditState
from effllm.job.rows import Rows
from effllm.metrics import METRICS
from effllm.metrics.measurable import needs_of
from effllm.records.audit import DIFFERENCES, Audit, AuditedFigure
from effllm.records.framework_figures import FIGURES
from effllm.records.job import ClusterReport
from effllm.records.rank import Event

#: MFU is compared with the tensor activity after this many windows; both are means over the run.
MIN_MFU_WINDOWS = 10
#: A figure is judged at each of its first windows, and then at every Nth window.
ALWAYS_JUDGED, JUDGED_EVERY = 10, 8

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
        self._since: dict[str, FigureWindow] = {}
        self._judged: dict[str, int] = {}  # number of figures so far, by name

    def check(self, rows: Rows, known: KnownJob, *, has_gaps: bool) -> None:
        """Check the counts of all ranks, before the values of the window are computed from them."""
        state = self._state
        state.windows += 1
        if text := token_counts.broken_counts(state.counts, rows, known, has_gaps=has_gaps):
            self._doubt(TOKENS, text, rows[-1].end_time_s)

    def close(self, rows: Rows, report: ClusterReport, known: KnownJob, peak_source: str) -> None:
        """Check the values of a window, and compare the figures of the framework."""
        for kind, text in utilization.impossible_shares(report.last, peak_source):
            self._record(Event(report.time_s, kind, text), kind)
        if self._state.windows >= MIN_MFU_WINDOWS and (text := utilization.above_tensor_activity(report.run, known)):
            self._doubt(FLOPS, text, report.time_s)
        if self._since or not FIGURES.keys().isdisjoint(rows.values):
            self._compare(rows, report, known)

    def _doubt(self, what: str, text: str, time_s: float) -> None:
        self._state.doubts[what] = text
        self._record(Event(time_s, "audit", text), what)

    def _compare(self, rows: Rows, report: ClusterReport, known: KnownJob) -> None:
        # The framework's figure includes the ranks whose reports are missing.
        is_whole = report.coverage.ranks_reporting >= report.coverage.ranks_expected
        if report.warming_up or report.iteration_first <= 1 or not is_whole:
            self._since.clear()
            return
        window = _window_of(rows, report)
        for name in self._since:
            self._since[name] = _joined(self._since[name], window)
        for name in FIGURES.keys() & rows.values.keys():
            one = rows.values[name]
            if not one.count:
                continue
            since = self._since.pop(name, None)
            self._since[name] = FigureWindow(0.0, iteration_first=report.iteration_last + 1)
            if since is None or report.final:
                continue
            gap = 0.0 if FIGURES[name].per_iteration else mean_gap(one)
            self._state.add(name, replace(since, framework=one.total / one.count, gap=gap))
            count = self._judged[name] = self._judged.get(name, 0) + 1
            if count <= ALWAYS_JUDGED or count % JUDGED_EVERY == 0:
                self._state_difference(name, known, report.time_s)

    def _state_difference(self, name: str, known: KnownJob, time_s: float) -> None:
        found = judge(name, self._state.figures[name], known)
        if found is not None and found.outcome in DIFFERENCES:
            key = " ".join((name, found.outcome, *found.reasons))
            self._record(Event(time_s, "audit", found.text), key)


def audit_of(state: AuditState, known: KnownJob) -> Audit:
    """Return the results of the audit so far."""
    judged = (judge(name, windows, known) for name, windows in sorted(state.figures.items()))
    figures: tuple[AuditedFigure, ...] = tuple(one for one in judged if one is not None)
    return Audit(figures=figures, doubts=tuple(state.doubts.values()), windows=state.windows)


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


def _window_of(rows: Rows, report: ClusterReport) -> FigureWindow:
    counts = report.last.counts
    return FigureWindow(
        framework=0.0,
        tokens=counts.tokens,
        positions=counts.tokens_processed,
        loss_tokens=counts.tokens_loss,
        samples=counts.samples,
        time_s=report.last.loop.time_s,
        wall_s=float(rows.numbers["wall_s"].max()),
        busy_s=float(rows.numbers["busy_s"].max()),
        iteration_first=report.iteration_first,
        iteration_last=report.iteration_last,
    )


def _joined(one: FigureWindow, more: FigureWindow) -> FigureWindow:
    """Return two consecutive windows as one window."""
    return FigureWindow(
        framework=0.0,
        tokens=one.tokens + more.tokens,
        positions=one.positions + more.positions,
        loss_tokens=one.loss_tokens + more.loss_tokens,
        samples=one.samples + more.samples,
        time_s=one.time_s + more.time_s,
        wall_s=one.wall_s + more.wall_s,
        busy_s=one.busy_s + more.busy_s,
        iteration_first=one.iteration_first,
        iteration_last=more.iteration_last,
    )
