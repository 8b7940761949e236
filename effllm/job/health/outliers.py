"""Finds ranks that are outliers of their group, by robust z, in more windows than noise explains. No I/O.

Thresholds and false alarm rates: docs/stragglers.md.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from effllm.job.health.robust import MAD_SIGMA, median, median_distance, of_few
from effllm.job.rows import Rows
from effllm.records.rank import RankReport

#: A rank of two is an outlier if it takes longer than its peer by this share, while the usual difference is not known.
PAIR = 0.2
#: Number of windows from which on the usual difference is known.
KNOWN = 30
#: Changes over one window show noise, and changes over several windows show slow drifts of the load.
LAGS = (1, 5, 10)
#: A deviation from n changes is raised by this number over n, because few changes may be small by chance.
UNSURE = 3.0
#: A rank is an outlier at a robust z of `Z` or more, until z falls below `Z_CLEAR`.
Z, Z_CLEAR = 5.0, 2.5
#: Iterations shorter than this are invalid: no clock can measure them, and shares of them exceed the range of a float.
SHORTEST_S = 1e-9
#: Minimum of a deviation, as a share of the median, or of the iteration if values are parts of an iteration.
FLOOR = 0.01
#: A rank is named if it was an outlier in 3 of the last 5 windows; if noise often causes outliers, in more windows.
PERSIST, WINDOWS = 3, 5
#: Maximum number of ranks that noise may name per window; the required number of outliers depends on this limit.
FALSE_ALARMS = 1e-6
#: Number of windows over which outliers by chance are counted.
HISTORY = 50
#: One outlier in this many judgements is added to the counts: a few windows without outliers prove little.
ASSUMED = 100
#: Groups smaller than this use the scatter of several windows: the scatter of a few values may be small by chance.
FEW = 64

_RANK = attrgetter("rank")


class PairScatter:
    """The deviation of the difference between two healthy ranks, from its changes over windows.

    Two values of one window have no scatter of their own.

    Args:
        windows: number of windows over which the difference is observed.
    """

    def __init__(self, windows: int) -> None:
        self._ranks: Sequence[int] = ()
        self._shares: deque[float] = deque(maxlen=windows)

    def add(self, ranks: Sequence[int], share: float, z: float) -> float:
        """Add the difference of a window; return the deviation of a healthy difference, as a share.

        Args:
            ranks: the two ranks.
            share: second value minus first value, as a share of the base.
            z: a rank is an outlier at this many deviations.
        """
        if ranks != self._ranks:
            self._ranks = ranks
            self._shares.clear()
        self._shares.append(share)
        known = list(self._shares)
        if len(known) < KNOWN:
            return max(_deviation(known, LAGS[0]), PAIR / z)
        deviation = max(_deviation(known, lag) for lag in LAGS)
        # Noise makes each of two ranks the slower one in half of the windows: so often in a row is no noise.
        sides = known[-KNOWN:]
        is_one_sided = min(sides) >= PAIR or max(sides) <= -PAIR
        return min(deviation, PAIR / z) if is_one_sided else deviation


def _deviation(shares: Sequence[float], lag: int) -> float:
    """Return the robust deviation of one share from its changes, each of which has the errors of two windows."""
    changes = sorted(abs(after - before) for before, after in zip(shares, shares[lag:], strict=False))
    if not changes:
        return 0.0
    return (1.0 + UNSURE / len(changes)) * MAD_SIGMA * median(changes) / math.sqrt(2)


class Look(NamedTuple):
    """One kind of evidence in one group and window; all seconds are per iteration."""

    window: int
    shown: int  # number of the window's first iteration
    iterations: int
    ranks: Sequence[int]
    values: Sequence[float]
    median_s: float
    scale_s: float
    base_s: float  # slowdowns are shares of this duration
    flags: dict[int, float]  # outliers, and their seconds above the median
    later: dict[int, float]  # in a group of two: the later rank, with its seconds, also if it is not an outlier

    def excess_s(self, rank: int) -> float | None:
        return self.values[self.ranks.index(rank)] - self.median_s if rank in self.ranks else None


class OutlierTrack:
    """One kind of evidence in one group over all windows."""

    def __init__(self) -> None:
        self.looks: deque[Look] = deque(maxlen=WINDOWS)
        self._flags: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=HISTORY)  # (number of judged ranks, outliers)
        # Only for small groups: the scatter of each window, as shares of base_s.
        self._scatter: deque[NDArray[np.float64]] = deque(maxlen=WINDOWS)
        self._pair = PairScatter(HISTORY)

    def look(
        self,
        rows: Sequence[RankReport],
        values: Sequence[float],
        whole_s: float | None = None,
        is_late: Callable[[int, float], bool] = lambda _index, _excess_s: True,
    ) -> None:
        """Judge the ranks of a window by one value per rank.

        Args:
            rows: reports of the ranks.
            values: one value per report, in seconds per iteration.
            whole_s: duration of an iteration, if the values are parts of iterations.
            is_late: returns whether the value at an index, with its seconds above the median, may be an outlier.
        """
        found, ranks = np.array(values), _ranks(rows)
        ordered = np.sort(found)
        centre = median(ordered) if len(ordered) > 2 else float(ordered[0])
        base_s = whole_s if whole_s is not None else centre
        if base_s < SHORTEST_S:
            return
        if len(found) == 2:
            deviation = self._pair.add(ranks, (values[1] - values[0]) / base_s, Z)
            deviation_s = deviation * base_s
            self.looks = deque((_judged_again(one, deviation) for one in self.looks), WINDOWS)
        else:
            deviation_s = self._deviation(ordered, centre, base_s)
        scale_s = max(deviation_s, FLOOR * base_s)
        limit = centre + Z * scale_s
        flags: dict[int, float] = {}
        later: dict[int, float] = {}
        if len(found) == 2:
            index, excess_s = int(found.argmax()), float(ordered[1] - ordered[0])
            later = {rows[index].rank: excess_s} if is_late(index, excess_s) else {}
            flags = later if ordered[1] >= limit else {}
        elif ordered[-1] >= limit:
            late = ((index, values[index] - centre) for index in np.flatnonzero(found >= limit).tolist())
            flags = {rows[index].rank: excess_s for index, excess_s in late if is_late(index, excess_s)}
        self._add(rows, Look(*_place(rows), ranks, values, centre, scale_s, base_s, flags, later))

    def pass_by(self, rows: Sequence[RankReport]) -> None:
        """Record a window without outliers."""
        self._add(rows, Look(*_place(rows), (), (), 0.0, 1.0, 1.0, {}, {}))

    def _add(self, rows: Sequence[RankReport], look: Look) -> None:
        self.looks.append(look)
        self._flags.append((len(rows), tuple(look.flags)))

    def _deviation(self, ordered: NDArray[np.float64], centre: float, base_s: float) -> float:
        if len(ordered) >= FEW:
            return MAD_SIGMA * median_distance(ordered, centre)
        self._scatter.append(np.abs(ordered - centre) / base_s)
        share = median(np.sort(np.concatenate(self._scatter)))
        return MAD_SIGMA * of_few(len(ordered)) * share * base_s

    def recent(self, window: int, iterations: int) -> Look | None:
        """Return the last look as the look of a later window, while windows are judged as often as before.

        Args:
            window: number of the window, which is not judged.
            iterations: number of its iterations.
        """
        if len(self.looks) < 2 or window - self.looks[-1].window > 2 * (self.looks[-1].window - self.looks[-2].window):
            return None
        return self.looks[-1]._replace(window=window, iterations=iterations)

    def times(self, rank: int) -> int:
        """Return the number of last windows in which a rank was an outlier."""
        return sum(rank in look.flags for look in self.looks)

    def candidates(self, known: Iterable[int]) -> list[int]:
        """Return the ranks that are outliers in this window and were outliers in enough of the last windows.

        Args:
            known: ranks that are named or were recently named; such ranks are not outliers by chance.
        """
        newest = self.looks[-1]
        found = [rank for rank in newest.flags if self.times(rank) >= PERSIST]
        # The first differences of two ranks show too little of their scatter.
        if not found or (len(newest.ranks) == 2 and len(self.looks) < WINDOWS):
            return []
        explained = {*found, *known}
        judged = sum(count for count, _ in self._flags)
        by_chance = sum(rank not in explained for _, ranks in self._flags for rank in ranks)
        needed = persistence(len(newest.ranks), (by_chance + 1) / (judged + ASSUMED))
        return [rank for rank in found if self.times(rank) >= needed]

    def outlier_looks(self, rank: int) -> list[Look]:
        """Return the last windows in which a rank was an outlier."""
        return [look for look in self.looks if rank in look.flags]

    def slowdown(self, rank: int) -> float:
        """Return the median share by which a rank was slower, over the windows in which it was an outlier."""
        return median(sorted(look.flags[rank] / look.base_s for look in self.outlier_looks(rank)))

    def z(self, rank: int) -> float:
        """Return a rank's median z over the windows in which it was an outlier."""
        return median(sorted(look.flags[rank] / look.scale_s for look in self.outlier_looks(rank)))


def persistence(ranks: int, share: float) -> float:
    """Return the required number of outliers in `WINDOWS` windows for at most `FALSE_ALARMS` ranks named by chance.

    Args:
        ranks: number of judged ranks.
        share: share of windows in which a rank is an outlier by chance.

    >>> persistence(10_000, 3e-7), persistence(10_000, 1e-3), persistence(8, 0.5)
    (3, 4, inf)
    """
    for times in range(PERSIST, WINDOWS + 1):
        if ranks * math.comb(WINDOWS, times) * share**times <= FALSE_ALARMS:
            return times
    return math.inf


def _judged_again(look: Look, deviation: float) -> Look:
    """Return an earlier window of two ranks with the deviation that is known now, as a share of the base."""
    scale_s = max(deviation, FLOOR) * look.base_s
    flags = {rank: excess_s for rank, excess_s in look.later.items() if excess_s >= Z * scale_s}
    return look._replace(scale_s=scale_s, flags=flags)


def _ranks(rows: Sequence[RankReport]) -> Sequence[int]:
    return rows.ranks if isinstance(rows, Rows) else list(map(_RANK, rows))


def _place(rows: Sequence[RankReport]) -> tuple[int, int, int]:
    row = rows[0]
    return row.window, row.iteration_shown - row.iterations + 1, row.iterations
