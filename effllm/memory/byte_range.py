"""A number of bytes with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ByteRange:
    """The expected number of bytes, and the interval that contains the number in nine of ten cases."""

    low: float
    expected: float
    high: float

    @staticmethod
    def exact(size: float) -> ByteRange:
        return ByteRange(size, size, size)

    def scaled(self, low: float, high: float) -> ByteRange:
        """Return the range with relative limits around the expected number."""
        return ByteRange(self.expected * low, self.expected, self.expected * high)


def total_of(parts: Iterable[ByteRange]) -> ByteRange:
    """Return the sum of independent parts: the distances of their limits add as squares."""
    found = list(parts)
    expected = math.fsum(one.expected for one in found)
    below = math.sqrt(math.fsum((one.expected - one.low) ** 2 for one in found))
    above = math.sqrt(math.fsum((one.high - one.expected) ** 2 for one in found))
    return ByteRange(max(expected - below, 0.0), expected, expected + above)
