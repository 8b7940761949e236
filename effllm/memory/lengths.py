"""The peak of memory by the length of micro-batches, and the probability of a longer micro-batch.  No I/O.

The length of a micro-batch is its number of positions, with padding.  The temporary memory of a step is a polynomial in
the length of the sequences: linear, or with a quadratic part if the attention scores are stored.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from typing import NamedTuple

#: Maximum number of windows with a known peak.
MAX_PEAKS = 64
#: Maximum number of the largest lengths; the tail of the distribution is estimated from at most this number.
MAX_LARGEST = 64
#: A peak by length needs windows with different lengths and a known peak: MIN_LENGTHS of them, or two, of which the
#: longer one is MIN_RATIO times as long.
MIN_LENGTHS, MIN_RATIO = 3, 1.25
#: A probability needs this number of windows.
MIN_WINDOWS = 20
#: The tail is this share of the windows, but at least MIN_TAIL windows.
TAIL, MIN_TAIL = 0.25, 8
#: If the largest length has occurred this many times, the lengths are limited, by a maximum or by packing.
MIN_TIES = 2
#: Relative error of a peak by length, besides the errors of the fit: kernels choose other workspaces at other lengths.
PEAK_ERROR = 0.02

#: Possible shapes of the tail: negative for lengths with a limit; scales around the moment's estimate, in logarithms.
SHAPES = (-0.9, -0.6, -0.35, -0.2, -0.1, -0.01, 0.1, 0.2, 0.35, 0.5)
SCALES, MAX_LOG_SCALE = 8, 1.2
#: Weight of the shapes of heavy tails: most texts are cut at some length.
HEAVY = 0.4


class LengthPeak(NamedTuple):
    """The temporary bytes of a step with a certain length, with an interval."""

    expected: float
    low: float
    high: float


class LengthPeaks:
    """The lengths of the windows so far, and the temporary bytes of the windows whose peak is known."""

    def __init__(self) -> None:
        self._peaks: deque[tuple[float, float]] = deque(maxlen=MAX_PEAKS)  # length and temporary bytes
        self._largest: list[float] = []  # ascending
        self.windows = 0

    @property
    def longest(self) -> float:
        """The largest length so far; 0 before the first."""
        return self._largest[-1] if self._largest else 0.0

    @property
    def is_limited(self) -> bool:
        """Whether the largest length occurs so often that it is a limit."""
        return self._largest[-MIN_TIES:] == [self.longest] * MIN_TIES

    def add(self, length: float, temporary: float | None) -> None:
        """Add a window.

        Args:
            length: largest length of the window.
            temporary: temporary bytes at the peak; ``None`` if the peak has not risen in the window.
        """
        self.windows += 1
        if temporary is not None:
            self._peaks.append((length, temporary))
        insort(self._largest, length)
        if len(self._largest) > MAX_LARGEST:
            del self._largest[0]

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
        low, high = self.longest, 16.0 * self.longest
        peak = self.peak(high)
        if peak is None or peak.expected < temporary:
            return None
        for _ in range(50):
            middle = (low + high) / 2
            found = self.peak(middle)
            if found is None or found.expected < temporary:
                low = middle
            else:
                high = middle
        return high

    def probability(self, length: float, windows: int) -> float | None:
        """Return the probability that a larger length than ``length`` occurs in as many windows; ``None`` if unknown.

        The excesses over a quantile of the lengths are taken as generalized Pareto (Pickands, Annals of Statistics 3,
        1975); the probability is averaged over the shapes and scales that agree with the excesses so far.
        """
        if self.windows < MIN_WINDOWS:
            return None
        if length >= self.longest and self.is_limited:
            return 0.0
        num = min(max(int(TAIL * self.windows), MIN_TAIL), len(self._largest) - 1)
        threshold = self._largest[-num - 1]
        if length < threshold:
            return 1.0 if num >= 1 else None
        excesses = [one - threshold for one in self._largest[-num:]]
        if excesses[-1] <= 0:
            return 0.0
        return _predicted(num / self.windows, excesses, length - threshold, windows)

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


def _predicted(share: float, excesses: list[float], wanted: float, windows: int) -> float:
    """Return the probability of at least one larger excess in as many windows, averaged over shapes and scales.

    Args:
        share: share of the windows with an excess.
        excesses: the excesses over the threshold so far, ascending.
        wanted: the excess to be exceeded.
        windows: number of windows to come.
    """
    mean, weights = math.fsum(excesses) / len(excesses), []
    for shape in SHAPES:
        for step in range(-SCALES, SCALES + 1):
            scale = mean * (1.0 - shape) * math.exp(MAX_LOG_SCALE * step / SCALES)
            if 1.0 + shape * excesses[-1] / scale <= 0.0:
                continue  # a bounded tail that ends below the largest excess
            weight = (math.log(HEAVY) if shape > 0.0 else 0.0) - len(excesses) * math.log(scale)
            weight -= (1.0 + 1.0 / shape) * math.fsum(math.log1p(shape * one / scale) for one in excesses)
            rest = 1.0 + shape * wanted / scale
            larger = share * rest ** (-1.0 / shape) if rest > 0.0 else 0.0
            weights.append((weight, 1.0 - (1.0 - min(larger, 1.0)) ** windows))
    best = max(weight for weight, _ in weights)
    total = math.fsum(math.exp(weight - best) for weight, _ in weights)
    return math.fsum(math.exp(weight - best) * chance for weight, chance in weights) / total
