"""Count, sum, deviation and range of a series of numbers, for both processes of a rank.  Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul


class Moments:
    """The moments of all finite values; NaN and infinite values are only counted."""

    __slots__ = ("_mean", "count", "maximum", "minimum", "not_finite", "squares", "total")

    def __init__(self) -> None:
        self.count = 0  # finite values
        self.total = 0.0
        self.squares = 0.0  # sum of squared differences from the mean
        self.minimum, self.maximum = math.inf, -math.inf
        self.not_finite: dict[str, int] = {}  # by "nan", "inf", "-inf"
        self._mean = 0.0

    def add(self, value: float) -> bool:
        """Add a value; return whether it is finite."""
        if not math.isfinite(value):
            name = str(value)
            self.not_finite[name] = self.not_finite.get(name, 0) + 1
            return False
        # Welford's update: a sum of squares would lose the deviation of large values.
        self.count += 1
        difference = value - self._mean
        self._mean += difference / self.count
        self.squares += difference * (value - self._mean)
        self.total += value
        if value < self.minimum:
            self.minimum = value
        if value > self.maximum:
            self.maximum = value
        return True

    def add_all(self, values: Sequence[float]) -> list[float]:
        """Add values; return the finite values.  This takes about half of the time of `add` for each value."""
        try:
            total = math.fsum(values)
        except (OverflowError, ValueError):  # the sum is too large, or has both infinities
            total = math.nan
        if not math.isfinite(total):
            return [value for value in values if self.add(value)]
        if values:
            self._add_finite(len(values), total, values)
        return list(values)

    def _add_finite(self, count: int, total: float, values: Sequence[float]) -> None:
        """Add finite values; Chan, Golub and LeVeque (1979) have the formula for the deviation of two parts."""
        mean = total / count
        differences = [value - mean for value in values]
        squares = sum(map(mul, differences, differences))
        difference, num_before = mean - self._mean, self.count
        self.count += count
        self._mean += difference * (count / self.count)
        self.squares += squares + difference * (difference * (num_before * count / self.count))
        self.total += total
        self.minimum, self.maximum = min(self.minimum, min(values)), max(self.maximum, max(values))

    @property
    def mean(self) -> float:
        """Mean; NaN without values."""
        return self._mean if self.count else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN below two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan
