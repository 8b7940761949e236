"""The trend of memory over iterations, robust to steps, caches and single large batches.  Standard library only."""

from __future__ import annotations

import math
import statistics
from itertools import combinations, pairwise
from typing import NamedTuple

#: Maximum number of blocks of measurements in a trend; at this number the blocks are merged in pairs.
MAX_BLOCKS = 32
#: This share of the blocks, the oldest ones, is ignored.
WARM_UP = 1 / 3
#: A trend needs at least MIN_BLOCKS other blocks; from MANY_BLOCKS on, one pair of blocks in ten may show a decrease.
MIN_BLOCKS, MANY_BLOCKS = 8, 12
MIN_TAU = 0.8
#: The median difference of two blocks must be at least this share of the mean: a few jumps of the memory are no leak.
MIN_STEADY = 0.5
_NORMAL_95 = 1.96


class MemoryTrend(NamedTuple):
    """Growth of memory at one place of the loop, in bytes per 1,000 iterations, with its 95 % interval."""

    growth_bytes: float
    low_bytes: float
    high_bytes: float
    iterations: float  # number of iterations between the first and the last judged measurement
    is_growing: bool  # whether memory grows steadily, not by a few jumps

    @property
    def certain_bytes(self) -> float:
        """Lower bound of the 95 % interval of the growth over the judged iterations; at least 0."""
        return max(self.low_bytes, 0.0) * self.iterations / 1000


class MemoryBlocks:
    """The minimum of memory in consecutive blocks of measurements: a leak raises the minimum, a long batch does not."""

    def __init__(self) -> None:
        self._done: list[tuple[float, float]] = []  # mean iteration number and minimum of each complete block
        self._size = 1
        self._open: list[tuple[float, float]] = []
        self.count = 0  # number of measurements

    def add(self, iteration: float | None, used_bytes: float) -> None:
        self.count += 1
        self._open.append((self.count if iteration is None else iteration, used_bytes))
        if len(self._open) < self._size:
            return
        self._done.append(_joined(self._open))
        self._open = []
        if len(self._done) == MAX_BLOCKS:
            self._done = [_joined(self._done[at : at + 2]) for at in range(0, MAX_BLOCKS, 2)]
            self._size *= 2

    def trend(self) -> MemoryTrend | None:
        """Return the trend of the blocks after the warm-up, in which caches fill; ``None`` for too few blocks."""
        points = self._judged()
        if len(points) < MIN_BLOCKS or not (slopes := _slopes(points)):
            return None
        # Theil-Sen's slope; its interval is Sen's (Journal of the American Statistical Association 63, 1968).
        num = len(points)
        spread = _NORMAL_95 * math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
        low = slopes[max(int((len(slopes) - spread) / 2), 0)]
        high = slopes[min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)]
        middle = slopes[len(slopes) // 2]
        return MemoryTrend(1000 * middle, 1000 * low, 1000 * high, points[-1][0] - points[0][0], _is_steady(points))

    def early_and_late_growth(self) -> tuple[float, float]:
        """Return the growth in the two halves of the judged blocks, in bytes per 1,000 iterations; 0 if unknown.

        If the later growth is smaller, a cache fills up.
        """
        points = self._judged()
        middle = len(points) // 2
        slopes = [_slopes(part) for part in (points[: middle + 1], points[middle:])]
        early, late = (1000 * half[len(half) // 2] if half else 0.0 for half in slopes)
        return early, late

    def newest_growth(self, iteration: float, used_bytes: float) -> float:
        """Return the growth from the second newest block to a later measurement, in bytes per 1,000 iterations.

        The newest block may have ended with this measurement.  At least two blocks must be complete.
        """
        at, before = self._done[-2]
        return 1000 * (used_bytes - before) / (iteration - at)

    def _judged(self) -> list[tuple[float, float]]:
        return self._done[math.ceil(len(self._done) * WARM_UP) :]


def _slopes(points: list[tuple[float, float]]) -> list[float]:
    """Return the sorted slopes of all pairs of points."""
    return sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])


def _joined(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(at for at, _ in points) / len(points), min(used for _, used in points)


def _is_steady(points: list[tuple[float, float]]) -> bool:
    """Whether memory grows from block to block: Kendall's tau is high, and the growth is not from a few differences."""
    signs = [(later > earlier) - (later < earlier) for (_, earlier), (_, later) in combinations(points, 2)]
    tau = sum(signs) / len(signs)
    if tau < (MIN_TAU if len(points) >= MANY_BLOCKS else 1.0):
        return False
    differences = [later - earlier for (_, earlier), (_, later) in pairwise(points)]
    return statistics.median(differences) >= MIN_STEADY * statistics.fmean(differences)
