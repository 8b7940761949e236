"""The cumulative energy of one device at the edges of windows, interpolated between readings and ticks. No I/O.

Windows end at iterations, and counters change at ticks.  The energy between two ticks is interpolated, from the power
in this tick and in the ticks before and after.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection
from typing import NamedTuple

from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS, Readings
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.rank import COUNTER

#: A change of power is abrupt if it exceeds the usual change from tick to tick by this factor.
ABRUPT_FACTOR = 8.0


class Level(NamedTuple):
    """The interpolated cumulative energy at one time."""

    joules: float
    variance_j2: float
    power_w: float
    estimated_j: float = 0.0  # the estimated part of the joules
    shift_s2: float = 0.0  # variance of the times of the readings around this time


class EdgeLevels:
    """The energy at each edge of a window, computed once and shared by adjacent windows."""

    def __init__(self, readings: Readings, timing: SensorTiming, powers: PowerSpread) -> None:
        self._readings, self._timing, self._powers = readings, timing, powers
        self._levels: dict[int, Level] = {}  # by time in ns
        self.edges_ns: list[int] = []  # the times in `_levels`, sorted

    def forget_before(self, time_ns: int) -> None:
        self._keep_levels(self.edges_ns[bisect.bisect_left(self.edges_ns, time_ns) :])

    def keep_only(self, edges_ns: Collection[int]) -> None:
        """Drop the levels at other times, but keep the newest level, because no later level may be below it."""
        wanted = {*edges_ns, *self.edges_ns[-1:]}
        self._keep_levels([edge_ns for edge_ns in self.edges_ns if edge_ns in wanted])

    def _keep_levels(self, edges_ns: list[int]) -> None:
        self.edges_ns = edges_ns
        self._levels = {edge_ns: self._levels[edge_ns] for edge_ns in edges_ns}

    def fixed_level_at(self, time_ns: int) -> Level:
        """Return the level at a time; the first call fixes it, between those of the edges before and after."""
        if time_ns not in self._levels:
            self._timing.update_lag(time_ns)
            levels_j = self._levels_at_ticks(time_ns)
            level = self._level_between_ticks(time_ns, levels_j) if levels_j else self._level_between_readings(time_ns)
            # A later reading may contradict a level that was reported, but no window may have negative energy.
            index = bisect.bisect_left(self.edges_ns, time_ns)
            min_j = self._levels[self.edges_ns[index - 1]].joules if index else -math.inf
            max_j = self._levels[self.edges_ns[index]].joules if index < len(self.edges_ns) else math.inf
            joules = min(max(level.joules, min_j), max_j)
            self._levels[time_ns] = level._replace(
                joules=joules,
                estimated_j=self._readings.estimated_part_j(joules),
                shift_s2=self._timing.shift_s2(time_ns),
            )
            self.edges_ns.insert(index, time_ns)
        return self._levels[time_ns]

    def _levels_at_ticks(self, time_ns: int) -> dict[int, float] | None:
        """Return the counter's joules at the ticks around a time; the key 0 is the last tick up to the time.

        The result is ``None`` if the times of ticks are unknown, or the joules at one of the two nearest ticks.
        """
        clock, sensor = self._timing.clock, self._timing.sensor
        last = clock.last_tick_before(time_ns + sensor.lag_s / NS) if clock is not None else None
        if clock is None or last is None:
            return None
        tick_ns, read = clock.tick_ns, {}  # joules by tick, from reads of the counter
        implied: dict[int, float] = {}  # joules by tick, from the joules one tick later and the power between
        low = self._readings.index_at_or_after(round(last[0] - 2 * tick_ns))
        for index, point in enumerate(self._readings.starting_at(low), low):
            if point.time_ns > last[0] + 4 * tick_ns:
                break
            before = clock.certain_tick_before(point.time_ns)
            if before is None or (point.method != COUNTER and index > 0):
                continue
            tick = round((before[0] - last[0]) / tick_ns)
            read[tick] = point.total_j
            # A held power reading is the mean of the last tick, while a counter with a lag still shows the tick before.
            is_power_of_tick = sensor.is_held and point.time_ns - before[0] < tick_ns - sensor.lag_s / NS
            if is_power_of_tick and point.power_w is not None:
                implied.setdefault(tick - 1, point.total_j - point.power_w * tick_ns * NS)
        levels_j = {**implied, **read}
        return levels_j if 0 in levels_j and 1 in levels_j else None

    def _level_between_ticks(self, time_ns: int, levels_j: dict[int, float]) -> Level:
        """Return the level between two ticks, with the joules by tick, as in `_levels_at_ticks`."""
        clock, lag_s = self._timing.clock, self._timing.sensor.lag_s
        assert clock is not None
        tick_s = clock.tick_ns * NS
        last = clock.last_tick_before(time_ns + lag_s / NS)
        assert last is not None
        since_s = (time_ns + lag_s / NS - last[0]) * NS
        before_w, after_w = _mean_power_w(levels_j, -1, 0, tick_s), _mean_power_w(levels_j, 1, 2, tick_s)
        tick_j = levels_j[1] - levels_j[0]
        joules, variance_j2, power_w = energy_within_tick(since_s, tick_s, tick_j, before_w, after_w, self._powers)
        return Level(levels_j[0] + joules, variance_j2, power_w)

    def _level_between_readings(self, time_ns: int) -> Level:
        """Return the level between two readings: for continuous counters, unknown ticks and integrated power."""
        readings, tick_s = self._readings, self._timing.sensor.tick_s
        shown_ns = time_ns + self._timing.mean_age_ns()  # a reading at this time shows the energy at `time_ns`
        index = min(max(readings.index_after(shown_ns), 1), len(readings) - 1)
        first, second = readings[index - 1], readings[index]
        span_s = (second.time_ns - first.time_ns) * NS
        since_s = (shown_ns - first.time_ns) * NS
        joules = second.total_j - first.total_j
        mean_w = readings.mean_w(index, tick_s) if second.method else 0.0
        first_w = first.power_w if first.power_w is not None else mean_w
        second_w = second.power_w if second.power_w is not None else mean_w
        tick_j2 = (mean_w * tick_s) ** 2 / 12 if self._timing.method == COUNTER else 0.0
        if not 0.0 <= since_s <= span_s:  # the time plus the lag is outside of both readings
            nearest_j, nearest_w = (first.total_j, first_w) if since_s < 0 else (second.total_j, second_w)
            outside_s = since_s if since_s < 0 else since_s - span_s
            outside_j2 = self._powers.jump_j2(abs(outside_s))
            return Level(nearest_j + nearest_w * outside_s, tick_j2 + outside_j2, nearest_w)
        if second.method is None:  # a hole
            return Level(first.total_j, 0.0, 0.0)
        power_w = first_w + (second_w - first_w) * since_s / span_s
        since_j = (first_w + power_w) / 2 * since_s
        integrated_j = (first_w + second_w) / 2 * span_s
        # The counter's step is exact; its difference from integrated power is distributed evenly over the time.
        since_j += (joules - integrated_j) * since_s / span_s
        variance_j2 = self._powers.bridge_j2(since_s, span_s - since_s, second_w - first_w)
        return Level(first.total_j + min(max(since_j, 0.0), joules), tick_j2 + variance_j2, power_w)


def energy_within_tick(
    since_s: float, tick_s: float, joules: float, before_w: float | None, after_w: float | None, powers: PowerSpread
) -> tuple[float, float, float]:
    """Return the energy of a tick up to ``since_s`` after its start, the variance of it, and the power at this time.

    Training power changes abruptly.  The time of a single change follows from the tick's energy and from the power of
    the ticks before and after.  If a single change does not explain the tick's energy, or if power varies smoothly,
    the energy is distributed over the tick.
    """
    mean_w = joules / tick_s
    rest_s = tick_s - since_s
    flat_j = mean_w * since_s
    if before_w is None or after_w is None:
        return flat_j, powers.jump_j2(min(since_s, rest_s)), mean_w
    rise_w = after_w - before_w
    low_w, high_w = min(before_w, after_w), max(before_w, after_w)
    noise_w = powers.noise_w()
    # Smooth power is approximated by the parabola that has the mean powers of all three ticks; x is time in ticks.
    x = since_s / tick_s
    slope_w, bend_w = mean_w - before_w, (before_w + after_w - 2 * mean_w) / 2
    start_w = mean_w - slope_w / 2 - bend_w / 3
    smooth_j = tick_s * (start_w * x + slope_w * x**2 / 2 + bend_w * x**3 / 3)
    change_w = max(abs(mean_w - before_w), abs(after_w - mean_w))
    unseen_j2 = powers.unseen_w2(change_w) * tick_s**2 * 4 * x * (1 - x)  # 0 at both ticks, the most in the middle
    if low_w - noise_w <= mean_w <= high_w + noise_w and abs(rise_w) > ABRUPT_FACTOR * noise_w:
        change_s = min(max((joules - after_w * tick_s) / (before_w - after_w), 0.0), tick_s)  # time of the change
        abrupt_j = before_w * min(since_s, change_s) + after_w * max(since_s - change_s, 0.0)
        return abrupt_j, unseen_j2, before_w if since_s < change_s else after_w
    outside_w = max(mean_w - high_w, low_w - mean_w, 0.0)
    if outside_w > 3 * noise_w:  # a peak; of uniform width and place in the tick: a third of x (1 - x) on average
        excess_j = joules - (before_w + after_w) / 2 * tick_s
        return flat_j, excess_j**2 * x * (1 - x) * 0.35 + unseen_j2, mean_w
    return smooth_j, unseen_j2, mean_w


def _mean_power_w(levels_j: dict[int, float], first: int, second: int, tick_s: float) -> float | None:
    if first in levels_j and second in levels_j:
        return (levels_j[second] - levels_j[first]) / ((second - first) * tick_s)
    return None
