"""What retries of torch's allocator cost, and the memory of ranks that ran out of it. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import asdict

from effllm.job.account import Rows
from effllm.records.rank import ValueStatistics
from effllm.records.verdict import MemoryPressureLoss, OutOfMemory

RETRIES, ALLOCATED, ERRORS = "allocator/retries", "allocator/allocated_bytes", "allocator/out_of_memory"
_PREFIX, _BYTES = "allocator/", "_bytes"
MAX_RANKS = 16
#: Windows without retries from which on they are a base of comparison, and maximum number of kept windows.
MIN_USUAL, MAX_KEPT = 5, 128


class WindowSteps(Struct, frozen=True, array_like=True):
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
    usual: list[float] = []  # seconds per amount (`WindowSteps`) of the newest windows without retries
    waiting: list[WindowSteps] = []  # windows with retries, before there is a base of comparison
    failed: dict[int, dict[str, float]] = {}  # rank -> name of a size -> bytes, at an error in its last report
    failed_iteration: int = 0  # shown at the end of the newest window with such a report

    def add_window(self, rows: Rows) -> None:
        """Add the retries of a window and the time that they cost, and keep the memory of ranks that ran out of it."""
        for row in rows:
            if row.final and row.values and ERRORS in row.values and len(self.failed) < MAX_RANKS:
                sizes = {name: value.most for name, value in row.values.items() if name.endswith(_BYTES)}
                last_sizes = asdict(row.allocator) if row.allocator is not None else {}
                self.failed[row.rank] = {**{_PREFIX + name: size for name, size in last_sizes.items()}, **sizes}
                self.failed_iteration = row.iteration_shown
        busy_s, iterations = float(rows.columns["busy_s"].sum()), int(rows.columns["iterations"].sum())
        if ALLOCATED not in rows.values or rows.max_iterations <= 0 or busy_s <= 0:
            return
        self.rank_iterations += iterations
        steps = WindowSteps(busy_s, float(rows.counts["tokens_processed"] or iterations))
        retries = rows.values.get(RETRIES)
        if retries is None or retries.total <= 0:
            self.usual = [*self.usual[-MAX_KEPT + 1 :], steps.busy_s / steps.amount]
        else:
            self.last_iteration = int(rows.columns["iteration_shown"].max())
            self.first_iteration = self.first_iteration if self.windows else self.last_iteration
            self.retries, self.windows = self.retries + int(retries.total), self.windows + 1
            if retries.total > self.worst_retries:
                self.worst_retries, self.worst_iteration = int(retries.total), self.last_iteration
            self.waiting = [*self.waiting[-MAX_KEPT + 1 :], steps]
        if len(self.usual) >= MIN_USUAL:
            for window in self.waiting:
                self._add_lost_time(window)
            self.waiting = []

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
        peaks = {name: value.most for name, value in values.items() if name.endswith(f"_peak{_BYTES}")}
        for sizes_of_rank in self.failed.values():
            for name, size in sizes_of_rank.items():
                peaks[name] = max(peaks.get(name, 0.0), size)
        sizes = {
            name.removeprefix(_PREFIX).removesuffix(_BYTES): size
            for name, size in peaks.items()
            if name.startswith(_PREFIX)
        }
        retries = int(values[RETRIES].total) if RETRIES in values else 0
        return OutOfMemory(tuple(sorted(self.failed)), sizes, retries, self.failed_iteration)

    def _add_lost_time(self, window: WindowSteps) -> None:
        """Add what a window with retries took above the usual windows."""
        each_s, deciles_s = window.busy_s / window.amount, statistics.quantiles(self.usual, n=10)
        self.max_s += max(each_s - deciles_s[0], 0.0) * window.amount
        if each_s > deciles_s[-1]:
            self.lost_s += (each_s - statistics.median(self.usual)) * window.amount
