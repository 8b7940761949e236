"""Which rank is the slowest of a window: by own times, where it is slow in window after window; pure.

How often it names a slow rank, and how seldom a healthy one: docs/stragglers.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from effllm.health.robust import MAD_SIGMA
from effllm.schema import Straggler

#: A rank is slow in a window from this share above the median of its peers on.
SLOWER = 0.06
#: It is named when it was slow in so many of the last windows, and by so many deviations of a healthy rank.
RULES = ((3, 3, 3.0), (4, 5, 2.0), (6, 10, 1.6), (12, 20, 1.2))
WINDOWS = max(windows for _, windows, _ in RULES)
#: Windows that show how much a healthy rank differs from one to the next.
HISTORY = 50
#: Shorter own times are shorter than a clock can show.
SHORTEST_S = 1e-9

Ranks = NDArray[np.int64]
Shares = NDArray[np.float64]


class Slowest:
    """Compares the own times of the ranks of one group, window after window."""

    def __init__(self) -> None:
        self._last: deque[tuple[Ranks, Shares]] = deque(maxlen=WINDOWS)
        self._changes: deque[float] = deque(maxlen=HISTORY)  # of a rank from a window to the next: their medians

    def add(self, ranks: Sequence[int], own_s: Sequence[float], skipped: Collection[int] = ()) -> Straggler | None:
        """Return the slowest rank of a window, or ``None`` where no rank is slower than noise explains.

        Args:
            ranks: in ascending order.
            own_s: own time of an iteration, of each of these ranks.
            skipped: ranks that are never named, because their own time contains waiting for others.
        """
        values = np.array(own_s, np.float64)
        median_s = upper_median(values)
        if len(values) < 2 or median_s < SHORTEST_S:
            return None
        known = np.array(ranks, np.int64)
        # Of two ranks each is compared with the other.
        shares = values / (values[::-1] if len(values) == 2 else median_s) - 1.0
        if self._last:
            self._changes.append(float(np.median(np.abs(shares - _aligned(known, *self._last[-1])))))
        self._last.append((known, shares))
        # What is shown is this window's, so the rank has to be slower in this one too.
        slow = np.flatnonzero(self._is_slow(known) & (shares > 0))
        named = [at for at in slow.tolist() if ranks[at] not in skipped]
        if not named:
            return None
        history = np.array([_aligned(known, *one) for one in self._last])
        at = max(named, key=lambda at: float(np.median(history[:, at])))
        return Straggler(ranks[at], float(values[at]), median_s)

    def _is_slow(self, ranks: Ranks) -> NDArray[np.bool_]:
        """Return which of these ranks one of the rules names."""
        slow = np.zeros(len(ranks), bool)
        if len(self._last) < RULES[0][1]:
            return slow
        history = np.array([_aligned(ranks, *one) for one in self._last])
        deviation = MAD_SIGMA * float(np.median(self._changes)) / math.sqrt(2)  # of one window, not of a difference
        for times, windows, deviations in RULES:
            if len(history) >= windows:
                is_above = history[-windows:] >= max(SLOWER, deviations * deviation)
                slow |= is_above.sum(axis=0) >= times
        return slow


def upper_median(values: Shares) -> float:
    """Return the median, of two middle values the larger: of two halves neither is slow; of two values the smaller.

    >>> upper_median(np.array([1.0, 2.0, 1.0, 2.0])), upper_median(np.array([3.0, 2.0]))
    (2.0, 2.0)
    """
    return float(np.sort(values)[len(values) // 2 if len(values) > 2 else 0]) if len(values) else 0.0


def _aligned(ranks: Ranks, known: Ranks, shares: Shares) -> Shares:
    """Return the shares of these ranks in an earlier window; a rank that was not in it was not slow in it."""
    if np.array_equal(ranks, known):
        return shares
    at = np.minimum(np.searchsorted(known, ranks), len(known) - 1)
    aligned: Shares = np.where(known[at] == ranks, shares[at], 0.0)
    return aligned
