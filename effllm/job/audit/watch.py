"""Runs the checks of the audit at every window, and reports their results. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache

from effllm.job.audit import token_counts, utilization
from effllm.job.audit.figures import FigureSums, compared
from effllm.job.audit.known import KnownJob
from effllm.job.audit.state import FLOPS, TOKENS, AuditState
from effllm.job.rows import Rows
from effllm.metrics import METRICS
from effllm.metrics.measurable import needs_of
from effllm.records.audit import Audit
from effllm.records.framework_figures import FIGURES
from effllm.records.job import ClusterReport
from effllm.records.rank import Event

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
        for kind, text in utilization.impossible_shares(report.last, peak_source):
            self._record(Event(report.time_s, kind, text), kind)
        if self._state.windows >= MIN_MFU_WINDOWS and (text := utilization.above_tensor_activity(report.run, known)):
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
