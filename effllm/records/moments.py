"""Count, sum, deviation and range of a series of numbers, for both processes of a rank.  Standard library only."""

from __future__ import annotations

import math


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

    def add_value(self, value: float) -> bool:
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

    @property
    def mean(self) -> float:
        """Mean; NaN without values."""
        return self._mean if self.count else math.nan

    @property
    def std(self) -> float:
        """Sample standard deviation; NaN below two values."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else math.nan
