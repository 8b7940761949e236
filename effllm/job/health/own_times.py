"""The own times and data waits of ranks in a window, and the waits of the ranks for each other. No I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from effllm.job.iteration_losses import IterationMatrix, LostTime
from effllm.records.columns import Array, Positions, fields_of
from effllm.records.iteration_times import LONG_RATIO
from effllm.records.rank import RankReport
from effllm.records.verdict import LastRanks

#: Maximum size of the kept own times, with which the waits for a newly named rank are computed in earlier windows.
MAX_KEPT_BYTES = 1 << 24
#: Profiled iterations that are longer than the mean by this factor say nothing about the others.
UNLIKE = 1.25


class Times(NamedTuple):
    """One kind of time of the ranks of a window: by iteration, or the means of the window."""

    window: int
    shown: int  # displayed number of the first iteration
    ranks: Sequence[int]
    values: Array  # ranks x columns, in seconds per iteration
    weights: Array  # number of iterations of each column
    iterations_s: Array  # duration of an iteration in each column


class Waits(NamedTuple):
    """The time that each rank of a job loses in a window because other ranks work longer; with upper bounds.

    An own time ends at the first wait for other ranks.  A rank that is slow before may be slow after it too, in the
    same proportion, so the bounds are for own times as long as the iteration.  Of several iterations only the mean is
    known: at most, half of the ranks work for the whole of each iteration.
    """

    straggling_s: float = 0.0  # waits for named ranks
    uneven_s: float = 0.0  # waits for other ranks
    max_straggling_s: float = 0.0
    max_uneven_s: float = 0.0
    last_s: Sequence[float] = ()  # by place: the wait of each rank for this one while it was the last one, at most

    @classmethod
    def of(cls, times: Times, groups: Sequence[Positions], named: Positions) -> Waits:
        """Return the waits of the ranks in groups with the same work; ``named`` are the places of the slow ranks."""
        slow, uneven, max_slow, max_uneven = np.zeros((4, len(times.weights)))
        last_s = np.zeros(len(times.ranks))
        for group in groups:
            own = times.values[group]
            ordered = np.sort(own, axis=0)
            others = np.sort(own[~np.isin(group, named)], axis=0) if len(named) else ordered
            # The lower median of two: if half of the ranks are slow, the other half is not.
            most, median = ordered[-1], ordered[(len(own) - 1) // 2]
            next_s = np.maximum(others[-1], median) if len(others) else median
            longer = np.divide(times.iterations_s, most, out=np.ones_like(most), where=most > 0)
            longer = np.maximum(longer, 1.0)
            hidden = (longer - 1.0) * (most - median)
            slow = np.maximum(slow, most - next_s)
            max_slow = np.maximum(max_slow, np.where(most > next_s, most - next_s + hidden, 0.0))
            # For the last rank, the others wait from the end of the second to last one.
            waits = np.minimum(most - ordered[-2:][0] + hidden, times.iterations_s) * times.weights
            last_s[group] += np.bincount(own.argmax(axis=0), waits, minlength=len(group))
            mean = others.mean(axis=0) if len(others) else median
            share = len(group) / len(times.ranks)
            uneven += share * np.maximum(next_s - mean, 0.0)
            # If one rank in turn works longer, the others show the time without it.
            usual = others[(len(others) - 1) // 2] if len(others) else median
            each_s = (next_s - np.minimum(usual, mean)) * longer
            if times.weights.max() > 1:
                half = len(others) // 2 / max(len(others), 1)  # ranks that may work for the whole iteration
                usual = np.maximum((mean - half * times.iterations_s) / (1.0 - half), 0.0)
                each_s = np.where(times.weights > 1, times.iterations_s - usual, each_s)
            max_uneven += share * np.maximum(each_s, 0.0)
        whole_s = times.iterations_s
        slow = np.minimum(slow, whole_s)
        uneven = np.minimum(uneven, whole_s - slow)
        waits_s = np.stack([slow, uneven, np.minimum(max_slow, whole_s), np.minimum(max_uneven, whole_s)])
        straggling_s, uneven_s, max_straggling_s, max_uneven_s = (waits_s @ times.weights).tolist()
        return cls(straggling_s, uneven_s, max_straggling_s, max_uneven_s, last_s.tolist())


class _Counted(NamedTuple):
    times: Times
    groups: Sequence[Positions]
    num_ranks: int
    waits: Waits


class CountedWaits:
    """The waits of the ranks for each other, and the ranks that were the last ones."""

    def __init__(self, last_ranks: LastRanks) -> None:
        self.last_ranks = last_ranks
        self.last: dict[int, float] = {}  # of the newest window: rank -> number of iterations in which it was last
        self._kept: dict[int, _Counted] = {}  # by window

    def count(
        self, own: Times, groups: Sequence[Positions], num_ranks: int, slow: Collection[int], since: int | None
    ) -> tuple[list[LostTime], float, float]:
        """Add a window; return the losses, and the wait of each rank for slow ranks in it, and at most in all of them.

        If there is a new slow rank, the waits for slow ranks are counted again from the iteration ``since``.
        """
        after = math.inf if since is None else since
        again = [kept for kept in self._kept.values() if kept.times.shown + kept.times.weights.sum() > after]
        lost, bound_s, waits = [], 0.0, Waits()
        for one in (*again, _Counted(own, groups, num_ranks, waits)):
            waits, old = Waits.of(one.times, one.groups, _places(one.times.ranks, slow)), one.waits
            more_s, uneven_s = waits.straggling_s - old.straggling_s, waits.uneven_s - old.uneven_s
            lost.append(
                LostTime(one.times.window, straggling_s=more_s * one.num_ranks, uneven_s=uneven_s * one.num_ranks)
            )
            bound_s += waits.max_straggling_s - old.max_straggling_s
            more_s = (waits.max_uneven_s - old.max_uneven_s) * one.num_ranks
            self.last_ranks = replace(self.last_ranks, max_uneven_s=self.last_ranks.max_uneven_s + more_s)
            self._keep(one._replace(waits=waits))
        self._count_last(own, [seconds * num_ranks for seconds in waits.last_s])
        return lost, waits.straggling_s, bound_s

    def count_profiles(
        self,
        profiled: Times,
        own: Times | None,
        rows: Sequence[RankReport],
        groups: Sequence[Positions],
        slow: Collection[int],
        has_long: bool,
    ) -> None:
        """Add the profiled iterations of a window, by their times of `in_profiles`, if they are not long.

        Without the waits in communication, an own time is a whole iteration.  Means of several profiled iterations
        show less waits than these have, by the factor that own times show.
        """
        counts = [row.profile.iterations for row in rows if row.profile is not None]
        usual_s = float(np.median([row.busy_s / row.iterations for row in rows]))
        if has_long if max(counts) > 1 else profiled.iterations_s[0] > LONG_RATIO * usual_s:
            return
        named, iterations = _places(profiled.ranks, slow), sum(counts)
        last, uneven_s = self.last_ranks, Waits.of(profiled, groups, named).uneven_s
        if own is not None and list(own.ranks) == list(profiled.ranks):
            uneven_s = min(
                uneven_s * _factor_hidden_by_means(own, groups, named, max(counts)), float(profiled.iterations_s[0])
            )
        self.last_ranks = replace(
            last,
            profiled_s=last.profiled_s + float(profiled.iterations_s.mean()) * iterations,
            profiled_uneven_s=last.profiled_uneven_s + uneven_s * iterations,
        )

    def _keep(self, counted: _Counted) -> None:
        self._kept[counted.times.window] = counted
        while len(self._kept) > 1 and sum(kept.times.values.nbytes for kept in self._kept.values()) > MAX_KEPT_BYTES:
            del self._kept[min(self._kept)]

    def _count_last(self, own: Times, waits_s: Sequence[float]) -> None:
        by_place = np.bincount(own.values.argmax(axis=0), own.weights, minlength=len(own.ranks))
        self.last = {own.ranks[place]: float(by_place[place]) for place in np.flatnonzero(by_place).tolist()}
        self.last_ranks = self.last_ranks.with_more(
            float(own.weights.sum()),
            self.last,
            {rank: wait_s for rank, wait_s in zip(own.ranks, waits_s, strict=True) if wait_s},
        )


def _places(ranks: Sequence[int], chosen: Collection[int]) -> Positions:
    return np.array([place for place, rank in enumerate(ranks) if rank in chosen], np.intp)


def _factor_hidden_by_means(own: Times, groups: Sequence[Positions], named: Positions, size: int) -> float:
    """Return by which factor the waits in single iterations exceed those in means of ``size`` of them, at most that."""
    count = len(own.weights) // size * size
    if size < 2 or not count or own.weights.max() > 1:
        return 1.0
    values, whole_s = own.values[:, :count], own.iterations_s[:count]
    single = Waits.of(own._replace(values=values, weights=np.ones(count), iterations_s=whole_s), groups, named).uneven_s
    joined = own._replace(
        values=values.reshape(len(values), -1, size).mean(axis=2),
        weights=np.full(count // size, float(size)),
        iterations_s=whole_s.reshape(-1, size).mean(axis=1),
    )
    in_means = Waits.of(joined, groups, named).uneven_s
    return min(max(single / in_means, 1.0), float(size)) if in_means > 0 else 1.0


def by_iteration(matrix: IterationMatrix, is_long: Sequence[bool]) -> Times | None:
    """Return the own times of all iterations but the long ones; ``None`` without own times or such iterations."""
    there = ~np.array(is_long, bool) if len(is_long) == matrix.steps.shape[1] else np.ones(matrix.steps.shape[1], bool)
    if matrix.own is None or not there.any():
        return None
    ranks = [row.rank for row in matrix.rows]
    whole_s = np.median(matrix.steps + matrix.waits, axis=0)[there]
    return Times(matrix.window, matrix.first_shown, ranks, matrix.own[:, there], matrix.weights[there], whole_s)


def by_window(rows: Sequence[RankReport], is_on_device: bool) -> Times | None:
    """Return the mean own times of a window, on the device or on the host; ``None`` if they are not known on a rank."""
    names = ("device_own_steps", "device_own_step_s") if is_on_device else ("own_steps", "own_step_s")
    steps, seconds = fields_of(rows, names).T
    if not steps.all():
        return None
    return _mean_times(rows, seconds / steps)


def in_profiles(rows: Sequence[RankReport]) -> Times | None:
    """Return the time of profiled iterations without communication alone; ``None`` if less than two ranks have it.

    The rank for which the others wait has the shortest waits inside its collectives, also with FSDP and TP.
    """
    profiled = [(row, row.profile) for row in rows if row.profile is not None and row.profile.iterations]
    if len(profiled) < 2:
        return None
    values = [(profile.time_s - profile.exposed_s) / profile.iterations for _, profile in profiled]
    whole_s = np.median([profile.time_s / profile.iterations for _, profile in profiled])
    times = _mean_times([row for row, _ in profiled], np.array(values))
    return times._replace(weights=np.ones(1), iterations_s=np.array([whole_s]))


def data_waits(rows: Sequence[RankReport], matrix: IterationMatrix | None) -> Times:
    """Return the waits for data by which ranks delay the others.

    If only the iterations of the waiting rank are longer, the ranks do not train together, and no rank is delayed.
    """
    if matrix is None:
        iterations, wait_s, busy_s = fields_of(rows, ("iterations", "wait_s", "busy_s")).T
        whole = (wait_s + busy_s) / iterations
        return _mean_times(rows, wait_s / iterations - np.maximum(whole - np.median(whole), 0.0))
    whole = matrix.steps + matrix.waits
    usual_s = np.median(whole, axis=0)
    ranks = [row.rank for row in matrix.rows]
    values = np.maximum(matrix.waits - np.maximum(whole - usual_s, 0.0), 0.0)
    return Times(matrix.window, matrix.first_shown, ranks, values, matrix.weights, usual_s)


def _mean_times(rows: Sequence[RankReport], values: Array) -> Times:
    row = rows[0]
    time_s, iterations = fields_of(rows, ("time_s", "iterations")).T
    whole_s, weights = np.array([np.median(time_s / iterations)]), np.array([float(row.iterations)])
    shown = row.iteration_shown - row.iterations + 1
    return Times(row.window, shown, [report.rank for report in rows], values[:, None], weights, whole_s)
