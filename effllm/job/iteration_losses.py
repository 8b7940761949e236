"""The time that waits for data and long iterations cost all ranks, iteration by iteration. No I/O.

The ranks of a job leave each iteration together, so one rank that waits makes all of them wait.  In iteration i, rank r
waits w for data, and works o until it waits for others.  Without waits for data, the iteration is shorter by
max(w + o) - max(o) over the ranks; if own times are not known, by max(w).  What remains of an iteration above the
median is lost if the iteration is long: it is a pause, a compilation, or a garbage collection.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from effllm.records.columns import Array
from effllm.records.iteration_times import seconds_of_code
from effllm.records.rank import RankReport
from effllm.records.verdict import SlowIterations

#: An iteration is long if it takes more than this multiple of the median.  Iterations of a healthy job differ by a
#: standard deviation of up to 0.4 (log-normal), with which 1 % of them are longer.
LONG = 2.5
#: Number of the newest iterations of which the median is taken, and the smallest number.
KEPT, MIN_KEPT = 256, 20
#: Long iterations up to this one of an attempt are its warm-up.
WARMUP = 10
#: Waits of more than this multiple of the median are rare if they are in fewer than this share of the iterations, and
#: have nearly all of the waiting time.
WAIT, RARE, NEARLY_ALL = 0.5, 0.2, 0.8
MAX_PLACES = 64  # number of the newest iterations whose numbers are stored

_SECONDS: Array = np.array([seconds_of_code(code) for code in range(65536)])


class Lost(NamedTuple):
    """Rank-seconds of a window that belong to another class than its steps and waits."""

    window: int
    data_s: float = 0.0  # waits for data, of all ranks for all ranks, above the ranks' own waits; may be negative
    slow_s: float = 0.0
    warmup_s: float = 0.0


class Pending(Struct, array_like=True):
    """A window whose long iterations are not known yet."""

    window: int
    first: int  # ordinal of its first iteration
    first_shown: int
    times_s: list[float]  # of its iterations, without waits for data
    waits_s: list[float]  # what waits for data cost in each of them
    ranks: int


class Places(Struct):
    """Iterations of one kind: their number, time, the longest, and the numbers of the newest."""

    count: int = 0
    seconds: float = 0.0
    worst_s: float = 0.0
    worst: int = 0
    newest: list[int] = []

    def add(self, number: int, seconds: float) -> None:
        self.count, self.seconds = self.count + 1, self.seconds + seconds
        self.newest = [*self.newest[1 - MAX_PLACES :], number]
        if seconds > self.worst_s:
            self.worst_s, self.worst = seconds, number

    @property
    def every(self) -> int:
        """The distance between the iterations, if it is always the same; else 0."""
        apart = {later - earlier for earlier, later in pairwise(self.newest)}
        return apart.pop() if len(apart) == 1 and len(self.newest) > 2 else 0


class IterationLosses(Struct):
    """The long iterations of a job."""

    usual_s: list[float] = []  # the newest iterations of this attempt, without waits for data
    pending: list[Pending] = []  # of this attempt
    iterations: int = 0  # judged iterations
    wait_s: float = 0.0  # what waits for data cost in all of them
    long: Places = msgspec.field(default_factory=Places)  # after the warm-up
    waits: Places = msgspec.field(default_factory=Places)  # iterations with long waits

    def begin_attempt(self) -> None:
        self.usual_s, self.pending = [], []

    def close(self, rows: Sequence[RankReport], late: Collection[int]) -> list[Lost]:
        """Add the next window; return what this window and earlier ones have lost.

        Args:
            rows: the reports of the ranks.
            late: ranks whose longer waits for data are counted as theirs.
        """
        found = times_of(rows, late)
        if found is None:
            return []
        times_s, waits_s = found.rest_s.tolist(), found.lost_s.tolist()
        self.pending.append(Pending(found.window, found.first, found.first_shown, times_s, waits_s, found.ranks))
        known = [*self.usual_s, *(time_s for one in self.pending for time_s in one.times_s)]
        lost = [Lost(found.window, data_s=found.data_s)]
        if len(known) >= MIN_KEPT:
            usual_s = statistics.median(known)
            lost += [self._judge(one, usual_s) for one in self.pending]
            self.usual_s, self.pending = known[-KEPT:], []
        return lost

    def _judge(self, window: Pending, usual_s: float) -> Lost:
        slow_s = warmup_s = 0.0
        self.iterations += len(window.times_s)
        self.wait_s += sum(window.waits_s)
        for at, (time_s, wait_s) in enumerate(zip(window.times_s, window.waits_s, strict=True)):
            if wait_s > WAIT * usual_s:
                self.waits.add(window.first_shown + at, wait_s)
            if time_s <= LONG * usual_s:
                continue
            if window.first + at <= WARMUP:
                warmup_s += time_s - usual_s
            else:
                slow_s += time_s - usual_s
                self.long.add(window.first_shown + at, time_s)
        return Lost(window.window, slow_s=slow_s * window.ranks, warmup_s=warmup_s * window.ranks)

    def summary(self) -> SlowIterations | None:
        """Return the long iterations after the warm-up; ``None`` without any."""
        return self._summary(self.long) if self.long.count else None

    def rare_waits(self) -> SlowIterations | None:
        """Return the iterations with nearly all of the waits, if they are few; else ``None``."""
        is_rare = 0 < self.waits.count < RARE * self.iterations
        return self._summary(self.waits) if is_rare and self.waits.seconds > NEARLY_ALL * self.wait_s else None

    def _summary(self, found: Places) -> SlowIterations | None:
        if not self.usual_s:
            return None
        median_s = statistics.median(self.usual_s)
        return SlowIterations(found.count, self.iterations, median_s, found.worst_s, found.worst, found.every)


class WindowTimes(NamedTuple):
    """The times of the iterations of a window."""

    window: int
    first: int
    first_shown: int
    ranks: int
    rest_s: Array  # by iteration: the median rank's time without waits for data
    lost_s: Array  # by iteration: what waits for data cost the median rank
    data_s: float  # as in `Lost`


def times_of(rows: Sequence[RankReport], late: Collection[int] = ()) -> WindowTimes | None:
    """Return the times of the iterations that most ranks have reported; ``None`` if they are not known."""
    timed = [row for row in rows if row.times and row.times.is_of(row.iterations)]
    spans = [(row.iteration_first, row.iteration_last) for row in timed]
    if not timed or 2 * len(timed) <= len(rows):
        return None
    span = max(set(spans), key=spans.count)
    timed = [row for row, one in zip(timed, spans, strict=True) if one == span]
    count = span[1] - span[0] + 1
    steps, waits = _matrix((row.times.steps for row in timed if row.times), count), np.zeros((len(timed), count))
    for at, row in enumerate(timed):
        if row.times and row.times.waits:
            waits[at] = _matrix((row.times.waits,), count)[0]
    whole = steps + waits
    others = np.array([row.rank not in late for row in timed])
    lost = _lost_to_data(rows=timed, waits=waits, others=others) if others.any() else np.zeros(count)
    lost = np.minimum(lost, whole)  # by rank and iteration
    shown = timed[0].iteration_shown - count + 1
    data_s = float((lost - waits).sum()) * len(rows) / len(timed)
    rest_s, lost_s = np.median(whole - lost, axis=0), np.median(lost, axis=0)
    return WindowTimes(timed[0].window, span[0], shown, len(rows), rest_s, lost_s, data_s)


def _lost_to_data(rows: Sequence[RankReport], waits: Array, others: Array) -> Array:
    """Return by how much each iteration is longer because ranks wait for data."""
    if not all(row.times and row.times.own for row in rows):
        most: Array = waits[others].max(axis=0)
        return most
    own = _matrix((row.times.own for row in rows if row.times), waits.shape[1])
    with_waits = np.where(others[:, None], waits + own, own).max(axis=0)
    lost: Array = with_waits - own.max(axis=0)
    return lost


def _matrix(codes: Iterable[bytes], count: int) -> Array:
    found: Array = _SECONDS[np.frombuffer(b"".join(codes), "<u2")].reshape(-1, count)
    return found
