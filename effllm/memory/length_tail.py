"""The probability that a longer micro-batch occurs, from the largest lengths of the windows so far.  No I/O.

The excesses over a threshold are taken as generalized Pareto (Pickands, Annals of Statistics 3, 1975).  The probability
is averaged over the shapes and scales that agree with the excesses, over the rate of the excesses, and over whether the
largest length is a limit.  Lengths are often rounded up: to a multiple by padding, or to few values by buckets.  So a
length counts as any length between it and the next possible smaller one, and a longer micro-batch needs the next
possible larger one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: The tail is this share of the windows, but at least MIN_TAIL windows.
TAIL, MIN_TAIL = 0.25, 8
#: If each length of the tail has occurred this many times on average, the lengths are rounded to few values.
MIN_TIES = 2
#: Possible shapes of the tail: negative for lengths with a limit; scales around the moment's estimate, in logarithms.
SHAPES = (-0.9, -0.6, -0.35, -0.2, -0.1, -0.01, 0.1, 0.2, 0.35, 0.5, 0.8)
SCALES, MAX_LOG_SCALE = 8, 1.6
#: Weight of the shapes of heavy tails: most texts are cut at some length.
HEAVY = 0.5
#: A priori, lengths have a limit with this probability; it may be anywhere in a range of the largest length times this.
LIMITED, LIMIT_RANGE = 0.5, 3.0
#: Excesses that a rate without any excess has a priori (Jeffreys).
NO_EXCESS = 0.5


class LengthTail:
    """The largest lengths of a number of windows.

    Args:
        counts: at least two lengths, ascending, each with the number of windows that have it as their largest length.
        windows: number of windows, also of those with smaller lengths.
        is_rounded: whether lengths are compared with each other to find how they are rounded up, or limited.
    """

    def __init__(self, counts: Sequence[tuple[float, int]], windows: int, *, is_rounded: bool = True) -> None:
        self._windows, self._is_rounded, self._num = windows, is_rounded, 0
        needed, first = max(int(TAIL * windows), MIN_TAIL), len(counts)
        while first > 1 and self._num < needed:
            first -= 1
            self._num += counts[first][1]
        self._tail, self._threshold, self._longest = counts[first:], counts[first - 1][0], counts[-1][0]
        below = self._tail[:-1] or counts[:-1]
        self._unit = math.gcd(*(round(length) for length, _ in counts)) or 1 if is_rounded else 1
        is_next = len(self._tail) == 1 and self._unit >= self._longest - self._threshold
        self._is_coarse = is_rounded and (is_next or sum(num for _, num in below) >= MIN_TIES * len(below))
        self._cells: list[tuple[float, float, int]] = []  # excess of the smallest and largest length, and windows
        previous = 0.0
        for length, num in self._tail:
            excess = length - self._threshold
            start = previous if self._is_coarse else max(excess - self._unit, previous)
            self._cells.append((start, excess, num))
            previous = excess

    def probability(self, length: float, windows: int, growth: Sequence[float] = (1.0,)) -> float:
        """Return the probability that at least one of the next windows has a larger length.

        Args:
            length: at least the largest length so far.
            windows: number of the next windows.
            growth: factors by which equal parts of the next windows have longer micro-batches.
        """
        ahead = windows / self._windows
        if self._is_coarse and len(self._cells) == 1:  # the tail has one value: only its next one can be judged
            return (1.0 - LIMITED) * math.pow(1.0 - math.pow(1.0 + ahead, -NO_EXCESS), 1 + self._steps(length))
        wanted = [max(self._rounded(length) / one - self._threshold, 0.0) for one in growth]
        mean, found = sum(num * (start + end) / 2 for start, end, num in self._cells) / self._num, []
        for shape in SHAPES:
            for step in range(-SCALES, SCALES + 1):
                scale = mean * (1.0 - shape) * math.exp(MAX_LOG_SCALE * step / SCALES)
                limited, unlimited = self._weights(shape, scale)
                larger = sum(_survival(one, shape, scale) for one in wanted) / len(wanted)
                # The rate of the excesses has a gamma distribution.
                found += [(limited, 0.0), (unlimited, 1.0 - (1.0 + larger * ahead) ** -self._num)]
        best = max(weight for weight, _ in found)
        known = [(math.exp(weight - best), chance) for weight, chance in found if weight > -math.inf]
        return math.fsum(weight * chance for weight, chance in known) / math.fsum(weight for weight, _ in known)

    def _weights(self, shape: float, scale: float) -> tuple[float, float]:
        """Return the logarithms of the weights of a shape and scale: the largest length is a limit, or is not."""
        weight = math.log(HEAVY) if shape > 0.0 else 0.0
        for start, end, num in self._cells[:-1]:
            inside = _survival(start, shape, scale) - _survival(end, shape, scale)
            if inside <= 0.0:
                return -math.inf, -math.inf
            weight += num * math.log(inside)
        start, end, num = self._cells[-1]
        above, inside = _survival(start, shape, scale), _survival(start, shape, scale) - _survival(end, shape, scale)
        if above <= 0.0 or inside <= 0.0:
            return -math.inf, -math.inf
        unlimited = weight + math.log(1.0 - LIMITED) + num * math.log(inside)
        if not self._is_rounded:
            return -math.inf, unlimited
        share = (end - start) / (LIMIT_RANGE * self._longest)  # of the possible limits
        return weight + math.log(LIMITED * share) + num * math.log(above), unlimited

    def _rounded(self, length: float) -> float:
        """Return the length that must be exceeded before rounding: the largest possible one up to a length."""
        if self._is_coarse:
            return self._longest * self._ratio ** self._steps(length)
        return max(length // self._unit * self._unit, self._longest) if self._is_rounded else length

    def _steps(self, length: float) -> int:
        """Return the number of possible lengths between the largest one and a length."""
        return max(int(math.log(length / self._longest) / math.log(self._ratio) + 1e-9), 0)

    @property
    def _ratio(self) -> float:
        """The ratio of the largest length to the next possible smaller one, if lengths have few values."""
        return self._longest / (self._threshold + self._cells[-1][0])


def _survival(excess: float, shape: float, scale: float) -> float:
    """Return the probability of a larger excess by the generalized Pareto distribution."""
    rest = 1.0 + shape * excess / scale
    return float(rest ** (-1.0 / shape)) if rest > 0.0 else 0.0
