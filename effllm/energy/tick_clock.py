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

#: The period assumed for a counter that was not measured: 100 ms on all GPUs since Turing (docs/hardware.md).
USUAL_TICK_S = 0.1
#: Minimal number of changes from which a period is derived.
MIN_PERIOD_CHANGES = 4
#: A counter that changes between almost all reads is continuous only if the reads are at most this far apart.
DENSE_S = 0.006
#: Minimal number of changes of power that show whether the reading is held; with fewer, the hardware table decides.
MIN_CHANGES = 8
#: Longest time for which a GPU holds a power reading; slower changes come from the load.
MAX_POWER_TICK_S = 0.12

#: The assumed jitter of ticks after reads have contradicted each other.
MIN_JITTER_NS = 100_000.0
#: The longest time over which the period is measured, because clocks drift with temperature.
MAX_PERIOD_SPAN_NS = 300e9


def tick_and_error_s(readings: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return a counter's period, and the half-width of the period's error; ``None`` if no period is found.

    Readings are times in ns, and joules.  Each change is between two reads, and the period must explain all changes.  A
    counter that changed between almost all reads is continuous and has the period 0.
    """
    reads = [(first[0], second[0], first[1] != second[1]) for first, second in pairwise(readings)]
    changes = [(after, until) for after, until, has_changed in reads if has_changed]
    if len(changes) < MIN_PERIOD_CHANGES:
        return None
    read_gap_ns = statistics.median(until - after for after, until, _ in reads)
    if len(changes) > 0.6 * len(reads):  # almost all
        return (0.0, 0.0) if read_gap_ns <= DENSE_S * 1e9 else None
    change_gap_ns = statistics.median(later - earlier for (earlier, _), (later, _) in pairwise(changes))
    runs = _runs_of_changes(reads, max(min(1.5 * read_gap_ns, 0.9 * change_gap_ns), 0.5 * change_gap_ns))
    steps = [(after + until - since - before) / 2 for run in runs for (since, before), (after, until) in pairwise(run)]
    if not steps:
        return None
    period_ns = statistics.fmean(steps)  # from the middle of a change's bounds to the middle of the next ones
    min_ns, max_ns = 0.5 * period_ns, 1.5 * period_ns  # bounds of the period, narrowed by each pair of changes
    numbered: list[tuple[int, int, int]] = []  # number of each change, in ticks, and its bounds
    for run in runs:
        ticks = _ticks_between(numbered[-1], run[0], min_ns, max_ns) if numbered else None
        if ticks is None:
            numbered = []  # it is unknown how many ticks are between this run and the last one: numbers begin at 0
        first_number = numbered[-1][0] + ticks if ticks is not None else 0
        for number, (after, until) in enumerate(run, first_number):
            for earlier, since, before in numbered:
                min_ns = max(min_ns, (after - before) / (number - earlier))
                max_ns = min(max_ns, (until - since) / (number - earlier))
            numbered.append((number, after, until))
    if min_ns > max_ns:  # the ticks' jitter is larger than the time between reads
        return period_ns / 1e9, max((min_ns - max_ns) / 2, 0.002 * period_ns) / 1e9
    return (min_ns + max_ns) / 2e9, max((max_ns - min_ns) / 2e9, 1e-7)


def _runs_of_changes(reads: Sequence[tuple[int, int, bool]], max_gap_ns: float) -> list[list[tuple[int, int]]]:
    """Return the bounds of changes in runs: a delayed read ends a run, so the changes of a run are one tick apart."""
    runs: list[list[tuple[int, int]]] = [[]]
    for after, until, has_changed in reads:
        if has_changed and until - after > max_gap_ns:  # more than one change is possible
            runs.append([])
        elif has_changed:
            runs[-1].append((after, until))
    return [run for run in runs if run]


def _ticks_between(last: tuple[int, int, int], change: tuple[int, int], min_ns: float, max_ns: float) -> int | None:
    """Return the number of ticks from a change to the next one; ``None`` if more than one number is possible."""
    _, since, before = last  # number and bounds of the earlier change; `change` has the bounds of the later one
    min_ticks, max_ticks = math.ceil((change[0] - before) / max_ns), math.floor((change[1] - since) / min_ns)
    return min_ticks if min_ticks == max_ticks > 0 else None


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
    num_with_counter = sum(first.energy_j != second.energy_j for first, second in changes)
    return num_with_counter >= 0.8 * len(changes)


def hold_time_s(readings: Sequence[tuple[int, float]]) -> float | None:
    """Return the seconds for which each mean power is held, from readings that rarely change; ``None`` if not held.

    If a load switches between two levels, there are at least three different readings, each held for a tick.  The third
    reading is from a tick in which the load switches, and is a mean of both levels.
    """
    changes_s = [(first[0] + second[0]) / 2e9 for first, second in pairwise(readings) if first[1] != second[1]]
    if len(changes_s) < MIN_PERIOD_CHANGES or len({power_w for _, power_w in readings}) < 3:
        return None
    gap_error_s = 2 * statistics.median((second[0] - first[0]) / 1e9 for first, second in pairwise(readings))
    gaps_s = sorted(later - earlier for earlier, later in pairwise(changes_s))  # the shortest should be a single tick
    total_s = total_ticks = 0.0
    for gap_s in gaps_s:
        tick_s = total_s / total_ticks if total_ticks else gap_s
        ticks = round(gap_s / tick_s)
        if abs(gap_s - ticks * tick_s) > gap_error_s:
            return None
        total_s, total_ticks = total_s + gap_s, total_ticks + ticks
    tick_s = total_s / total_ticks
    has_single_ticks = sum(abs(gap_s - tick_s) <= gap_error_s for gap_s in gaps_s) >= 2
    return tick_s if has_single_ticks and 2 * gap_error_s < tick_s <= MAX_POWER_TICK_S else None


class TickClock:
    """Computes past and future times of a counter's ticks, with their bounds, from the calibrated period."""

    def __init__(self, tick_s: float, tick_error_s: float) -> None:
        self._calibrated_period_ns = ((tick_s - tick_error_s) * 1e9, (tick_s + tick_error_s) * 1e9)  # its bounds
        self._min_period_ns, self._max_period_ns = self._calibrated_period_ns
        self._low_ns = self._high_ns = math.nan  # bounds of the reference tick; nan before the first tick
        self._jitter_ns = MIN_JITTER_NS
        self._references: list[tuple[float, float, int]] = []  # bounds of earlier ones, with their age in ticks
        self.num_conflicts = 0  # number of ticks that were outside of their bounds
        self._last_conflict_ns = 0  # time of the last conflict
        self._last_read_ns = self._same_since_ns = -1  # the last read, and the first read with the same value

    @property
    def tick_ns(self) -> float:
        return (self._min_period_ns + self._max_period_ns) / 2

    @property
    def reference_ns(self) -> float:
        """Middle of the bounds of the reference tick; nan before the first tick."""
        return (self._low_ns + self._high_ns) / 2

    def add_change(self, after_ns: int, until_ns: int) -> None:
        """Narrow the bounds of ticks by two reads with different values."""
        self._same_since_ns = self._last_read_ns = until_ns
        if until_ns - after_ns < 0.9 * self._min_period_ns:  # in a longer time there may have been two ticks
            self._add_tick_between(after_ns, until_ns)

    def add_no_change(self, after_ns: int, until_ns: int) -> None:
        """Narrow the bounds of ticks by two reads with the same value, if a tick was due between them."""
        if after_ns != self._last_read_ns:
            self._same_since_ns = after_ns
        self._last_read_ns = until_ns
        predicted = self.last_tick_before(until_ns + round(self.tick_ns / 2))
        if predicted is None or until_ns - self._same_since_ns >= 0.9 * self._min_period_ns:
            return  # after a whole period with the same value, the counter may be frozen
        low_ns, high_ns = predicted[0] - predicted[1], predicted[0] + predicted[1]
        before_tick_ns, after_tick_ns = low_ns - self._same_since_ns, until_ns - high_ns
        if before_tick_ns <= self.spread_ns:
            return  # the tick may be before the first read with this value
        if after_tick_ns > self.spread_ns:  # a tick was due, but the counter did not change
            self._add_conflict(min(before_tick_ns, after_tick_ns), until_ns)
            self._restart(math.nan, math.nan)
        elif until_ns >= low_ns:  # the tick comes after this read
            self._add_tick_between(until_ns, round(high_ns + self._jitter_ns) + 1)

    def last_tick_before(self, time_ns: float) -> tuple[float, float] | None:
        """Return the last tick at or before a time, as (middle, half-width) in ns; ``None`` if uncertain."""
        if math.isnan(self._low_ns):
            return None
        count = math.floor((time_ns - self.reference_ns) / self.tick_ns)
        half_ns = (self._high_ns - self._low_ns) / 2 + abs(count) * (self._max_period_ns - self._min_period_ns) / 2
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
        return last if reach_ns < since_ns < self._min_period_ns - reach_ns else None

    @property
    def spread_ns(self) -> float:  # assumed jitter of ticks: 0 until reads contradict each other
        return self._jitter_ns if self.num_conflicts else 0.0

    def _add_tick_between(self, after_ns: int, until_ns: int) -> None:  # makes it the reference tick, if it is certain
        # The last conflict was long ago, and may have come from a frozen counter, so the jitter is reduced.
        if until_ns - self._last_conflict_ns > MAX_PERIOD_SPAN_NS:
            self._jitter_ns = max(self._jitter_ns / 2, MIN_JITTER_NS)
            self._last_conflict_ns = until_ns
        low_ns, high_ns = after_ns - self.spread_ns, until_ns + self.spread_ns
        if math.isnan(self._low_ns):
            self._restart(low_ns, high_ns)
            return
        count = max(math.floor(((after_ns + until_ns) / 2 - self.reference_ns) / self.tick_ns), 0)
        first, second = self._predicted_bounds(count), self._predicted_bounds(count + 1)
        if first[1] - first[0] > self.tick_ns / 2:  # the reference is too old
            self._restart(low_ns, high_ns)
            return
        overlaps = [(max(low, low_ns), min(high, high_ns), ticks) for low, high, ticks in (first, second)]
        gaps_ns = [low - high for low, high, _ in overlaps]  # negative for bounds that overlap
        if max(gaps_ns) < 0:
            return  # the change may belong to either of the two ticks
        if min(gaps_ns) >= 0:
            self._add_conflict(min(gaps_ns), until_ns)
            self._restart(after_ns - self._jitter_ns, until_ns + self._jitter_ns)
            return
        self._low_ns, self._high_ns, ticks_later = overlaps[gaps_ns.index(min(gaps_ns))]
        self._bound_period(ticks_later)
        self._store_reference()

    def _add_conflict(self, by_ns: float, time_ns: int) -> None:
        """Count a tick that was outside of its bounds by at least ``by_ns``, and assume more jitter."""
        self.num_conflicts += 1
        self._jitter_ns = min(self._jitter_ns + max(by_ns, self._jitter_ns), self.tick_ns)
        self._last_conflict_ns = time_ns

    def _predicted_bounds(self, ticks: int) -> tuple[float, float, int]:  # of the tick so many ticks later, and `ticks`
        return self._low_ns + ticks * self._min_period_ns, self._high_ns + ticks * self._max_period_ns, ticks

    def _bound_period(self, ticks_later: int) -> None:
        """Compute the period's bounds from a later reference tick and only the stored ones, because clocks drift."""
        self._references = [(low, high, ago + ticks_later) for low, high, ago in self._references]
        self._min_period_ns, self._max_period_ns = self._calibrated_period_ns
        for low, high, ago in self._references:
            if ago > 0:
                self._min_period_ns = max(self._min_period_ns, min((self._low_ns - high) / ago, self._max_period_ns))
                self._max_period_ns = min(self._max_period_ns, max((self._high_ns - low) / ago, self._min_period_ns))

    def _store_reference(self) -> None:
        """Store reference ticks of the last minutes: an older reference tick makes the period more exact."""
        if not self._references or self._references[-1][2] * self.tick_ns > MAX_PERIOD_SPAN_NS / 2:
            self._references.append((self._low_ns, self._high_ns, 0))
        if self._references[0][2] * self.tick_ns > MAX_PERIOD_SPAN_NS and len(self._references) > 1:
            del self._references[0]

    def _restart(self, low_ns: float, high_ns: float) -> None:  # from the bounds of a tick; nan: with the next tick
        self._low_ns, self._high_ns = low_ns, high_ns
        self._min_period_ns, self._max_period_ns = self._calibrated_period_ns
        self._references = []
        if not math.isnan(low_ns):
            self._store_reference()
