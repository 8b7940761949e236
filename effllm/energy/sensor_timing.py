"""The times of a device's readings, corrected for the sensor's ticks and lag, and the times of next reads. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from effllm.devices.known import hardware
from effllm.energy.readings import NS, Point, Readings
from effllm.energy.tick_clock import TickClock
from effllm.records.rank import AVERAGE, COUNTER, Device, Sensor

#: The largest possible lag, in ticks: a tick, and an allowance for the error of its end.
MAX_TICKS = 1.05
#: A power reading and the mean power of a counter's tick are different if they differ by more than this share.
DIFFERENT = 0.02
#: Minimal number of edges with a change of power before the bounds are used; after each contradiction twice as many.
MIN_CHANGES = 8
#: Time between a read and the next tick: the read shows whether the counter is late by more than this.
NEAR_S = 0.0003
#: Number of edges with a read that narrows the bounds.
MAX_PROBES = 256

#: The shortest tick that a clock tracks; RAPL's millisecond is too short.  For shorter ticks it does not matter which
#: share of the tick is measured.
MIN_TICK_S = 0.005
#: If the relative error of the tick is larger than this, the times of ticks cannot be derived.
MAX_TICK_ERROR = 0.1
#: Readings that are closer to an edge than this are not merged.
MIN_MARGIN_NS = 10_000_000_000
#: If the error of the ticks' phase is larger than this, one more reading at each edge measures the phase.
WIDE_NS = 100_000.0
#: Readings that are this far apart, in ticks, are of different ticks.  Two requested reads in one tick are 0.99 apart.
SURE_TICK = 0.995
#: The smallest error of a lag that was found in a run: the times of ticks and of reads are not known better.
MIN_LAG_ERROR_S = 0.001


class CounterLag:
    """All lags that explain the reads, as bounds in ticks.

    A held power reading is the mean power of the last tick.  A late counter adds the energy of this tick later.  A
    power reading that differs from the mean power of a counter's tick is not the reading of this tick; this excludes
    the lags with which it would be.  Reads that no lag explains are not of a held reading, and the bounds start again.
    A delay that is common to counter and power is not found.
    """

    def __init__(self) -> None:
        self._min_ticks, self._max_ticks = 0.0, MAX_TICKS  # bounds of the lag
        self._num_changes, self._num_needed = 0, MIN_CHANGES  # edges with a change of power: number, and minimum
        self._num_probes = 0  # calls of `next_probe_ticks`

    @property
    def lag_ticks(self) -> tuple[float, float] | None:
        """The lag and the half-width of its error, in ticks; ``None`` after too few changes of power."""
        if self._num_changes < self._num_needed:
            return None
        if self._min_ticks <= 0:
            return 0.0, self._max_ticks  # most counters are not late
        return (self._min_ticks + self._max_ticks) / 2, (self._max_ticks - self._min_ticks) / 2

    def add_points(self, points: Iterable[Point], last_ns: float, tick_ns: float, error_ns: float) -> None:
        """Narrow the bounds by the reads around an edge; ``last_ns`` is a tick's time, ``error_ns`` its half-width."""
        tick_s, error = tick_ns * NS, error_ns / tick_ns  # times are in ticks from here on, 0 at the given tick
        reads = [
            ((point.time_ns - last_ns) / tick_ns, point.total_j, point.power_w)
            for point in points
            if point.method == COUNTER and point.power_w is not None
        ]
        levels_j = {math.floor(time): total_j for time, total_j, _ in reads if error < time % 1 < 1 - error}
        means_w = {tick: (levels_j[tick] - levels_j[tick - 1]) / tick_s for tick in levels_j if tick - 1 in levels_j}
        impossible_lags = [
            tick - time  # with a lag from here to one tick more, the power reading would be of this tick
            for time, _, power_w in reads
            for tick, mean_w in means_w.items()
            if abs(power_w - mean_w) > DIFFERENT * power_w
        ]
        for lag in impossible_lags:
            self._exclude(lag + error, lag + 1 - error)
        self._num_changes += bool(impossible_lags)

    def _exclude(self, from_ticks: float, to_ticks: float) -> None:
        """Remove a range of lags; if no lag is left, begin again."""
        if from_ticks <= self._min_ticks and self._max_ticks <= to_ticks:
            self._min_ticks, self._max_ticks = 0.0, MAX_TICKS
            self._num_changes, self._num_needed = 0, 2 * self._num_needed
        elif from_ticks <= self._min_ticks < to_ticks:
            self._min_ticks = to_ticks
        elif from_ticks < self._max_ticks <= to_ticks:
            self._max_ticks = from_ticks

    def next_probe_ticks(self, tick_s: float, error_s: float) -> float | None:
        """Return the time of the next read to narrow the bounds, in ticks after a tick; ``None`` after `MAX_PROBES`."""
        self._num_probes += 1
        if self._num_probes > MAX_PROBES:
            return None
        if self._min_ticks > 0:
            return -(self._min_ticks + self._max_ticks) / 2 % 1  # a counter with the middle lag changes at this time
        return 1 - (NEAR_S + error_s) / tick_s


class SensorTiming:
    """The ticks and the lag of a device's sensor, refined by the readings of this run."""

    def __init__(self, device: Device, readings: Readings) -> None:
        self._device, self._readings = device, readings
        self.method = device.energy_method
        self._new_power_ns = 0  # time of the last reading of power that was not repeated
        self._new_power_tick_ns: float | None = None  # the time of the tick of that reading, if known
        self._set_sensor(device.sensor)

    def _set_sensor(self, sensor: Sensor) -> None:
        self.sensor = self._calibrated = sensor  # `sensor` is replaced when a lag is found
        is_power_mean_of_tick = _measures_whole_tick(self._device) and sensor.is_held and sensor.duty == 1.0
        is_lag_assumed = not sensor.lag_s and sensor.lag_error_s >= MIN_LAG_ERROR_S
        self._counter_lag = CounterLag() if is_power_mean_of_tick and is_lag_assumed else None  # readings give a lag
        has_clock = sensor.tick_s >= MIN_TICK_S and sensor.tick_error_s <= MAX_TICK_ERROR * sensor.tick_s
        self.clock = TickClock(sensor.tick_s, max(sensor.tick_error_s, 1e-5 * sensor.tick_s)) if has_clock else None

    def calibrate(self, sensor: Sensor) -> None:
        """Set a calibrated sensor, and estimate its ticks from the readings so far."""
        self._set_sensor(sensor)
        previous = None
        for point in self._readings:
            if previous is not None and point.method == COUNTER:
                self.add_tick_bounds(previous.time_ns, point.time_ns, has_changed=point.total_j > previous.total_j)
            previous = point

    def add_tick_bounds(self, before_ns: int, time_ns: int, *, has_changed: bool) -> None:
        """Narrow the times of ticks by two consecutive reads of the counter."""
        if self.clock is not None:
            (self.clock.add_change if has_changed else self.clock.add_no_change)(before_ns, time_ns)

    def note_power_reading(self, time_ns: int) -> bool:
        """Note a reading of power; return whether its held value was, or may have been, read before."""
        if not self.sensor.is_held or self.clock is None:
            return False
        shown_ns, tick_ns = time_ns + self.sensor.lag_s / NS, self.clock.tick_ns
        error_ns = self.sensor.lag_error_s / NS if self._counter_lag is not None else 0.0
        last = self.clock.certain_tick_before(shown_ns)
        last_ns = last[0] if last is not None and error_ns < shown_ns - last[0] < tick_ns - error_ns else None
        if last_ns is None or self._new_power_tick_ns is None:
            is_repeated = time_ns - self._new_power_ns < SURE_TICK * tick_ns
        else:
            is_repeated = abs(last_ns - self._new_power_tick_ns) < tick_ns / 2  # both are of the same tick
        if not is_repeated:
            self._new_power_ns, self._new_power_tick_ns = time_ns, last_ns
        return is_repeated

    def update_lag(self, time_ns: int) -> None:
        """Update the counter's lag from the readings around a time; new readings may also contradict it."""
        last = self.clock.last_tick_before(time_ns) if self.clock is not None else None
        if self._counter_lag is None or self.clock is None or last is None:
            return
        tick_ns = self.clock.tick_ns
        first = max(self._readings.index_at_or_after(round(last[0] - tick_ns)), 1)
        error_ns = last[1] + self.clock.spread_ns + self._calibrated.call_s / 2 / NS
        self._counter_lag.add_points(self._readings.starting_at(first), last[0], tick_ns, error_ns)
        self.sensor = self._calibrated
        if (lag := self._counter_lag.lag_ticks) is not None:
            lag_s, error_s = lag[0] * tick_ns * NS, max(lag[1] * tick_ns * NS, MIN_LAG_ERROR_S)
            if error_s < self._calibrated.lag_error_s:
                self.sensor = replace(self._calibrated, lag_s=lag_s, lag_error_s=error_s)

    # --- the times of readings ---

    def mean_age_ns(self) -> int:
        """Return the mean age of the energy or power that a reading shows."""
        if self.method == COUNTER:
            return round((self.sensor.lag_s + self.sensor.tick_s / 2) / NS)
        return round((self.sensor.average_s / 2 if self.method == AVERAGE else self.sensor.lag_s) / NS)

    def shift_s2(self, time_ns: int) -> float:
        """Return the variance of the times of readings, from the current errors of lag and phase."""
        last = self.clock.last_tick_before(time_ns) if self.clock is not None else None
        phase_s = last[1] * NS if last is not None else 0.0
        return (self.sensor.lag_error_s**2 + phase_s**2) / 3  # uniform distributions, from their half-widths

    def valid_ns(self, max_gap_ns: int) -> int:
        """Return for how long a power reading is valid: until the sensor's next update or the next reading."""
        if self.method == COUNTER:
            return 0
        interval_ns = max_gap_ns // 5 if self._device.only_power else 0  # a gap is five intervals between readings
        return max(round(self.sensor.tick_s / NS), interval_ns)

    @property
    def margin_ns(self) -> int:
        """Maximum distance from a time at which a reading can change the energy at this time."""
        sensor = self.sensor
        return max(round((6 * sensor.tick_s + sensor.lag_s + sensor.average_s) / NS), MIN_MARGIN_NS)

    # --- when to read ---

    def reads_for(self, edge_ns: int) -> list[int]:
        """Return the times of the reads for the energy at an edge: at and after the edge, in order."""
        if self.clock is None or self.method != COUNTER:
            return [edge_ns, edge_ns + late_ns] if (late_ns := self._second_read_delay_ns()) else [edge_ns]
        shown_ns = edge_ns + max(round(self.sensor.lag_s / NS), 0)  # the counter then shows the energy at the edge
        last = self.clock.last_tick_before(shown_ns)
        tick_ns = self.clock.tick_ns
        if last is None:  # the ticks' times are unknown: dense reads in more than two ticks find them
            return [shown_ns + round(tick_ns * part / 8) for part in range(18)]
        next_ns, half_ns = last[0] + tick_ns, last[1]
        reads = [shown_ns, round(next_ns + tick_ns / 4), round(next_ns + 1.25 * tick_ns)]
        if half_ns > WIDE_NS and next_ns - shown_ns > half_ns:
            reads.append(round(next_ns))  # this read halves the error of the phase
        if self._counter_lag is not None:
            probe_ticks = self._counter_lag.next_probe_ticks(tick_ns * NS, (half_ns + self.clock.spread_ns) * NS)
            if probe_ticks is not None:
                reads.append(round(next_ns + probe_ticks * tick_ns))
        if shown_ns > edge_ns:  # add a read in the tick before
            reads.append(max(edge_ns, shown_ns - round(tick_ns)))
        return sorted(reads)

    def is_settled(self, edge_ns: int, max_gap_ns: int) -> bool:
        """Return whether the energy at an edge is final: later readings do not improve it."""
        newest_ns = self._readings[-1].time_ns if self._readings else 0
        if self.clock is None or self.method != COUNTER:
            return newest_ns + self.valid_ns(max_gap_ns) >= edge_ns + self._second_read_delay_ns()
        edge_ns += max(round(self.sensor.lag_s / NS), 0)
        last = self.clock.last_tick_before(edge_ns)
        tick_ns = self.clock.tick_ns
        return newest_ns >= (edge_ns + 2 * tick_ns if last is None else last[0] + 2.05 * tick_ns + last[1])

    def _second_read_delay_ns(self) -> int:
        """Return the time from a window's edge to its second read: the mean age of a reading; 0 below `MIN_TICK_S`."""
        age_ns = self.mean_age_ns()
        return age_ns if age_ns >= MIN_TICK_S / NS else 0


def is_measured_share_unknown(device: Device) -> bool:
    """Return whether the share of a tick that the counter measures is unknown; `effllm profile` measures it."""
    sensor = device.sensor
    has_ticks = device.energy_method == COUNTER and sensor.tick_s >= MIN_TICK_S
    is_board = device.kind == "nvml" and device.is_gpu and not device.simulated
    return is_board and has_ticks and not _measures_whole_tick(device) and not sensor.source.startswith("profiled")


def _measures_whole_tick(device: Device) -> bool:
    """Return whether this model's sensor measures during the whole tick, according to the hardware table."""
    row = hardware.find_by_driver_name(device.name)
    return row is not None and row.sensor.duty == 1.0
