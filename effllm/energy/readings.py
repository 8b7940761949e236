"""The readings of one device as cumulative energy, with the method and the error of each step. No I/O."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from operator import attrgetter
from typing import NamedTuple

from effllm.records.rank import METHODS

NS = 1e-9
_time_ns = attrgetter("time_ns")


class Step(NamedTuple):
    """The energy between two readings."""

    method: str | None  # None for a hole
    joules: float
    variance_j2: float
    is_estimated: bool


HOLE = Step(None, 0.0, 0.0, False)  # a time without a measurement: its energy is unknown


class Point(NamedTuple):
    """A reading: the cumulative energy, and the method of the step before the reading."""

    time_ns: int
    total_j: float
    power_w: float | None
    method: str | None  # method of the step; None for a hole
    is_estimated: bool  # whether the step is
    variance_j2: float  # variance of the step
    holes_ns: int  # running total of time in holes
    estimated_j: float  # running total of the joules of estimated steps
    total_variance_j2: float  # running total of the variances
    min_w: float | None = None  # minimum of the power readings of this point and, after `compact`, of its step
    max_w: float | None = None  # maximum of these power readings
    num_powers: int = 0  # number of these power readings


class Readings(deque[Point]):
    """The readings of one device, oldest first."""

    def starting_at(self, index: int) -> Iterator[Point]:
        return islice(self, index, None)

    def index_at_or_after(self, time_ns: int) -> int:
        return bisect.bisect_left(self, time_ns, key=_time_ns)

    def index_after(self, time_ns: int) -> int:
        return bisect.bisect_right(self, time_ns, key=_time_ns)

    def add_reading(self, time_ns: int, power_w: float | None, step: Step) -> None:
        total_j = estimated_j = total_variance_j2 = 0.0
        holes_ns = 0
        if self:
            last = self[-1]
            total_j, estimated_j, total_variance_j2 = last.total_j, last.estimated_j, last.total_variance_j2
            holes_ns = last.holes_ns + (time_ns - last.time_ns if step.method is None else 0)
        self.append(
            Point(
                time_ns=time_ns,
                total_j=total_j + step.joules,
                power_w=power_w,
                method=step.method,
                is_estimated=step.is_estimated,
                variance_j2=step.variance_j2,
                holes_ns=holes_ns,
                estimated_j=estimated_j + (step.joules if step.is_estimated else 0.0),
                total_variance_j2=total_variance_j2 + step.variance_j2,
                min_w=power_w,
                max_w=power_w,
                num_powers=int(power_w is not None),
            )
        )

    def remove_steps_after(self, time_ns: int) -> Point:
        """Remove the readings after a time, because one step will replace their steps; return the last reading left."""
        while len(self) > 1 and self[-2].time_ns >= time_ns:
            self.pop()
        return self[-1]

    def forget_before(self, time_ns: int) -> None:
        while len(self) > 2 and self[1].time_ns <= time_ns:
            self.popleft()

    def compact(self, edges_ns: Collection[int], until_ns: int, margin_ns: int) -> None:
        """Merge the steps in which no later span can begin or end; running totals stay exact.

        Args:
            edges_ns: times at which a span may begin or end.
            until_ns: any later time is also a possible edge.
            margin_ns: readings within this distance of an edge are kept.
        """
        times_ns = [point.time_ns for point in self]
        for indices in runs_between(times_ns, edges_ns, until_ns, margin_ns):  # the last ones first: all stay valid
            points = list(self)
            first, last = points[indices.start], points[indices.stop - 1]
            methods = {point.method for point in points[indices.start + 1 : indices.stop] if point.method}
            merged = last._replace(
                method=max(methods, key=METHODS.index) if methods else None,
                is_estimated=last.estimated_j - first.estimated_j > (last.total_j - first.total_j) / 2,
                variance_j2=last.total_variance_j2 - first.total_variance_j2,
                min_w=_extreme(min, (point.min_w for point in points[indices.start + 1 : indices.stop])),
                max_w=_extreme(max, (point.max_w for point in points[indices.start + 1 : indices.stop])),
                num_powers=sum(point.num_powers for point in points[indices.start + 1 : indices.stop]),
            )
            self.clear()
            self.extend([*points[: indices.start + 1], merged, *points[indices.stop :]])

    def power_range_w(self, from_ns: int, to_ns: int) -> tuple[float | None, float | None, int]:
        """Return the least and the most power from one time to another, and the number of readings with power."""
        inside = list(islice(self, self.index_at_or_after(from_ns), self.index_after(to_ns)))
        min_w = _extreme(min, (point.min_w for point in inside))
        max_w = _extreme(max, (point.max_w for point in inside))
        return min_w, max_w, sum(point.num_powers for point in inside)

    def mean_w(self, index: int, tick_s: float) -> float:
        """Return the mean power around a step, over at least two ticks, because a counter jumps once in each tick."""
        first = second = index
        tick_ns = tick_s / NS
        while first > 0 and (first == second or self[index].time_ns - self[first].time_ns < tick_ns):
            first -= 1
        while second < len(self) - 1 and self[second].time_ns - self[index].time_ns < tick_ns:
            second += 1
        span_ns = self[second].time_ns - self[first].time_ns
        return (self[second].total_j - self[first].total_j) / (span_ns * NS)

    def holes_until_ns(self, time_ns: int) -> int:
        point = self[min(self.index_at_or_after(time_ns), len(self) - 1)]
        return point.holes_ns - (0 if point.method else max(point.time_ns - time_ns, 0))

    def estimated_part_j(self, total_j: float) -> float:  # of the first `total_j` joules
        index = bisect.bisect_left(self, total_j, key=lambda point: point.total_j)
        point = self[min(index, len(self) - 1)]
        return point.estimated_j - (max(point.total_j - total_j, 0.0) if point.is_estimated else 0.0)

    def variance_until_j2(self, time_ns: int) -> float:
        index = self.index_at_or_after(time_ns)
        if index >= len(self):
            return self[-1].total_variance_j2
        point = self[index]
        if index == 0:
            return point.total_variance_j2
        before = self[index - 1]
        share_after = (point.time_ns - time_ns) / (point.time_ns - before.time_ns)
        return point.total_variance_j2 - share_after * point.variance_j2

    def coarsest_method(self, from_ns: int, to_ns: int) -> str | None:
        used = {
            point.method
            for before, point in pairwise(self)
            if point.method and point.time_ns > from_ns and before.time_ns < to_ns
        }
        return max(used, key=METHODS.index) if used else None


def runs_between(times_ns: Sequence[int], edges_ns: Collection[int], until_ns: int, margin_ns: int) -> Iterator[range]:
    """Yield ranges of indices: at least three consecutive times, each further than a margin from every edge.

    The last range comes first, so that the next ranges stay valid after its times are removed.  It ends a margin before
    ``until_ns``.
    """
    bounds = sorted({min(edge_ns, until_ns) for edge_ns in edges_ns} | {until_ns})
    for before_ns, after_ns in reversed(list(pairwise([-margin_ns, *bounds]))):
        start = bisect.bisect_right(times_ns, before_ns + margin_ns)
        stop = bisect.bisect_left(times_ns, after_ns - margin_ns)
        if stop - start >= 3:
            yield range(start, stop)


def _extreme(min_or_max: Callable[..., float | None], values: Iterable[float | None]) -> float | None:
    return min_or_max((value for value in values if value is not None), default=None)
