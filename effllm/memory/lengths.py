"""The peak of memory by the length of micro-batches, and the probability of a longer micro-batch.  No I/O.

The length of a micro-batch is its number of positions, with padding.  The temporary memory of a step is a polynomial in
the length of the sequences: linear, or with a quadratic part if the attention scores are stored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

from effllm.memory.length_order import LengthOrder
from effllm.memory.length_tail import LengthTail

#: Maximum number of windows with a known peak.
MAX_PEAKS = 64
#: Maximum number of the largest different lengths; the probability is estimated from at most this number.
MAX_LARGEST = 64
#: A peak by length needs windows with different lengths and a known peak: MIN_LENGTHS of them, or two, of which the
#: longer one is MIN_RATIO times as long.
MIN_LENGTHS, MIN_RATIO = 3, 1.25
#: A probability needs this number of windows.
MIN_WINDOWS = 20
#: A length at which the memory is full is at most this multiple of the longest one so far.
MAX_RATIO = 16.0
#: Relative error of a peak by length, besides the errors of the fit: kernels choose other workspaces at other lengths.
PEAK_ERROR = 0.02


class LengthPeak(NamedTuple):
    """The temporary bytes of a step with a certain length, with an interval."""

    expected: float
    low: float
    high: float


class LengthPeaks:
    """The lengths of the windows so far, and the temporary bytes of the windows whose peak is known."""

    def __init__(self) -> None:
        self._peaks: deque[tuple[float, float]] = deque(maxlen=MAX_PEAKS)  # length and temporary bytes
        self._largest: list[tuple[float, int]] = []  # ascending lengths, each with its number of windows
        self._order = LengthOrder()
        self.windows = 0

    @property
    def longest(self) -> float:
        """The largest length so far; 0 before the first."""
        return self._largest[-1][0] if self._largest else 0.0

    def add(self, length: float, temporary: float | None) -> None:
        """Add a window.

        Args:
            length: largest length of the window.
            temporary: temporary bytes at the peak; ``None`` if the peak has not risen in the window.
        """
        self.windows += 1
        if temporary is not None:
            self._peaks.append((length, temporary))
        self._order.add(length)
        at = bisect_left(self._largest, (length, 0))
        if at < len(self._largest) and self._largest[at][0] == length:
            self._largest[at] = (length, self._largest[at][1] + 1)
        elif len(self._largest) < MAX_LARGEST or at > 0:
            self._largest.insert(at, (length, 1))
            del self._largest[:-MAX_LARGEST]

    def peak(self, length: float) -> LengthPeak | None:
        """Return the temporary bytes of a step with a length; ``None`` if too few peaks are known."""
        points = self._points()
        if len(points) < 2 or (len(points) < MIN_LENGTHS and points[1][0] < MIN_RATIO * points[0][0]):
            return None
        (linear, linear_error), (square, square_error) = (_fit(points, power, length) for power in (1, 2))
        # Between two fits, the one with the smaller error; the other fit is the other end of the interval if it is
        # almost as good.
        best, error = (linear, linear_error) if linear_error <= square_error else (square, square_error)
        other, other_error = (square, square_error) if linear_error <= square_error else (linear, linear_error)
        reach = 1.0 + (length - points[-1][0]) / max(points[-1][0] - points[0][0], 1.0)
        margin = 2.0 * error * max(reach, 1.0) + PEAK_ERROR * best
        if len(points) < MIN_LENGTHS:  # a line through two points has no error
            margin *= max(reach, 1.0)
        low, high = best - margin, best + margin
        if other_error <= 3.0 * error + 1e-3 * points[-1][1]:
            low, high = min(low, other), max(high, other)
        return LengthPeak(best, max(low, points[-1][1]) if length >= points[-1][0] else low, high)

    def length_at(self, temporary: float) -> float | None:
        """Return the length at which a step needs these temporary bytes; ``None`` if it is unknown or too far."""
        peak = self.peak(MAX_RATIO * self.longest)
        if peak is None or peak.expected < temporary:
            return None
        return self._lengths_at(temporary)[1]

    def probability_above(self, temporary: float, windows: int) -> float | None:
        """Return the probability that a step of the next windows needs more temporary bytes; ``None`` if unknown.

        It is the mean for the three values of the peak: a probability of one length would be too small.
        """
        if self.length_at(temporary) is None:
            return None
        chances = [self.probability(length, windows) for length in self._lengths_at(temporary)]
        known = [one for one in chances if one is not None]
        return math.fsum(known) / len(known) if known else None

    def _lengths_at(self, temporary: float) -> list[float]:
        """Return the lengths at which a step needs these bytes, by each value of the peak; at most MAX_RATIO times."""
        found = []
        for of in range(3):
            low, high = self.longest, MAX_RATIO * self.longest
            for _ in range(50):
                middle = (low + high) / 2
                peak = self.peak(middle)
                low, high = (middle, high) if peak is None or sorted(peak)[of] < temporary else (low, middle)
            found.append(high)
        return found

    def probability(self, length: float, windows: int) -> float | None:
        """Return the probability that a larger length than ``length`` occurs in as many windows; ``None`` if unknown.

        Args:
            length: at least the largest length so far.
            windows: number of the next windows.
        """
        if self.windows < MIN_WINDOWS or len(self._largest) < 2:
            return None
        if (grown := self._order.probability(length, windows / self.windows)) is not None:
            return grown
        return LengthTail(self._largest, self.windows).probability(length, windows)

    def _points(self) -> list[tuple[float, float]]:
        """Return the largest known temporary bytes by length, with ascending lengths."""
        known: dict[float, float] = {}
        for length, temporary in self._peaks:
            known[length] = max(known.get(length, 0.0), temporary)
        return sorted(known.items())


def _fit(points: list[tuple[float, float]], power: int, at: float) -> tuple[float, float]:
    """Return the value at a length of the line in ``length ** power``, and the root mean square of its errors."""
    xs, ys = [length**power for length, _ in points], [size for _, size in points]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    spread = math.fsum((x - mean_x) ** 2 for x in xs)
    slope = max(math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread, 0.0)
    errors = [y - mean_y - slope * (x - mean_x) for x, y in zip(xs, ys, strict=True)]
    error = math.sqrt(math.fsum(one * one for one in errors) / max(len(errors) - 2, 1))
    return mean_y + slope * (at**power - mean_x), error
