"""Lengths of micro-batches that grow with time, as in a curriculum.  No I/O."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from itertools import combinations

from effllm.memory.length_tail import LengthTail

#: Maximum number of blocks of windows; at this number the blocks are merged in pairs.
MAX_BLOCKS = 64
#: Lengths grow if Kendall's rank correlation with time is this number of standard deviations above 0.
MIN_DEVIATIONS = 3.0
#: The growth may end after each of these shares of the next windows, with equal probability.
ENDS = (0.0, 1 / 3, 2 / 3, 1.0)
#: Number of equal parts of the next windows.
PARTS = 4


class LengthOrder:
    """The largest lengths of consecutive blocks of windows."""

    def __init__(self) -> None:
        self._done: list[float] = []
        self._size, self._count, self._open = 1, 0, 0.0  # windows of a block; windows and largest length of the last

    def add(self, length: float) -> None:
        """Add the largest length of a window."""
        self._count, self._open = self._count + 1, max(self._open, length)
        if self._count < self._size:
            return
        self._done.append(self._open)
        self._count, self._open = 0, 0.0
        if len(self._done) == MAX_BLOCKS:
            self._done = [max(self._done[at : at + 2]) for at in range(0, MAX_BLOCKS, 2)]
            self._size *= 2

    def probability(self, length: float, ahead: float) -> float | None:
        """Return the probability of a larger length; ``None`` if the lengths do not grow with time.

        Args:
            length: at least the largest length so far.
            ahead: number of the next windows divided by the number of windows so far.
        """
        num = len(self._done)
        has_ties = num > 0 and self._done.count(max(self._done)) > 1  # a limit, or lengths of few values
        if has_ties or _deviations(self._done) < MIN_DEVIATIONS:
            return None
        slope = statistics.median((b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(self._done), 2))
        start = statistics.median(one - slope * at for at, one in enumerate(self._done))
        if slope <= 0.0:
            return None

        def level(at: float) -> float:
            return max(start + slope * at, 1.0)

        # The blocks as they would be with the texts of now.
        counts = Counter(one * level(num - 1) / level(at) for at, one in enumerate(self._done))
        tail, found = LengthTail(sorted(counts.items()), num, is_rounded=False), []
        for end in ENDS:
            passed = (min((part + 0.5) / PARTS, end) * ahead * num for part in range(PARTS))
            growth = [level(num - 1 + one) / level(num - 1) for one in passed]
            found.append(tail.probability(length, round(ahead * num), growth))
        return statistics.fmean(found)


def _deviations(values: list[float]) -> float:
    """Return Kendall's rank correlation with the order, divided by its standard deviation without a correlation."""
    num = len(values)
    score = sum((later > earlier) - (later < earlier) for earlier, later in combinations(values, 2))
    ties = sum(one * (one - 1) * (2 * one + 5) for one in Counter(values).values())
    variance = (num * (num - 1) * (2 * num + 5) - ties) / 18
    return score / math.sqrt(variance) if variance > 0.0 else 0.0
