"""The times at which an energy counter changes, estimated from the reads before and after each change. No I/O.

A GPU's counter changes about every 100 ms, at unknown times.  A pair of reads with different values bounds the time of
one change.  All bounds together give an interval for the phase of the ticks and one for their period.  Every further
pair narrows both intervals.  The estimate consists of all phases and periods that explain the reads.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from effllm.records.rank import Sample

#: Minimal number of changes from which a period is derived.
MIN_MOVES = 4
#: A counter that changes between almost all reads is continuous only if the reads are at most this far apart.
DENSE_S = 0.006
#: Minimal number of changes that show whether the power reading is held; with fewer, the hardware table decides.
MIN_CHANGES = 8
#: Longest time for which a GPU holds a power reading; slower changes come from the load.
MAX_POWER_TICK_S = 0.12

#: The assumed jitter of ticks after reads have contradicted each other.
MIN_JITTER_NS = 100_000.0
#: The longest time over which the period is measured, because clocks drift with temperature.
LEVER_NS = 300e9


def tick_of(readings: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the seconds of a counter's period, and the half-width of their error; ``None`` if no period is found.

    Each change is bounded by two reads (times in ns, and joules), and the period must explain all changes.  A counter
    that changed between almost all reads is continuous and has the period 0.
    """
    reads = [(first[0], second[0], first[1] != second[1]) for first, second in pairwise(readings)]
    moves = [(after, until) for after, until, has_moved in reads if has_moved]
    if len(moves) < MIN_MOVES:
        return None
    apart_ns = statistics.median(until - after for after, until, _ in reads)
    if len(moves) > 0.6 * len(reads):
        return (0.0, 0.0) if apart_ns <= DENSE_S * 1e9 else None
    roughly_ns = statistics.median(later - earlier for (earlier, _), (later, _) in pairwise(moves))
    runs = _uninterrupted_changes(reads, max(min(1.5 * apart_ns, 0.9 * roughly_ns), 0.5 * roughly_ns))
    steps = [(after + until - since - before) / 2 for run in runs for (since, before), (after, until) in pairwise(run)]
    if not steps:
        return None
    period_ns = statistics.fmean(steps)
    min_ns, max_ns = 0.5 * period_ns, 1.5 * period_ns
    numbered: list[tuple[int, int, int]] = []  # number of each change, and its bounds
    for run in runs:
        for i, (after, until) in enumerate(run):
            count = 1 if i or not numbered else _ticks_between(numbered[-1], (after, until), min_ns, max_ns)
            if count is None:
                numbered = []  # the numbers begin again
            number = numbered[-1][0] + count if numbered and count else 0
            for earlier, since, before in numbered:
                min_ns = max(min_ns, (after - before) / (number - earlier))
                max_ns = min(max_ns, (until - since) / (number - earlier))
            numbered.append((number, after, until))
    if min_ns > max_ns:  # the ticks' jitter is larger than the time between reads
        return period_ns / 1e9, max((min_ns - max_ns) / 2, 0.002 * period_ns) / 1e9
    return (min_ns + max_ns) / 2e9, max((max_ns - min_ns) / 2e9, 1e-7)


def _uninterrupted_changes(reads: Sequence[tuple[int, int, bool]], max_ns: float) -> list[list[tuple[int, int]]]:
    """Return the changes in parts: a delayed read begins a new part, so the changes of a part are one tick apart."""
    runs: list[list[tuple[int, int]]] = [[]]
    for after, until, has_moved in reads:
        if has_moved and until - after > max_ns:  # more than one change is possible
            runs.append([])
        elif has_moved:
            runs[-1].append((after, until))
    return runs


def _ticks_between(last: tuple[int, int, int], change: tuple[int, int], min_ns: float, max_ns: float) -> int | None:
    """Return the number of ticks from a change to the next one; ``None`` if more than one number is possible."""
    _, since, before = last
    fewest, most = math.ceil((change[0] - before) / max_ns), math.floor((change[1] - since) / min_ns)
    return fewest if fewest == most > 0 else None


def is_held(samples: Sequence[Sample]) -> bool | None:
    """Whether the power reading changes only with the counter, because the sensor measures once per tick.

    The result is ``None`` if the power reading changed too rarely, or if the counter changed between almost all reads.
    """
    pairs = [
        (first, second)
        for first, second in pairwise(samples)
        if first.power_w is not None and second.power_w is not None
    ]
    changes = [(first, second) for first, second in pairs if first.power_w != second.power_w]
    if min(len(changes), sum(first.energy_j == second.energy_j for first, second in pairs)) < MIN_CHANGES:
        return None
    together = sum(first.energy_j != second.energy_j for first, second in changes)
    return together >= 0.8 * len(changes)


def tick_of_means(readings: Sequence[tuple[int, float]]) -> float | None:
    """Return the seconds for which each mean power is held, from readings that rarely change; ``None`` if not held.

    If a load switches between two levels, there are at least three different readings, each held for a tick.  The third
    reading is from a tick in which the load switches, and is a mean of both levels.
    """
    moves = [(first[0] + second[0]) / 2e9 for first, second in pairwise(readings) if first[1] != second[1]]
    if len(moves) < MIN_MOVES or len({power_w for _, power_w in readings}) < 3:
        return None
    open_s = 2 * statistics.median((second[0] - first[0]) / 1e9 for first, second in pairwise(readings))
    gaps_s = sorted(later - earlier for earlier, later in pairwise(moves))
    total_s = ticks = 0.0
    for gap_s in gaps_s:
        tick_s = total_s / ticks if ticks else gap_s
        count = round(gap_s / tick_s)
        if abs(gap_s - count * tick_s) > open_s:
            return None
        total_s, ticks = total_s + gap_s, ticks + count
    tick_s = total_s / ticks
    is_seen = sum(abs(gap_s - tick_s) <= open_s for gap_s in gaps_s) >= 2
    return tick_s if is_seen and 2 * open_s < tick_s <= MAX_POWER_TICK_S else None


class TickClock:
    """Computes past and future times of a counter's ticks, with their bounds, from the calibrated period."""

    def __init__(self, tick_s: float, tick_error_s: float) -> None:
        self._nominal = ((tick_s - tick_error_s) * 1e9, (tick_s + tick_error_s) * 1e9)
        self._min_ns, self._max_ns = self._nominal
        self._low_ns = self._high_ns = math.nan  # bounds of the reference tick; nan before the first tick
        self._jitter_ns = MIN_JITTER_NS
        self._references: list[tuple[float, float, int]] = []  # bounds of earlier ones, with their age in ticks
        self.num_conflicts = 0
        self._last_conflict_ns = 0  # time of the last conflict
        self._read_ns = self._still_ns = -1  # the last read, and the first read with the same value

    @property
    def tick_ns(self) -> float:
        return (self._min_ns + self._max_ns) / 2

    @property
    def reference_ns(self) -> float:
        """Middle of the bounds of the reference tick; nan before the first tick."""
        return (self._low_ns + self._high_ns) / 2

    def add_change(self, after_ns: int, until_ns: int) -> None:
        """Narrow the bounds of ticks by two reads with different values."""
        self._still_ns = self._read_ns = until_ns
        if until_ns - after_ns < 0.9 * self._min_ns:  # in a longer time there may have been two ticks
            self._narrow(after_ns, until_ns)

    def add_no_change(self, after_ns: int, until_ns: int) -> None:
        """Narrow the bounds of ticks by two reads with the same value, if a tick was due between them."""
        if after_ns != self._read_ns:
            self._still_ns = after_ns
        self._read_ns = until_ns
        predicted = self.last_tick_before(until_ns + round(self.tick_ns / 2))
        if predicted is None or until_ns - self._still_ns >= 0.9 * self._min_ns:
            return
        low_ns, high_ns = predicted[0] - predicted[1], predicted[0] + predicted[1]
        early_ns, late_ns = low_ns - self._still_ns, until_ns - high_ns
        if early_ns <= self.spread_ns:
            return  # the tick may be before the first read with this value
        if late_ns > self.spread_ns:  # a tick was due, but the counter did not change
            self._add_conflict(min(early_ns, late_ns), until_ns)
            self._restart(math.nan, math.nan)
        elif until_ns >= low_ns:  # the tick comes after this read
            self._narrow(until_ns, round(high_ns + self._jitter_ns) + 1)

    def last_tick_before(self, time_ns: float) -> tuple[float, float] | None:
        """Return the last tick at or before a time, as (middle, half-width) in ns; ``None`` if uncertain."""
        if math.isnan(self._low_ns):
            return None
        count = math.floor((time_ns - self.reference_ns) / self.tick_ns)
        half_ns = (self._high_ns - self._low_ns) / 2 + abs(count) * (self._max_ns - self._min_ns) / 2
        if half_ns > self.tick_ns / 4:
            return None
        return self.reference_ns + count * self.tick_ns, half_ns

    def certain_tick_before(self, time_ns: float) -> tuple[float, float] | None:
        """Return the result of `last_tick_before`, or ``None`` if the time is within the bounds of a tick."""
        last = self.last_tick_before(time_ns)
        if last is None:
            return None
        middle_ns, half_ns = last
        since_ns, reach_ns = time_ns - middle_ns, half_ns + self.spread_ns
        return last if reach_ns < since_ns < self._min_ns - reach_ns else None

    @property
    def spread_ns(self) -> float:
        return self._jitter_ns if self.num_conflicts else 0.0

    def _narrow(self, after_ns: int, until_ns: int) -> None:
        # The last conflict was long ago, and may have come from a frozen counter, so the jitter is reduced.
        if until_ns - self._last_conflict_ns > LEVER_NS:
            self._jitter_ns = max(self._jitter_ns / 2, MIN_JITTER_NS)
            self._last_conflict_ns = until_ns
        low_ns, high_ns = after_ns - self.spread_ns, until_ns + self.spread_ns
        if math.isnan(self._low_ns):
            self._restart(low_ns, high_ns)
            return
        nearest = math.floor(((after_ns + until_ns) / 2 - self.reference_ns) / self.tick_ns)
        first, second = self._predicted_bounds(max(nearest, 0)), self._predicted_bounds(max(nearest, 0) + 1)
        if first[1] - first[0] > self.tick_ns / 2:  # the reference is too old
            self._restart(low_ns, high_ns)
            return
        meets = [(max(low, low_ns), min(high, high_ns), count) for low, high, count in (first, second)]
        gaps_ns = [low - high for low, high, _ in meets]
        if max(gaps_ns) < 0:
            return  # the change may belong to either of the two ticks
        if min(gaps_ns) >= 0:
            self._add_conflict(min(gaps_ns), until_ns)
            self._restart(after_ns - self._jitter_ns, until_ns + self._jitter_ns)
            return
        self._low_ns, self._high_ns, count = meets[gaps_ns.index(min(gaps_ns))]
        self._bound_period(count)
        self._store_reference()

    def _add_conflict(self, by_ns: float, time_ns: int) -> None:
        """Count a tick that was outside of its bounds by at least ``by_ns``, and assume more jitter."""
        self.num_conflicts += 1
        self._jitter_ns = min(self._jitter_ns + max(by_ns, self._jitter_ns), self.tick_ns)
        self._last_conflict_ns = time_ns

    def _predicted_bounds(self, count: int) -> tuple[float, float, int]:
        return self._low_ns + count * self._min_ns, self._high_ns + count * self._max_ns, count

    def _bound_period(self, count: int) -> None:
        """Compute the bounds of the period only from the stored reference ticks, because clocks drift."""
        self._references = [(low, high, ago + count) for low, high, ago in self._references]
        self._min_ns, self._max_ns = self._nominal
        for low, high, ago in self._references:
            if ago > 0:
                self._min_ns = max(self._min_ns, min((self._low_ns - high) / ago, self._max_ns))
                self._max_ns = min(self._max_ns, max((self._high_ns - low) / ago, self._min_ns))

    def _store_reference(self) -> None:
        """Store reference ticks of the last minutes: an older reference tick makes the period more exact."""
        if not self._references or self._references[-1][2] * self.tick_ns > LEVER_NS / 2:
            self._references.append((self._low_ns, self._high_ns, 0))
        if self._references[0][2] * self.tick_ns > LEVER_NS and len(self._references) > 1:
            del self._references[0]

    def _restart(self, low_ns: float, high_ns: float) -> None:
        self._low_ns, self._high_ns = low_ns, high_ns
        self._min_ns, self._max_ns = self._nominal
        self._references = []
        if not math.isnan(low_ns):
            self._store_reference()
