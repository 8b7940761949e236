"""The windows of each loss: the evidence that a loss is regular, and the place of a loss in the run. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from effllm.job.losses import MIN_PADDING_RATIO, THRESHOLDS
from effllm.job.memory_pressure import RETRIES
from effllm.job.rows import Rows
from effllm.records.job import DATA_WAIT, ClusterReport
from effllm.records.rank import CHECKPOINT, EVALUATION
from effllm.records.verdict import LossWindows

#: Causes that can be seen in every window.
ALWAYS_COUNTED = ("data_loading", "straggler", "evaluation", "checkpoint", "padding")


class Prevalence(Struct):
    """The number of windows with iterations, and the windows of each loss, by cause."""

    windows: int = 0
    by_cause: dict[str, LossWindows] = {}
    measured: dict[str, int] = {}  # cause -> windows in which it can be seen; not of `ALWAYS_COUNTED`
    attempt: int = 0  # of the newest window with iterations
    iteration: int = 0  # shown at the end of the newest window with iterations

    def close(self, rows: Rows, report: ClusterReport, hang_s: float, clocks_s: Mapping[str, float]) -> None:
        """Add a closed window, which must be neither a correction nor without reports.

        Args:
            rows: the reports of the ranks.
            report: the report of the window.
            hang_s: rank-seconds without progress of any rank.
            clocks_s: rank-seconds that low clocks cost, by cause.
        """
        wall_s = float(rows.numbers["wall_s"].sum())
        if hang_s > 0 and wall_s > 0:  # also in a window without iterations
            self._add("hang", report, min(hang_s / wall_s, 1.0))
        if report.iteration_last < report.iteration_first:
            return
        if report.attempt > self.attempt:
            self._add("restarts" if report.attempt > 1 else "startup", report)
        self.windows, self.attempt, self.iteration = self.windows + 1, report.attempt, report.iteration
        for cause, share in _shares(rows, report, wall_s):
            self._judge(cause, share, report)
        clock = {cause: clocks_s.get(cause, 0.0) / wall_s for cause in ("throttled", "power_limit")} if wall_s else {}
        for cause, share in {**clock, **dict(_profiled(rows, report, wall_s)), **_unused(report)}.items():
            self.measured[cause] = self.measured.get(cause, 0) + 1
            self._judge(cause, share, report)

    def of(self, cause: str) -> LossWindows | None:
        """Return the windows of a loss; ``None`` if no window can be named."""
        found = self.by_cause.get(cause)
        # A hang can be in a window without iterations.
        measured = self.windows if cause in ALWAYS_COUNTED else self.measured.get(cause)
        return None if found is None else replace(found, measured=measured)

    def last(self) -> LossWindows | None:
        """Return the newest window; ``None`` without windows."""
        return LossWindows(1, self.iteration, self.iteration) if self.windows else None

    def _judge(self, cause: str, share: float, report: ClusterReport) -> None:
        limit = MIN_PADDING_RATIO if cause == "padding" else THRESHOLDS[cause].share
        if share >= limit:
            self._add(cause, report, share)

    def _add(self, cause: str, report: ClusterReport, share: float | None = None) -> None:
        known = self.by_cause.get(cause)
        worst = None if share is None else report.iteration
        here = LossWindows(1, report.iteration, report.iteration, worst, share)
        self.by_cause[cause] = here if known is None else known.with_later(here)


def _shares(rows: Rows, report: ClusterReport, wall_s: float) -> Iterator[tuple[str, float]]:
    """Yield the share of each loss in the wall time of the ranks; for padding, in the processed positions."""
    if wall_s > 0:
        yield "data_loading", _wait_s(rows, report) / wall_s
        yield "evaluation", rows.phases_s.get(EVALUATION, 0.0) / wall_s
        yield "checkpoint", rows.phases_s.get(CHECKPOINT, 0.0) / wall_s
        # In the first window of a verdict, `straggling_gpu_s` also has the waits of earlier windows.
        yield "straggler", _straggling_s(rows, report) / wall_s
    if rows.counts["tokens_processed"]:
        yield "padding", 1.0 - rows.counts["tokens"] / rows.counts["tokens_processed"]


def _straggling_s(rows: Rows, report: ClusterReport) -> float:
    health = report.last.health
    return (health.straggling_s or 0.0) * max(len(rows) - health.stragglers, 0)


def _profiled(rows: Rows, report: ClusterReport, wall_s: float) -> Iterator[tuple[str, float]]:
    """Yield the losses inside the steps of a window with profiled iterations, as in the waterfall."""
    profile = rows.profile
    if profile is None or profile.time_s <= 0 or wall_s <= 0:
        return
    busy_s = float(rows.numbers["busy_s"].sum())
    exposed_s = profile.exposed_s / profile.time_s * busy_s - _straggling_s(rows, report)
    yield "exposed_communication", max(exposed_s, 0.0) / wall_s
    retries = rows.values.get(RETRIES)
    if retries is None or retries.total <= 0:  # the device also has no work during retries of the allocator
        idle = max(1.0 - (profile.exposed_s + profile.computing_s) / profile.time_s, 0.0)
        yield "device_idle", idle * busy_s / wall_s


def _unused(report: ClusterReport) -> dict[str, float]:
    """Return the share of the GPUs that are unused at the end of a window; empty if it is unknown."""
    unused = report.gpus_unused
    if unused is None:
        return {}
    return {"unused_gpus": unused / max(unused + report.coverage.gpus_expected, 1)}


def _wait_s(rows: Rows, report: ClusterReport) -> float:
    """Return the data waits of all ranks; stragglers by their data wait count as the mean of the other ranks."""
    late = {rank for one in report.stragglers if one.evidence == DATA_WAIT for rank in one.ranks}
    waits = rows.numbers["wait_s"]
    if late:
        waits = waits[[rank not in late for rank in rows.ranks]]
    return float(waits.mean()) * len(rows) if waits.size else 0.0
