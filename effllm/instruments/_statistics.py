"""Statistics of one series of numbers in bounded memory: exact sums of all values, and the newest values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

from effllm.records.moments import Moments

NAN = float("nan")
#: Number of newest values that are kept of each series: they take 320 kB, as a float in a deque takes 32 bytes.
MAX_RECENT = 10_000


class Statistics(Moments):
    """Counts, mean, deviation and range of all values, and percentiles of the newest values.

    Args:
        max_recent: number of newest values that are kept.
    """

    __slots__ = ("recent",)

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=max_recent)

    def add(self, value: float) -> bool:
        """Add a value; return whether it is finite."""
        if not super().add(value):
            return False
        self.recent.append(value)
        return True

    def newest(self, window: int | None) -> list[float]:
        """Return the newest values, at most ``window`` of them.

        Raises:
            ValueError: ``window`` is below 1, or above the number of values that are kept.
        """
        limit = self.recent.maxlen or MAX_RECENT
        if window is None:
            return list(self.recent)
        if not 1 <= window <= limit:
            raise ValueError(f"window={window} must be 1 to {limit}, the number of newest values that are kept")
        return list(islice(self.recent, max(len(self.recent) - window, 0), None))


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return math.fsum(values) / len(values) if values else NAN


def std(values: Sequence[float]) -> float:
    """Return the sample standard deviation; NaN below two values."""
    if len(values) < 2:
        return NAN
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated linearly between values as in NumPy; NaN without values."""
    if not ordered:
        return NAN
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
