"""Finds the slowest rank of a window by own times, if this rank is slow in several windows. No I/O.

Detection and false alarm rates: docs/stragglers.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from effllm.job.health.robust import MAD_SIGMA
from effllm.records.job import Straggler

#: A rank is slow in a window if its own time is at least this share above the median of its peers.
SLOWER = 0.06
#: A rule (n, m, d) names a rank that was slow in n of the last m windows, by at least d deviations of a healthy rank.
RULES = ((3, 3, 3.0), (4, 5, 2.0), (6, 10, 1.6), (12, 20, 1.2))
#: A rank has recovered after this many windows in which it was not slow.
RECENT = 3
WINDOWS = max(windows for _, windows, _ in RULES)
#: Number of windows that show the usual change of a healthy rank from window to window.
HISTORY = 50
#: Clocks cannot measure own times that are shorter than this.
SHORTEST_S = 1e-9

Ranks = NDArray[np.int64]
Shares = NDArray[np.float64]


class Slowest:
    """Compares the own times of a group's ranks over several windows."""

    def __init__(self) -> None:
        self._last: deque[tuple[Ranks, Shares]] = deque(maxlen=WINDOWS)
        self._changes: deque[float] = deque(maxlen=HISTORY)  # median over ranks of the change from window to window

    def add(self, ranks: Sequence[int], own_s: Sequence[float], skipped: Collection[int] = ()) -> Straggler | None:
        """Return the slowest rank of a window, or ``None`` if noise explains the differences.

        Args:
            ranks: ranks in ascending order.
            own_s: own time per iteration of each rank.
            skipped: ranks that are never named, because their own times contain waits for other ranks.
        """
        values = np.array(own_s, np.float64)
        if len(values) < 2:
            return None
        peers_s = medians_of_others(values)
        if peers_s.min() < SHORTEST_S:
            return None
        known = np.array(ranks, np.int64)
        shares = values / peers_s - 1.0
        if self._last:
            self._changes.append(float(np.median(np.abs(shares - _aligned(known, *self._last[-1])))))
        self._last.append((known, shares))
        is_slow = self._is_slow(known)
        # Outputs show the values of this window, so the rank must be slower in this window too.
        named = [at for at in np.flatnonzero(is_slow & (shares > 0)).tolist() if ranks[at] not in skipped]
        is_half = len(values) > 2 and 2 * int(is_slow.sum()) >= len(values)  # then no rank is named
        if not named or is_half:
            return None
        history = np.array([_aligned(known, *one) for one in self._last])
        at = max(named, key=lambda at: float(np.median(history[:, at])))
        return Straggler(ranks[at], float(values[at]), float(peers_s[at]))

    def _is_slow(self, ranks: Ranks) -> NDArray[np.bool_]:
        """Return for each rank whether a rule names the rank."""
        slow = np.zeros(len(ranks), bool)
        if len(self._last) < RULES[0][1]:
            return slow
        history = np.array([_aligned(ranks, *one) for one in self._last])
        deviation = MAD_SIGMA * float(np.median(self._changes)) / math.sqrt(2)  # a change has the errors of two windows
        for times, windows, deviations in RULES:
            if len(history) >= windows:
                is_above = history[-windows:] >= max(SLOWER, deviations * deviation)
                slow |= is_above.sum(axis=0) >= times
        slow &= (history[-RECENT:] >= SLOWER).any(axis=0)
        return slow


def medians_of_others(values: Shares) -> Shares:
    """Return for each value the median of all other values; at least two values are required.

    A median that includes the value itself is nearer to the value, and hides a slow rank in a group of three or four.

    >>> medians_of_others(np.array([1.0, 4.0, 2.0])), medians_of_others(np.array([3.0, 2.0]))
    (array([3. , 1.5, 2.5]), array([2., 3.]))
    """
    order = values.argsort()
    position = np.empty_like(order)
    position[order] = np.arange(len(values))
    ordered, others = values[order], len(values) - 1
    low, high = (np.where(position > at, ordered[at], ordered[at + 1]) for at in ((others - 1) // 2, others // 2))
    medians: Shares = (low + high) / 2
    return medians


def _aligned(ranks: Ranks, known: Ranks, shares: Shares) -> Shares:
    """Return the shares of these ranks in an earlier window; the share of a missing rank is 0."""
    if np.array_equal(ranks, known):
        return shares
    at = np.minimum(np.searchsorted(known, ranks), len(known) - 1)
    aligned: Shares = np.where(known[at] == ranks, shares[at], 0.0)
    return aligned
