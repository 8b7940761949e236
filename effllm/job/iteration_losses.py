"""The times of iterations on all ranks, and what waits for data and long iterations cost all ranks. No I/O.

The ranks of a job leave each iteration together, so one rank that waits makes all of them wait.  In an iteration, a
rank waits w for data, and works o until it waits for others.  Without waits for data, an iteration is shorter by
max(w + o) - max(o) over the ranks; if own times are not known, by max(w).  What remains of an iteration above the
median is lost if the iteration is long: it is a pause, a compilation, or a garbage collection.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, mul
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from effllm.records.columns import Array, Positions
from effllm.records.iteration_times import LONG_RATIO, seconds_of_code
from effllm.records.rank import CHECKPOINT, EVALUATION, OTHER, RankReport
from effllm.records.verdict import SlowIterations

#: Iterations of more than this multiple of the median are nearly long: they count in the upper bound of the loss.
NEARLY_LONG = 1.25
#: Largest number of the newest iterations of which the median is taken, and the smallest number.
MAX_RECENT, MIN_RECENT = 64, 20
#: Long iterations up to this one of an attempt are its warm-up.
LAST_OF_WARMUP = 10
#: Waits of more than this multiple of the median are rare if they are in fewer than this share of the iterations, and
#: have nearly all of the waiting time.
LONG_WAIT, RARE_SHARE, NEARLY_ALL = 0.5, 0.2, 0.8
#: Smallest delay of an iteration by a phase of other ranks, as a share of the median iteration.
MIN_DELAY = 0.1
#: Phases that few ranks may have.
PHASES = (CHECKPOINT, EVALUATION, OTHER)
MAX_NEWEST = 64  # number of the newest iterations whose numbers are stored
#: Maximum number of values of an array, 64 MiB; more columns are joined.
MAX_VALUES = 1 << 23
_TIMES, _SPAN = attrgetter("times"), attrgetter("iteration_first", "iteration_last", "times.each")
_CODES = _STEP_CODES, _WAIT_CODES, _OWN_CODES = attrgetter("steps"), attrgetter("waits"), attrgetter("own")
_SECONDS: Array = np.array([seconds_of_code(code) for code in range(65536)])


class IterationMatrix(NamedTuple):
    """The times of the iterations that most ranks of a window have reported: arrays of ranks x columns, in seconds.

    A column is an iteration; in reports of many iterations, and in large jobs, it is the mean of consecutive ones.
    """

    window: int
    first: int  # ordinal of the first iteration
    first_shown: int
    num_ranks: int  # of the window; a rank without these iterations is not in `rows`
    rows: Sequence[RankReport]  # the ranks of the arrays, in their order
    steps: Array  # from the start of an iteration to its end
    waits: Array  # for data, before the start
    own: Array | None  # from the start to the first wait for other ranks; None if it is not known on a rank
    weights: Array  # number of iterations of each column

    @classmethod
    def of(cls, rows: Sequence[RankReport]) -> IterationMatrix | None:
        """Return the complete times of the most usual iterations; ``None`` without, or if at most half have times."""
        # Of ten thousand rows: only loops in C, if all rows are alike.
        timed = [row for row in rows if row.times is not None] if None in map(_TIMES, rows) else rows
        if 2 * len(timed) <= len(rows):
            return None
        spans = Counter(map(_SPAN, timed))
        first, last, per_column = usual_span = max(spans, key=spans.__getitem__)
        num_iterations = last - first + 1
        num_columns = -(-num_iterations // per_column)
        size = 2 * num_columns  # of the codes of a rank in bytes
        times = list(map(_TIMES, timed))
        sizes = set(zip(*(map(len, map(codes, times)) for codes in _CODES), strict=True))
        if len(spans) > 1 or not sizes <= {(size, waits, own) for waits in (0, size) for own in (0, size)}:
            pairs = zip(timed, times, strict=True)
            timed = [row for row, each in pairs if _SPAN(row) == usual_span and each.is_complete_for(num_iterations)]
            times = list(map(_TIMES, timed))
        if not times or num_iterations < 1:
            return None
        no_waits, has_own = bytes(size), all(map(_OWN_CODES, times))
        weights = np.full(num_columns, float(per_column))
        weights[-1] = num_iterations - per_column * (num_columns - 1)
        # So many columns are joined that an array has at most `MAX_VALUES`.
        starts = np.arange(0, num_columns, -(-len(times) * num_columns // MAX_VALUES))
        return cls(
            window=timed[0].window,
            first=first,
            first_shown=timed[0].iteration_shown - num_iterations + 1,
            num_ranks=len(rows),
            rows=timed,
            steps=_decoded_seconds(map(_STEP_CODES, times), weights, starts),
            waits=_decoded_seconds([codes or no_waits for codes in map(_WAIT_CODES, times)], weights, starts),
            own=_decoded_seconds(map(_OWN_CODES, times), weights, starts) if has_own else None,
            weights=np.add.reduceat(weights, starts),
        )

    @property
    def has_means(self) -> bool:
        """Whether a column has several iterations: then losses are lower bounds."""
        return bool(self.weights[0] > 1)

    def lost_to_data(self, ranks: Positions | None = None) -> Array:
        """Return by how much each iteration is longer because all ranks, or the ranks in these rows, wait for data."""
        other_waits = np.zeros_like(self.waits)
        if ranks is not None:
            other_waits = self.waits.copy()
            other_waits[ranks] = 0.0
        own = 0.0 if self.own is None else self.own
        lost_s: Array = (self.waits + own).max(axis=0) - (other_waits + own).max(axis=0)
        return lost_s


def _decoded_seconds(codes: Iterable[bytes], weights: Array, starts: Positions) -> Array:
    """Return the times of ranks; columns from one of ``starts`` to the next are joined to their weighted mean."""
    if len(starts) == len(weights):
        seconds: Array = _SECONDS[np.frombuffer(b"".join(codes), "<u2")].reshape(-1, len(weights))
        return seconds
    sums = [np.add.reduceat(_SECONDS[np.frombuffer(code, "<u2")] * weights, starts) for code in codes]
    return np.stack(sums) / np.add.reduceat(weights, starts)


class LostTime(NamedTuple):
    """Rank-seconds of a window that belong to another class than its steps."""

    window: int
    data_s: float = 0.0  # what waits for data cost all ranks, less the ranks' own, counted waits; may be negative
    slow_s: float = 0.0  # of long iterations, above the median
    warmup_s: float = 0.0  # the same, in the warm-up
    straggling_s: float = 0.0  # waits of all ranks for slow ranks
    uneven_s: float = 0.0  # other waits of the ranks for each other
    phase: str = ""  # a marked phase of few ranks, and the waits of the other ranks for it
    phase_s: float = 0.0
    is_long: tuple[bool, ...] = ()  # of each iteration of the window; empty until it is known


#: Fields of `LostTime` that are fields of a span of goodput.
LOST_SECONDS = ("data_s", "slow_s", "warmup_s", "straggling_s", "uneven_s")


class Pending(Struct, array_like=True):
    """A window whose long iterations are not known yet."""

    window: int
    first: int  # ordinal of its first iteration
    first_shown: int
    times_s: list[float]  # of its iterations, without waits for data
    waits_s: list[float]  # what waits for data cost in each of them
    ranks: int
    weights: list[float] = []  # number of iterations of each of these times, if one has several


class IterationSums(Struct):
    """Iterations of one kind: their number, time, the longest, and the numbers of the newest."""

    count: int = 0
    seconds: float = 0.0
    worst_s: float = 0.0  # time of the longest
    worst: int = 0  # its number
    newest: list[int] = []  # numbers

    def add_iteration(self, number: int, seconds: float) -> None:
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        self.newest = [*self.newest[1 - MAX_NEWEST :], number]
        if seconds > self.worst_s:
            self.worst_s, self.worst = seconds, number

    @property
    def every(self) -> int:
        """The distance between the iterations, if it is always the same; else 0."""
        distances = {later - earlier for earlier, later in pairwise(self.newest)}
        return distances.pop() if len(distances) == 1 and len(self.newest) > 2 else 0


class IterationLosses(Struct):
    """The long iterations of a job."""

    usual_s: list[float] = []  # times of the newest iterations of this attempt, without waits for data
    pending: list[Pending] = []  # of this attempt
    iterations: int = 0  # judged iterations
    nearly_s: float = 0.0  # what iterations that are nearly long, or follow a long one, take above the median
    is_after_long: bool = False  # whether the last judged iteration was long
    wait_s: float = 0.0  # what waits for data cost in all judged iterations
    in_means: float = 0.0  # number of iterations of which only means are known
    hidden_data_s: float = 0.0  # rank-seconds that waits for data cost at most in them, above the known cost
    long: IterationSums = msgspec.field(default_factory=IterationSums)  # after the warm-up
    waits: IterationSums = msgspec.field(default_factory=IterationSums)  # iterations with long waits

    def begin_attempt(self) -> None:
        self.usual_s, self.pending = [], []

    def add_window(self, matrix: IterationMatrix) -> list[LostTime]:
        """Add the next window; return what this window and earlier ones have lost."""
        phase, delay_s, is_waiting = waits_for_phase(matrix)
        whole_s = matrix.steps + matrix.waits - np.outer(is_waiting, delay_s)  # by rank and column
        lost_s = np.minimum(matrix.lost_to_data(), whole_s)
        ranks_per_row = matrix.num_ranks / len(matrix.rows)  # ranks without times are assumed to be like the others
        data_s = float((lost_s - matrix.waits).sum(axis=0) @ matrix.weights) * ranks_per_row  # see `LostTime`
        if matrix.has_means:  # the waits of the ranks may be in different iterations
            max_lost_s = np.minimum(matrix.waits.sum(axis=0), whole_s)
            hidden_s = np.maximum(max_lost_s - lost_s, 0.0).sum(axis=0) @ matrix.weights
            self.in_means += float(matrix.weights.sum())
            self.hidden_data_s += float(hidden_s) * ranks_per_row
        times_s, waits_s = np.median(whole_s - lost_s, axis=0).tolist(), np.median(lost_s, axis=0).tolist()
        numbers, weights = (matrix.window, matrix.first, matrix.first_shown), matrix.weights.tolist()
        pending = Pending(*numbers, times_s, waits_s, matrix.num_ranks, weights if matrix.has_means else [])
        self.pending.append(pending)
        recent_s = [*self.usual_s, *(time_s for window in self.pending for time_s in window.times_s)]
        phase_s = float(delay_s @ matrix.weights * is_waiting.sum())
        losses = [LostTime(matrix.window, data_s=data_s, phase=phase, phase_s=phase_s)]
        if len(recent_s) >= MIN_RECENT:
            median_s = statistics.median(recent_s)
            losses += [self._judge_window(window, median_s) for window in self.pending]
            self.usual_s, self.pending = recent_s[-MAX_RECENT:], []
        return losses

    def _judge_window(self, window: Pending, median_s: float) -> LostTime:
        """Add the iterations of a window to the sums, and return what its long iterations have lost."""
        slow_s = warmup_s = 0.0
        weights = window.weights or [1] * len(window.times_s)
        self.iterations += round(sum(weights))
        self.wait_s += sum(map(mul, window.waits_s, weights))
        is_long = tuple(time_s > LONG_RATIO * median_s for time_s in window.times_s)
        num_before = map(round, accumulate(weights, initial=0))  # iterations of the window; one more than times
        for before, weight, time_s, wait_s, is_this_long in zip(
            num_before, weights, window.times_s, window.waits_s, is_long, strict=False
        ):
            if wait_s > LONG_WAIT * median_s:
                self.waits.add_iteration(window.first_shown + before, weight * wait_s)
            is_nearly_long = self.is_after_long or time_s > NEARLY_LONG * median_s
            self.is_after_long = is_this_long
            if not is_this_long:  # a rank may end a long iteration after the others, which then wait in the next one
                self.nearly_s += weight * max(time_s - median_s, 0.0) if is_nearly_long else 0.0
            elif window.first + before <= LAST_OF_WARMUP:
                warmup_s += weight * (time_s - median_s)
            else:
                slow_s += weight * (time_s - median_s)
                self.long.add_iteration(window.first_shown + before, time_s)
        return LostTime(window.window, slow_s=slow_s * window.ranks, warmup_s=warmup_s * window.ranks, is_long=is_long)

    def long_iterations(self) -> SlowIterations | None:
        """Return the long iterations after the warm-up; ``None`` without any."""
        return self._slow_iterations(self.long) if self.long.count else None

    def rare_waits(self) -> SlowIterations | None:
        """Return the iterations with nearly all of the waits, if they are few; else ``None``."""
        is_rare = 0 < self.waits.count < RARE_SHARE * self.iterations
        return self._slow_iterations(self.waits) if is_rare and self.waits.seconds > NEARLY_ALL * self.wait_s else None

    def _slow_iterations(self, sums: IterationSums) -> SlowIterations | None:
        """Return these iterations beside the median of all; ``None`` if the attempt has no median yet."""
        if not self.usual_s:
            return None
        median_s = statistics.median(self.usual_s)
        lost_s = sums.seconds - sums.count * median_s
        max_ratio = 1.0 + self.nearly_s / lost_s if lost_s > 0 else 1.0
        return SlowIterations(sums.count, self.iterations, median_s, sums.worst_s, sums.worst, sums.every, max_ratio)


def waits_for_phase(matrix: IterationMatrix) -> tuple[str, Array, Array]:
    """Return a phase of few ranks, the delay of each iteration of the others by it, and 1 for each rank with the delay.

    The ranks leave an iteration together, so while rank 0 writes a checkpoint, the others wait in their steps.
    """
    delay_s, is_waiting = np.zeros(matrix.steps.shape[1]), np.zeros(len(matrix.rows))
    if not any(map(attrgetter("phases_s"), matrix.rows)):
        return "", delay_s, is_waiting
    phases = [{name: row.phases_s.get(name, 0.0) for name in PHASES} for row in matrix.rows]
    phases_s = np.array([sum(by_phase.values()) for by_phase in phases])
    longest = int(phases_s.argmax())  # the row of the rank with the phase
    is_waiting = (phases_s < phases_s[longest] / 2).astype(float)
    if 2 * is_waiting.sum() < len(phases_s):  # most ranks have the phase
        return "", delay_s, is_waiting
    whole_s = matrix.steps + matrix.waits
    longer_s = np.median(whole_s[is_waiting > 0], axis=0) - whole_s[longest]
    delay_s = np.where(longer_s > MIN_DELAY * np.median(whole_s), longer_s, 0.0)
    max_sum_s = phases_s[longest] - np.median(phases_s[is_waiting > 0])  # all delays last at most as long as the phase
    delay_s *= min(max_sum_s / (delay_s @ matrix.weights), 1.0) if delay_s.any() else 0.0
    return max(phases[longest], key=phases[longest].__getitem__), delay_s, is_waiting
