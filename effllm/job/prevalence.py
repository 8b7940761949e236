"""The windows of each loss: the evidence that a loss is regular, and its place; and the cost of retries. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import asdict, replace

from effllm.job.losses import MIN_PADDING_RATIO, THRESHOLDS
from effllm.job.rows import Rows
from effllm.records.job import DATA_WAIT, ClusterReport
from effllm.records.rank import CHECKPOINT, EVALUATION, ValueStatistics
from effllm.records.verdict import LossWindows, MemoryPressureLoss, OutOfMemory

RETRIES, READ, ERRORS = "allocator/retries", "allocator/allocated_bytes", "allocator/out_of_memory"
_PREFIX, _BYTES = "allocator/", "_bytes"
MAX_RANKS = 16
#: Windows without retries from which on they are a base of comparison, and maximum number of kept windows.
MIN_USUAL, MAX_KEPT = 5, 128

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


class Paced(Struct, frozen=True, array_like=True):
    """The steps of all ranks in one window."""

    busy_s: float
    amount: float  # positions, or iterations


class MemoryPressure(Struct):
    """The retries of torch's allocator in all windows so far, and the windows that are compared.

    At a retry, cudaMalloc has failed, and all cached memory was freed.  A window with retries is compared with the
    usual window without retries.  Long micro-batches need more memory and more time, so times are compared per
    position, or per iteration if positions are not counted.  A window with retries has lost time if it is slower than
    nine in ten windows without retries.
    """

    retries: int = 0  # of all ranks
    rank_iterations: int = 0  # iterations of ranks whose allocator was read
    windows: int = 0  # windows with retries
    first_iteration: int = 0  # end of the first window with retries
    last_iteration: int = 0
    worst_iteration: int = 0
    worst_retries: int = 0
    lost_s: float = 0.0  # of all ranks, above the median of the windows without retries
    max_s: float = 0.0  # the same, above their 10th percentile: an upper bound
    usual: list[float] = []  # seconds per amount of the newest windows without retries
    waiting: list[Paced] = []  # windows with retries, before there is a base of comparison
    failed: dict[int, dict[str, float]] = {}  # rank -> bytes at an error in its last report
    failed_iteration: int = 0  # shown at the end of the newest window with such a report

    def close(self, rows: Rows) -> None:
        """Add a closed window."""
        for row in rows:
            if row.final and row.values and ERRORS in row.values and len(self.failed) < MAX_RANKS:
                sizes = {name: one.most for name, one in row.values.items() if name.endswith(_BYTES)}
                of_end = asdict(row.allocator) if row.allocator is not None else {}
                self.failed[row.rank] = {**{_PREFIX + name: size for name, size in of_end.items()}, **sizes}
                self.failed_iteration = row.iteration_shown
        read = rows.values.get(READ)
        busy_s, iterations = float(rows.numbers["busy_s"].sum()), int(rows.numbers["iterations"].sum())
        if read is None or rows.iterations <= 0 or busy_s <= 0:
            return
        self.rank_iterations += iterations
        paced = Paced(busy_s, float(rows.counts["tokens_processed"] or iterations))
        found = rows.values.get(RETRIES)
        if found is None or found.total <= 0:
            self.usual = [*self.usual[-MAX_KEPT + 1 :], paced.busy_s / paced.amount]
        else:
            self.last_iteration = int(rows.numbers["iteration_shown"].max())
            self.first_iteration = self.first_iteration if self.windows else self.last_iteration
            self.retries, self.windows = self.retries + int(found.total), self.windows + 1
            if found.total > self.worst_retries:
                self.worst_retries, self.worst_iteration = int(found.total), self.last_iteration
            self.waiting = [*self.waiting[-MAX_KEPT + 1 :], paced]
        if len(self.usual) >= MIN_USUAL:
            waiting, self.waiting = self.waiting, []
            for one in waiting:
                self._compare(one)

    def loss(self) -> MemoryPressureLoss | None:
        """Return the cost of the retries; ``None`` without retries."""
        if not self.retries:
            return None
        is_compared = len(self.usual) >= MIN_USUAL
        return MemoryPressureLoss(
            retries=self.retries,
            per_iteration=self.retries / max(self.rank_iterations, 1),
            windows=self.windows,
            worst_iteration=self.worst_iteration,
            first_iteration=self.first_iteration,
            last_iteration=self.last_iteration,
            rank_seconds=self.lost_s if is_compared else None,
            max_rank_seconds=self.max_s if is_compared else None,
        )

    def out_of_memory(self, values: Mapping[str, ValueStatistics]) -> OutOfMemory | None:
        """Return the memory of the ranks that ended with an error; ``values`` are those of the whole run."""
        if not self.failed:
            return None
        known = {name: one.most for name, one in values.items() if name.endswith(f"_peak{_BYTES}")}
        for found in self.failed.values():
            for name, size in found.items():
                known[name] = max(known.get(name, 0.0), size)
        sizes = {
            name.removeprefix(_PREFIX).removesuffix(_BYTES): size
            for name, size in known.items()
            if name.startswith(_PREFIX)
        }
        retries = int(values[RETRIES].total) if RETRIES in values else 0
        return OutOfMemory(tuple(sorted(self.failed)), sizes, retries, self.failed_iteration)

    def _compare(self, window: Paced) -> None:
        each, tenths = window.busy_s / window.amount, statistics.quantiles(self.usual, n=10)
        self.max_s += max(each - tenths[0], 0.0) * window.amount
        if each > tenths[-1]:
            self.lost_s += (each - statistics.median(self.usual)) * window.amount
