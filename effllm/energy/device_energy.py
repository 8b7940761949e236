"""The energy of one device between any two times, with its error, from its readings. No I/O.

This file shows how the joules of a window come about; the others of this package refine it:

1. `EnergyLedger.add` gets a reading: a counter, a power, or both.  `counter_steps` gives the energy since the reading
   before: the counter's difference if it is possible, else integrated power, else a hole.  `readings` has the totals.
2. Windows end at iterations, and counters change at ticks.  `sensor_timing`, with `tick_clock`, derives their times
   from the readings, and the times of the next reads.  `edge_levels` gives the total at the edge of a window.
3. `EnergyLedger.energy` subtracts the totals at both edges of a window, and adds up the errors: of both edges, of the
   inside (`power_spread`), and of the board's gain.

docs/energy.md describes the error model, docs/decisions/energy.md the trace on which each refinement earns its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from effllm.energy.counter_steps import UNLIMITED_W, CounterSteps
from effllm.energy.edge_levels import EdgeLevels
from effllm.energy.power_spread import Aliasing, PowerSpread
from effllm.energy.readings import NS, Readings
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.energy import NOT_MEASURED, EnergyAmount
from effllm.records.rank import COUNTER, Device, Event, Sample


class EnergyLedger:
    """The energy ledger of one device.

    Args:
        device: the device with its sensor (tick, lag, duty), power limit and method.
        max_gap_s: maximal time between power readings; a longer time is a hole.
    """

    def __init__(self, device: Device, max_gap_s: float) -> None:
        self.readings = Readings()
        self._powers = PowerSpread()
        self.timing = SensorTiming(device, self.readings)
        self._levels = EdgeLevels(self.readings, self.timing, self._powers)
        self._steps = CounterSteps(
            self.readings,
            self.timing,
            self._powers,
            self._levels,
            power_limit_w=device.power_limit_w or 0.0,
            max_gap_ns=round(max_gap_s / NS),
        )
        self.aliasing = Aliasing(self.timing, self._powers)

    def allow_gap(self, max_gap_s: float) -> None:
        """Raise the maximal time between power readings; a longer time is a hole."""
        self._steps.max_gap_ns = max(self._steps.max_gap_ns, round(max_gap_s / NS))

    def add(self, sample: Sample) -> None:
        """Add a reading, which must be newer than the last reading."""
        self._steps.raise_limit(sample.gauges.get("power_limit_w", 0.0))
        power_w = _usable(sample.power_w if sample.power_w is not None else sample.power_average_w)
        if power_w is not None and power_w > UNLIMITED_W:
            power_w = None
        counter_j = _usable(sample.energy_j) if self.timing.method == COUNTER else None
        if power_w is None and counter_j is None and self._steps.was_read:
            return  # the read failed; the counter's next reading includes the missing energy
        if power_w is not None:
            is_repeated = self.timing.is_repeated(sample.time_ns)
            self._powers.add_power(sample.time_ns, power_w, self.timing.sensor.tick_s, is_repeated=is_repeated)
        step = self._steps.step(sample, counter_j, power_w)
        self.readings.add_reading(sample.time_ns, power_w, step)
        if counter_j is not None:
            self._steps.note_counter(sample.time_ns, counter_j)

    def take_events(self, time_s: float) -> list[Event]:
        """Return the events since the last call, with the unix time ``time_s`` of the newest sample."""
        return [Event(time_s, "energy_counter", text) for text in self._steps.take_events()]

    def is_settled(self, edge_ns: int) -> bool:
        """Return whether the energy at an edge is final: later readings do not improve it."""
        return self.timing.is_settled(edge_ns, self._steps.max_gap_ns)

    def energy(self, start_ns: int, end_ns: int) -> EnergyAmount:
        """Return the energy of a span with its error; the levels at its edges are fixed, so adjacent spans add up."""
        readings = self.readings
        if not readings or end_ns <= start_ns:
            return NOT_MEASURED
        if len(readings) == 1:
            return self._energy_of_one_reading(start_ns, end_ns)
        # The last reading is valid until the sensor's next update.
        last_ns = readings[-1].time_ns + self.timing.reach_ns(self._steps.max_gap_ns)
        from_ns, to_ns = max(start_ns, readings[0].time_ns), min(end_ns, max(last_ns, start_ns))
        if to_ns <= from_ns:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns - (readings.holes_until_ns(to_ns) - readings.holes_until_ns(from_ns))) * NS
        # Both levels are also computed for a hole, so that no joule is reported twice.
        start, end = self._levels.fixed_level_at(from_ns), self._levels.fixed_level_at(to_ns)
        if covered_s <= 0:
            return NOT_MEASURED
        joules = max(end.joules - start.joules, 0.0)
        # If the times of both edges have the same error, both edges are shifted by the same time.  Only the difference
        # between their powers then changes the energy.  An additional error of one edge shifts only this edge.
        common_shift_s2 = min(start.shift_s2, end.shift_s2)
        # Even if power is equal at both edges of this span, it may differ at the edges of the run.  In a fast wave, the
        # power at an edge also differs from the power next to it.
        edge_power_variance_w2 = self._powers.variance_w2 * (1 + 3 * self._powers.fastness()) / 4
        common_shift_j2 = common_shift_s2 * max((end.power_w - start.power_w) ** 2 / 2, edge_power_variance_w2)
        before_j2, after_j2 = readings.variance_until_j2(from_ns), readings.variance_until_j2(to_ns)
        return EnergyAmount(
            joules=joules,
            covered_s=covered_s,
            start_j2=start.variance_j2 + common_shift_j2 + (start.shift_s2 - common_shift_s2) * start.power_w**2,
            end_j2=end.variance_j2 + common_shift_j2 + (end.shift_s2 - common_shift_s2) * end.power_w**2,
            inside_j2=after_j2 - before_j2 + self.aliasing.variance_j2(covered_s),
            gain_j=self.timing.sensor.gain_error * joules,
            estimated_j=max(end.estimated_j - start.estimated_j, 0.0),
        )

    def _energy_of_one_reading(self, start_ns: int, end_ns: int) -> EnergyAmount:
        """Return the energy by the only reading so far: a node's power supplies are read every ten seconds."""
        point = self.readings[0]
        reach_ns = self.timing.reach_ns(self._steps.max_gap_ns)
        from_ns, to_ns = max(start_ns, point.time_ns), min(end_ns, point.time_ns + reach_ns)
        if to_ns <= from_ns or point.power_w is None:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns) * NS
        joules = point.power_w * covered_s
        return EnergyAmount(joules, covered_s, gain_j=self.timing.sensor.gain_error * joules)

    def forget_before(self, time_ns: int) -> None:
        """Drop the readings that are not needed for spans after ``time_ns``."""
        self.readings.forget_before(time_ns - round(3 * self.timing.sensor.tick_s / NS))
        self._levels.forget_before(time_ns)

    def compact(self, edges_ns: Collection[int], until_ns: int, margin_ns: int) -> None:
        # The levels at other times are of spans that were answered before; there may be many spans in one window.
        self._levels.keep_only(edges_ns)
        edges_ns = [*edges_ns, *self._levels.edges_ns, *self._steps.bases_ns]
        self.readings.compact(edges_ns, until_ns, margin_ns)


def _usable(reading: float | None) -> float | None:
    return reading if reading is not None and math.isfinite(reading) and reading >= 0 else None
