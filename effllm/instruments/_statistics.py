"""Statistics of one series of numbers in bounded memory: exact sums of all values, and the newest values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

NAN = float("nan")
#: Newest values that are kept of each series: 320 kB, a float in a deque takes 32 bytes.
MAX_RECENT = 10_000


class Statistics:
    """Counts, mean, deviation and range of all values; percentiles of the newest.

    NaN and infinite values are counted, and enter nothing else.

    Args:
        max_recent: number of newest values that are kept.
    """

    __slots__ = ("_mean", "_squares", "count", "maximum", "minimum", "not_finite", "recent", "total")

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self.count = 0  # finite values
        self.total = 0.0
        self.minimum, self.maximum = math.inf, -math.inf
        self.not_finite: dict[str, int] = {}  # by "nan", "inf", "-inf"
        self.recent: deque[float] = deque(maxlen=max_recent)
        self._mean = self._squares = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if not math.isfinite(value):
            name = str(value)
            self.not_finite[name] = self.not_finite.get(name, 0) + 1
            return
        # Welford's update: a sum of squares would lose the deviation of large values.
        self.count += 1
        difference = value - self._mean
        self._mean += difference / self.count
        self._squares += difference * (value - self._mean)
        self.total += value
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        self.recent.append(value)

    @property
    def mean(self) -> float:
        return self._mean if self.count else NAN

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN below two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else NAN

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
    """Return a percentile of sorted values, linear between two of them as in NumPy; NaN without values."""
    if not ordered:
        return NAN
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
