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
#: Profiled iterations that are longer than the mean by this factor are not typical: they show nothing of the others.
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
    """The time that each rank of a job loses in a window because other ranks work longer, and upper bounds (``max_``).

    An own time ends at the first wait for other ranks.  A rank that is slow before may be slow after it too, in the
    same proportion, so the bounds are for own times as long as the iteration.  If only the mean of several iterations
    is known, the bound is for half of the ranks working for the whole of each iteration, and the others little.
    """

    straggling_s: float = 0.0  # waits for named ranks
    uneven_s: float = 0.0  # waits for other ranks
    max_straggling_s: float = 0.0
    max_uneven_s: float = 0.0
    last_s: Sequence[float] = ()  # by place: the wait of each rank for this one while it was the last one, at most

    @classmethod
    def of(cls, times: Times, groups: Sequence[Positions], named: Positions) -> Waits:
        """Return the waits of the ranks in groups with the same work; ``named`` are the places of the slow ranks."""
        iteration_s = times.iterations_s  # like all times here, by column and per iteration
        slow_s, uneven_s, max_slow_s, max_uneven_s = np.zeros((4, len(times.weights)))
        last_s = np.zeros(len(times.ranks))
        for group in groups:
            own_s = times.values[group]
            ordered = np.sort(own_s, axis=0)
            others = np.sort(own_s[~np.isin(group, named)], axis=0) if len(named) else ordered
            # The lower median of two: if half of the ranks are slow, the other half is not.
            max_s, median_s = ordered[-1], ordered[(len(own_s) - 1) // 2]
            next_s = np.maximum(others[-1], median_s) if len(others) else median_s  # longest without the named ranks
            factor = np.divide(iteration_s, max_s, out=np.ones_like(max_s), where=max_s > 0)
            factor = np.maximum(factor, 1.0)
            after_s = (factor - 1.0) * (max_s - median_s)  # what the slowest rank may lose after the own time
            slow_s = np.maximum(slow_s, max_s - next_s)
            max_slow_s = np.maximum(max_slow_s, np.where(max_s > next_s, max_s - next_s + after_s, 0.0))
            # For the last rank, the others wait from the end of the second to last one.
            waits_s = np.minimum(max_s - ordered[-2:][0] + after_s, iteration_s) * times.weights
            last_s[group] += np.bincount(own_s.argmax(axis=0), waits_s, minlength=len(group))
            mean_s = others.mean(axis=0) if len(others) else median_s
            share = len(group) / len(times.ranks)
            uneven_s += share * np.maximum(next_s - mean_s, 0.0)
            # If one rank in turn works longer, the others show the time without it.
            usual_s = others[(len(others) - 1) // 2] if len(others) else median_s
            max_wait_s = (next_s - np.minimum(usual_s, mean_s)) * factor
            if times.weights.max() > 1:
                half = len(others) // 2 / max(len(others), 1)  # ranks that may work for the whole iteration
                usual_s = np.maximum((mean_s - half * iteration_s) / (1.0 - half), 0.0)  # of the others
                max_wait_s = np.where(times.weights > 1, iteration_s - usual_s, max_wait_s)
            max_uneven_s += share * np.maximum(max_wait_s, 0.0)
        slow_s = np.minimum(slow_s, iteration_s)
        uneven_s = np.minimum(uneven_s, iteration_s - slow_s)
        bounds_s = np.minimum(max_slow_s, iteration_s), np.minimum(max_uneven_s, iteration_s)
        return cls(*(np.stack([slow_s, uneven_s, *bounds_s]) @ times.weights).tolist())._replace(last_s=last_s.tolist())


class _Counted(NamedTuple):
    times: Times  # own times of a window
    groups: Sequence[Positions]
    num_ranks: int
    waits: Waits  # counted so far


class CountedWaits:
    """The waits of the ranks for each other, and the ranks that were the last ones."""

    def __init__(self, last_ranks: LastRanks) -> None:
        self.last_ranks = last_ranks  # sums over the run
        self.last: dict[int, float] = {}  # of the newest window: rank -> number of iterations in which it was last
        self._kept: dict[int, _Counted] = {}  # by window: those whose waits may be counted again

    def count_waits(
        self, own: Times, groups: Sequence[Positions], num_ranks: int, slow: Collection[int], since: int | None
    ) -> tuple[list[LostTime], float, float]:
        """Add a window; return its losses, the wait of each rank for slow ranks in it, and an upper bound of all waits.

        If there is a new slow rank, the waits for slow ranks in earlier windows are counted again from the iteration
        ``since``: losses of these windows are the changes, and the bound includes them.
        """
        after = math.inf if since is None else since
        recounted = [kept for kept in self._kept.values() if kept.times.shown + kept.times.weights.sum() > after]
        lost, bound_s, waits = [], 0.0, Waits()
        for window in (*recounted, _Counted(own, groups, num_ranks, waits)):
            waits, earlier = Waits.of(window.times, window.groups, _places(window.times.ranks, slow)), window.waits
            straggling_s = (waits.straggling_s - earlier.straggling_s) * window.num_ranks
            uneven_s = (waits.uneven_s - earlier.uneven_s) * window.num_ranks
            lost.append(LostTime(window.times.window, straggling_s=straggling_s, uneven_s=uneven_s))
            bound_s += waits.max_straggling_s - earlier.max_straggling_s
            max_uneven_s = (waits.max_uneven_s - earlier.max_uneven_s) * window.num_ranks
            self.last_ranks = replace(self.last_ranks, max_uneven_s=self.last_ranks.max_uneven_s + max_uneven_s)
            self._keep(window._replace(waits=waits))
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
        """Add the waits of the ranks for each other in profiled iterations, whose times are from `in_profiles`.

        Long iterations do not count; ``has_long`` means that some of the window are long.  Means of several profiled
        iterations show less waits than these have, by the factor that own times show.
        """
        counts = [row.profile.iterations for row in rows if row.profile is not None]
        usual_s = float(np.median([row.busy_s / row.iterations for row in rows]))
        is_long = has_long if max(counts) > 1 else profiled.iterations_s[0] > LONG_RATIO * usual_s
        if is_long:
            return
        named, iterations = _places(profiled.ranks, slow), sum(counts)
        last, uneven_s = self.last_ranks, Waits.of(profiled, groups, named).uneven_s
        if own is not None and list(own.ranks) == list(profiled.ranks):
            factor = _factor_hidden_by_means(own, groups, named, max(counts))
            uneven_s = min(uneven_s * factor, float(profiled.iterations_s[0]))
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
        """Add the numbers of iterations in which each rank was the last one, and the waits of all others for it."""
        by_place = np.bincount(own.values.argmax(axis=0), own.weights, minlength=len(own.ranks))
        self.last = {own.ranks[place]: float(by_place[place]) for place in np.flatnonzero(by_place).tolist()}
        self.last_ranks = self.last_ranks.with_more(
            float(own.weights.sum()),
            self.last,
            {rank: wait_s for rank, wait_s in zip(own.ranks, waits_s, strict=True) if wait_s},
        )


def _places(ranks: Sequence[int], chosen: Collection[int]) -> Positions:
    """Return the indices of the chosen ranks in ``ranks``."""
    return np.array([place for place, rank in enumerate(ranks) if rank in chosen], np.intp)


def _factor_hidden_by_means(own: Times, groups: Sequence[Positions], named: Positions, num_joined: int) -> float:
    """Return the waits in single iterations divided by those in means of ``num_joined``, from 1 to ``num_joined``."""
    count = len(own.weights) // num_joined * num_joined
    if num_joined < 2 or not count or own.weights.max() > 1:
        return 1.0
    values, iterations_s = own.values[:, :count], own.iterations_s[:count]
    single = own._replace(values=values, weights=np.ones(count), iterations_s=iterations_s)
    joined = own._replace(
        values=values.reshape(len(values), -1, num_joined).mean(axis=2),
        weights=np.full(count // num_joined, float(num_joined)),
        iterations_s=iterations_s.reshape(-1, num_joined).mean(axis=1),
    )
    single_s, in_means_s = (Waits.of(times, groups, named).uneven_s for times in (single, joined))
    return min(max(single_s / in_means_s, 1.0), float(num_joined)) if in_means_s > 0 else 1.0


def by_iteration(matrix: IterationMatrix, is_long: Sequence[bool]) -> Times | None:
    """Return the own times of all iterations but the long ones; ``None`` without own times or such iterations."""
    num_columns = matrix.steps.shape[1]
    is_used = ~np.array(is_long, bool) if len(is_long) == num_columns else np.ones(num_columns, bool)
    if matrix.own is None or not is_used.any():
        return None
    ranks = [row.rank for row in matrix.rows]
    own, weights, whole_s = matrix.own[:, is_used], matrix.weights[is_used], (matrix.steps + matrix.waits)[:, is_used]
    return Times(matrix.window, matrix.first_shown, ranks, own, weights, np.median(whole_s, axis=0))


def by_window(rows: Sequence[RankReport], is_on_device: bool) -> Times | None:
    """Return the mean own times of a window, on the device or on the host; ``None`` if they are not known on a rank."""
    names = ("device_own_steps", "device_own_step_s") if is_on_device else ("own_steps", "own_step_s")
    steps, seconds = fields_of(rows, names).T
    if not steps.all():
        return None
    return _mean_times(rows, seconds / steps)


def in_profiles(rows: Sequence[RankReport]) -> Times | None:
    """Return the time of profiled iterations without exposed communication; ``None`` if less than two ranks have it.

    The rank for which the others wait has the shortest waits inside its collectives, also with FSDP and TP.
    """
    profiled = [(row, row.profile) for row in rows if row.profile is not None and row.profile.iterations]
    if len(profiled) < 2:
        return None
    values = [(profile.time_s - profile.exposed_s) / profile.iterations for _, profile in profiled]
    iteration_s = np.median([profile.time_s / profile.iterations for _, profile in profiled])
    times = _mean_times([row for row, _ in profiled], np.array(values))
    return times._replace(weights=np.ones(1), iterations_s=np.array([iteration_s]))


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
    """Return one time per rank, the mean of its iterations in a window, as `Times` with one column."""
    row = rows[0]
    time_s, iterations = fields_of(rows, ("time_s", "iterations")).T
    iterations_s, weights = np.array([np.median(time_s / iterations)]), np.array([float(row.iterations)])
    shown = row.iteration_shown - row.iterations + 1
    return Times(row.window, shown, [report.rank for report in rows], values[:, None], weights, iterations_s)
