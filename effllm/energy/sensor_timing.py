"""The times of a device's readings, corrected for the sensor's ticks and lag, and the times of next reads. No I/O."""

from __future__ import annotations

from msgspec.structs import replace

from effllm.energy.lag_evidence import MIN_ERROR_S, SAME_S, LagEvidence, TickRead, measures_whole_tick
from effllm.energy.readings import NS, Readings
from effllm.energy.tick_clock import TickClock
from effllm.records.rank import AVERAGE, COUNTER, Device, Sensor

#: The shortest tick that a clock tracks; RAPL's millisecond is too short.
MIN_TICK_S = 0.005
#: If the relative error of the tick is larger than this, the times of ticks cannot be derived.
MAX_OPEN = 0.1
#: Readings that are closer to an edge than this are not merged.
MIN_MARGIN_NS = 10_000_000_000
#: If the error of the ticks' phase is larger than this, one more reading at each edge measures the phase.
WIDE_NS = 100_000.0
#: Readings that are this far apart, in ticks, surely belong to different ticks.
SURE_TICK = 0.98


class SensorTiming:
    """The ticks and the lag of a device's sensor, refined by the readings of this run.

    Args:
        device: the device with its sensor and method.
        readings: the device's readings.
    """

    def __init__(self, device: Device, readings: Readings) -> None:
        self._device, self._readings = device, readings
        self.method = device.energy_method
        self._fresh_ns = 0  # time of the last reading of power that was not repeated
        self._held_ns: float | None = None  # the time of the tick of that reading, if known
        self._take(device.sensor)

    def _take(self, sensor: Sensor) -> None:
        self.sensor = self._known = sensor  # `sensor` is replaced when a lag is found
        self._lag = LagEvidence() if measures_whole_tick(self._device) else None
        self.clock = _clock_of(sensor)

    def calibrate(self, sensor: Sensor) -> None:
        """Set a calibrated sensor, and estimate its ticks from the readings so far."""
        self._take(sensor)
        previous = None
        for point in self._readings:
            if previous is not None and point.method == COUNTER:
                self.add_tick_bounds(previous.time_ns, point.time_ns, has_moved=point.total_j > previous.total_j)
            previous = point

    def add_tick_bounds(self, before_ns: int, time_ns: int, *, has_moved: bool) -> None:
        if self.clock is not None:
            add = self.clock.moved if has_moved else self.clock.did_not_move
            add(before_ns, time_ns)

    @property
    def is_contradicted(self) -> bool:
        """Whether the readings contradict the calibrated tick, so that the sensor must be measured again."""
        return self.clock is not None and self.clock.is_contradicted

    def is_repeated(self, time_ns: int) -> bool:
        """Return whether a held power reading was, or may have been, read before, so that it is no new value."""
        if not self.sensor.is_held or self.clock is None:
            return False
        shown_ns, tick_ns = time_ns + self.sensor.lag_s / NS, self.clock.tick_ns
        open_ns = self.sensor.lag_error_s / NS if self._is_lag_open else 0.0
        last = self.clock.certain_before(shown_ns)
        tick = last[0] if last is not None and open_ns < shown_ns - last[0] < tick_ns - open_ns else None
        if tick is None or self._held_ns is None:
            is_repeated = time_ns - self._fresh_ns < SURE_TICK * tick_ns
        else:
            is_repeated = abs(tick - self._held_ns) < tick_ns / 2
        if not is_repeated:
            self._fresh_ns, self._held_ns = time_ns, tick
        return is_repeated

    # --- the lag ---

    def expect_lag(self, kept_s: float) -> None:
        """Set the lag found in an earlier run; it is used once readings of this run confirm it."""
        if self._lag is not None:
            self._lag = LagEvidence(kept_s)

    def found_lag_s(self) -> float | None:
        """Return the lag if this run has found it with an error of at most `SAME_S`, else ``None``."""
        is_found = self._is_lag_open and self._lag is not None and self._lag.is_shown
        return self.sensor.lag_s if is_found and self.sensor.lag_error_s <= SAME_S else None

    @property
    def _is_lag_open(self) -> bool:
        """Whether the lag is only assumed, so that readings of this run may improve it."""
        known = self._known
        is_alike = known.is_held and known.duty == 1.0 and not known.lag_s
        return self._lag is not None and is_alike and known.lag_error_s >= MIN_ERROR_S

    def update_lag(self, time_ns: int) -> None:
        """Update the counter's lag from the readings around a time; new readings may also contradict it."""
        if self._lag is None or not self._is_lag_open or self.clock is None:
            return
        if (last := self.clock.before(time_ns)) is None:
            return
        tick_s, open_s = self.clock.tick_ns * NS, (last[1] + self.clock.spread_ns) * NS + self._known.call_s / 2
        low = self._readings.index_from(round(last[0] - self.clock.tick_ns))
        self._lag.add_reads(
            [
                TickRead((point.time_ns - last[0]) * NS, point.total_j, point.power_w)
                for point in self._readings.from_index(max(low, 1))
                if point.method == COUNTER and point.power_w is not None
            ],
            tick_s,
            open_s,
        )
        found = self._lag.lag_s(tick_s)
        is_better = found is not None and found[1] < self._known.lag_error_s
        self.sensor = replace(self._known, lag_s=found[0], lag_error_s=found[1]) if found and is_better else self._known

    # --- the times of readings ---

    def shift_ns(self) -> int:
        """Return the mean age of the energy or power that a reading shows."""
        if self.method == COUNTER:
            return round((self.sensor.lag_s + self.sensor.tick_s / 2) / NS)
        return round((self.sensor.average_s / 2 if self.method == AVERAGE else self.sensor.lag_s) / NS)

    def shift_s2(self, time_ns: int) -> float:
        """Return the variance of the times of readings, from the current errors of lag and phase."""
        last = self.clock.before(time_ns) if self.clock is not None else None
        phase_s = last[1] * NS if last is not None else 0.0
        return (self.sensor.lag_error_s**2 + phase_s**2) / 3

    def reach_ns(self, max_gap_ns: int) -> int:
        """Return the time for which a power reading is valid: until the sensor's next update or the next reading."""
        if self.method == COUNTER:
            return 0
        next_ns = max_gap_ns // 5 if self._device.only_power else 0
        return max(round(self.sensor.tick_s / NS), next_ns)

    @property
    def margin_ns(self) -> int:
        """Maximum distance from a time at which a reading can change the energy at this time."""
        sensor = self.sensor
        return max(round((6 * sensor.tick_s + sensor.lag_s + sensor.average_s) / NS), MIN_MARGIN_NS)

    # --- when to read ---

    def reads_for(self, edge_ns: int) -> list[int]:
        """Return the times of the reads for the energy at an edge: at and after the edge, in order."""
        if self.clock is None or self.method != COUNTER:
            return [edge_ns, edge_ns + late_ns] if (late_ns := self._late_ns()) else [edge_ns]
        shown_ns = edge_ns + max(round(self.sensor.lag_s / NS), 0)  # the counter then shows the energy at the edge
        last = self.clock.before(shown_ns)
        tick_ns = self.clock.tick_ns
        if last is None:  # the ticks' times are unknown: dense reads find them
            return [shown_ns + round(tick_ns * part / 8) for part in range(18)]
        next_ns, half_ns = last[0] + tick_ns, last[1]
        reads = [shown_ns, round(next_ns + tick_ns / 4), round(next_ns + 1.25 * tick_ns)]
        if half_ns > WIDE_NS and next_ns - shown_ns > half_ns:
            reads.insert(1, round(next_ns))  # this read halves the error of the phase
        if self._lag is not None and self._is_lag_open:
            probe_s = self._lag.probe_s(tick_ns * NS, (half_ns + self.clock.spread_ns) * NS)
            if probe_s is not None:  # this read is between the last two reads
                since_ns = probe_s / NS
                reads.insert(-1, round(next_ns + (since_ns if since_ns > tick_ns / 4 else tick_ns + since_ns)))
        if shown_ns > edge_ns:  # add a read in the tick before
            reads.insert(0, max(edge_ns, shown_ns - round(tick_ns)))
        return reads

    def is_settled(self, edge_ns: int, max_gap_ns: int) -> bool:
        """Return whether the energy at an edge is final: later readings do not improve it."""
        newest_ns = self._readings[-1].time_ns if self._readings else 0
        if self.clock is None or self.method != COUNTER:
            return newest_ns + self.reach_ns(max_gap_ns) >= edge_ns + self._late_ns()
        edge_ns += max(round(self.sensor.lag_s / NS), 0)
        last = self.clock.before(edge_ns)
        tick_ns = self.clock.tick_ns
        return newest_ns >= (edge_ns + 2 * tick_ns if last is None else last[0] + 2.05 * tick_ns + last[1])

    def _late_ns(self) -> int:
        """Return the delay of readings after an edge, for sensors without known ticks; 0 below `MIN_TICK_S`."""
        late_ns = self.shift_ns()
        return late_ns if late_ns >= MIN_TICK_S / NS else 0


def _clock_of(sensor: Sensor) -> TickClock | None:
    if sensor.tick_s < MIN_TICK_S or sensor.tick_error_s > MAX_OPEN * sensor.tick_s:
        return None
    return TickClock(sensor.tick_s, max(sensor.tick_error_s, 1e-5 * sensor.tick_s))
