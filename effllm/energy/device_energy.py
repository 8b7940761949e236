"""The energy of one device between any two times, with its error, from its readings. No I/O.

This file shows how the joules of a window come about; the others of this package refine it:

1. `EnergyLedger.add` gets a reading: a counter, a power, or both.  Its step is the energy since the reading before: the
   counter's difference if it is possible, else integrated power, else a hole.  `readings` has the totals.
2. Windows end at iterations, and counters change at ticks.  `sensor_timing`, with `tick_clock`, derives their times
   from the readings, and the times of the next reads.  `edge_levels` gives the total at the edge of a window.
3. `EnergyLedger.energy` subtracts the totals at both edges of a window, and adds up the errors: of both edges, of the
   inside (`power_spread`), and of the board's gain.

Each step of a counter must be physically possible.  If a counter fails (reset, frozen or unreadable), the gap is
estimated from power and marked as estimated; without power the gap is a hole.  A gap never counts as zero energy.

docs/energy.md describes the error model, docs/decisions/energy.md the trace on which each refinement earns its place.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from effllm.energy.edge_levels import EdgeLevels
from effllm.energy.power_spread import Aliasing, PowerSpread
from effllm.energy.readings import HOLE, NS, Point, Readings, Step
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.energy import NOT_MEASURED, EnergyAmount
from effllm.records.rank import AVERAGE, COUNTER, INSTANT, Device, Event, Sample

#: The power in a step of a counter may exceed the power limit by this factor (boosts, board losses).
OVERSHOOT = 1.2
#: Power limit for devices without a known limit: no accelerator, module or node exceeds this power for long.
UNLIMITED_W = 20_000.0
#: A counter is frozen if it does not change for this time while integrated power grows by this energy.
FROZEN_J, MIN_FROZEN_S = 20.0, 0.5


class _Base(NamedTuple):
    """A plausible counter reading, with the totals at its time."""

    time_ns: int
    counter_j: float
    total_j: float
    total_variance_j2: float
    integrated_j: float  # running total of integrated power


class EnergyLedger:
    """The energy ledger of one device; a time above ``max_gap_s`` between two power readings is a hole."""

    def __init__(self, device: Device, max_gap_s: float) -> None:
        self.readings = Readings()
        self._powers = PowerSpread()
        self.timing = SensorTiming(device, self.readings)
        self._edge_levels = EdgeLevels(self.readings, self.timing, self._powers)
        self.aliasing = Aliasing(self.timing, self._powers)
        self._max_gap_ns = round(max_gap_s / NS)
        self._max_power_w = (device.power_limit_w or 0.0) * OVERSHOOT or UNLIMITED_W
        self._last_counter: tuple[int, float] | None = None  # time in ns, and joules
        self._doubted_base: _Base | None = None  # the last plausible reading, while the counter is not used
        self._before_jump: _Base | None = None  # the last reading before a jump, because the counter may jump back
        self._last_change: _Base | None = None  # the last change of the counter
        self._integrated_j = 0.0  # running total of integrated power
        self._is_doubt_reported = False
        self._events: list[str] = []  # texts

    def allow_gap(self, max_gap_s: float) -> None:
        """Raise the maximal time between power readings; a longer time is a hole."""
        self._max_gap_ns = max(self._max_gap_ns, round(max_gap_s / NS))

    def add(self, sample: Sample) -> None:
        """Add a reading, which must be newer than the last reading."""
        # The power limit may be raised during a run.
        self._max_power_w = max(self._max_power_w, sample.gauges.get("power_limit_w", 0.0) * OVERSHOOT)
        power_w = _usable(sample.power_w if sample.power_w is not None else sample.power_average_w)
        if power_w is not None and power_w > UNLIMITED_W:
            power_w = None
        counter_j = _usable(sample.energy_j) if self.timing.method == COUNTER else None
        if power_w is None and counter_j is None and self._last_counter is not None:
            return  # the read failed; the counter's next reading includes the missing energy
        if power_w is not None:
            is_repeated = self.timing.note_power_reading(sample.time_ns)
            self._powers.add_power(sample.time_ns, power_w, self.timing.sensor.tick_s, is_repeated=is_repeated)
        self.readings.add_reading(sample.time_ns, power_w, self._next_step(sample, counter_j, power_w))
        if counter_j is not None:
            if self._last_counter is None or counter_j != self._last_counter[1]:
                self._last_change = self._base_at(sample.time_ns, counter_j)
            self._last_counter = (sample.time_ns, counter_j)

    def take_events(self, time_s: float) -> list[Event]:
        """Return the events since the last call, with the unix time ``time_s`` of the newest sample."""
        texts, self._events = self._events, []
        return [Event(time_s, "energy_counter", text) for text in texts]

    def is_settled(self, edge_ns: int) -> bool:
        """Return whether the energy at an edge is final: later readings do not improve it."""
        return self.timing.is_settled(edge_ns, self._max_gap_ns)

    def energy(self, start_ns: int, end_ns: int) -> EnergyAmount:
        """Return the energy of a span with its error; fix the levels at its edges, so that adjacent spans add up."""
        readings = self.readings
        if not readings or end_ns <= start_ns:
            return NOT_MEASURED
        if len(readings) == 1:
            return self._energy_of_one_reading(start_ns, end_ns)
        # The last reading is valid until the sensor's next update.
        last_ns = readings[-1].time_ns + self.timing.valid_ns(self._max_gap_ns)
        from_ns, to_ns = max(start_ns, readings[0].time_ns), min(end_ns, max(last_ns, start_ns))
        if to_ns <= from_ns:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns - (readings.holes_until_ns(to_ns) - readings.holes_until_ns(from_ns))) * NS
        # Both levels are also computed for a hole, so that no joule is reported twice.
        start, end = self._edge_levels.fixed_level_at(from_ns), self._edge_levels.fixed_level_at(to_ns)
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
        reach_ns = self.timing.valid_ns(self._max_gap_ns)
        from_ns, to_ns = max(start_ns, point.time_ns), min(end_ns, point.time_ns + reach_ns)
        if to_ns <= from_ns or point.power_w is None:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns) * NS
        joules = point.power_w * covered_s
        return EnergyAmount(joules, covered_s, gain_j=self.timing.sensor.gain_error * joules)

    def forget_before(self, time_ns: int) -> None:
        """Drop the readings that are not needed for spans after ``time_ns``."""
        self.readings.forget_before(time_ns - round(3 * self.timing.sensor.tick_s / NS))
        self._edge_levels.forget_before(time_ns)

    def compact(self, edges_ns: Collection[int], until_ns: int, margin_ns: int) -> None:  # see `Readings.compact`
        # The levels at other times are of spans that were answered before; there may be many spans in one window.
        self._edge_levels.keep_only(edges_ns)
        # A later step may be computed from these readings.
        bases = (self._doubted_base, self._before_jump, self._last_change)
        bases_ns = [base.time_ns for base in bases if base is not None]
        self.readings.compact([*edges_ns, *self._edge_levels.edges_ns, *bases_ns], until_ns, margin_ns)

    # --- steps ---

    def _next_step(self, sample: Sample, counter_j: float | None, power_w: float | None) -> Step:
        """Return the step from the last reading to a sample; a step of the counter may replace earlier steps."""
        if not self.readings:
            return HOLE
        last, method, power_step = self.readings[-1], self.timing.method, None
        span_ns = sample.time_ns - last.time_ns
        if last.power_w is not None and power_w is not None and span_ns <= self._max_gap_ns:
            span_s = span_ns * NS
            power_step = (last.power_w + power_w) / 2 * span_s, self._powers.sampling_j2(span_s)
        if method != COUNTER:
            return Step(method, *power_step, False) if power_step else HOLE
        expected_j = power_step[0] if power_step else None
        self._integrated_j += expected_j or 0.0
        if counter_j is not None and self._last_counter is not None:
            step = self._counter_step(last, sample.time_ns, counter_j, expected_j)
            if step is not None:
                return step
        elif self._doubted_base is None and self._last_counter is not None:
            self._doubted_base = self._base_at(*self._last_counter)  # the read has failed
        if power_step is None:
            return HOLE
        return Step(INSTANT if sample.power_w is not None else AVERAGE, *power_step, True)

    def _counter_step(self, last: Point, time_ns: int, counter_j: float, expected_j: float | None) -> Step | None:
        """Return the step from the counter, or ``None`` if it is not plausible; then the counter is no longer used."""
        assert self._last_counter is not None
        before_ns, before_j = self._last_counter
        step_j = counter_j - before_j
        is_possible = 0.0 <= step_j <= self._max_step_j(time_ns - before_ns)
        if self._doubted_base is not None:
            return self._step_of_doubted_counter(last, time_ns, counter_j, expected_j, is_possible)
        if self._before_jump is not None:
            # The counter may jump back.  Of the step from the last value and the step from the value before the jump,
            # the step nearer to the expected energy is right.
            back_j = counter_j - self._before_jump.counter_j - (last.total_j - self._before_jump.total_j)
            is_back_possible = 0.0 <= back_j <= self._max_step_j(time_ns - before_ns)
            usual_j = self._powers.mean_w * (time_ns - before_ns) * NS or None
            if is_back_possible and (not is_possible or _is_nearer(back_j, step_j, expected_j or usual_j)):
                return Step(COUNTER, back_j, 0.0, False)
        if not is_possible:
            why = f"a decrease of {-step_j:.0f} J" if step_j < 0 else f"a jump of {step_j:.0f} J"
            self._stop_using_counter(self._base_at(before_ns, before_j), why)
            return None
        if step_j == 0.0 and self._is_frozen(time_ns):
            assert self._last_change is not None
            integrated_j = self._integrated_j - self._last_change.integrated_j
            self._stop_using_counter(self._last_change, "no change while the device draws power")
            variance_j2 = self._powers.sampling_j2((time_ns - self._last_change.time_ns) * NS)
            return self._replace_steps(time_ns, self._last_change, integrated_j, variance_j2, INSTANT)
        self.timing.add_tick_bounds(before_ns, time_ns, has_changed=step_j > 0.0)
        return Step(COUNTER, step_j, 0.0, False)

    def _step_of_doubted_counter(
        self, last: Point, time_ns: int, counter_j: float, expected_j: float | None, is_possible: bool
    ) -> Step | None:
        """Return the step of a counter that is not used, if it has jumped back or now counts from a new value."""
        assert self._doubted_base is not None and self._last_counter is not None
        base, (before_ns, before_j) = self._doubted_base, self._last_counter
        since_j, added_j = counter_j - base.counter_j, last.total_j - base.total_j  # added: from power, since the base
        counter_resumed = counter_j != before_j and 0.0 <= since_j <= self._max_step_j(time_ns - base.time_ns)
        counter_continues = is_possible and counter_j != before_j and base.time_ns < before_ns == last.time_ns
        is_new_value = counter_continues and _is_nearer(counter_j - before_j, since_j - added_j, expected_j)
        if counter_resumed and not is_new_value:
            self._use_counter_again()
            # Windows that were reported in the meantime keep the variance of integrated power.
            return self._replace_steps(time_ns, base, since_j, last.total_variance_j2 - base.total_variance_j2, COUNTER)
        if counter_continues:
            self._before_jump = base
            self._use_counter_again()
            return Step(COUNTER, counter_j - before_j, 0.0, False)
        return None

    def _replace_steps(self, time_ns: int, since: _Base, joules: float, variance_j2: float, method: str) -> Step:
        """Replace the steps since a reading by one corrected step; steps already reported in a window are kept."""
        last = self.readings.remove_steps_after(max([since.time_ns, *self._edge_levels.edges_ns]))
        missing_j = since.total_j + joules - last.total_j
        max_j = self._max_step_j(time_ns - last.time_ns)
        is_reported = last.time_ns > since.time_ns or method != COUNTER
        return Step(method, min(max(missing_j, 0.0), max_j), variance_j2 if is_reported else 0.0, method != COUNTER)

    def _base_at(self, time_ns: int, counter_j: float) -> _Base:
        last = self.readings[-1]
        return _Base(time_ns, counter_j, last.total_j, last.total_variance_j2, self._integrated_j)

    def _max_step_j(self, span_ns: int) -> float:
        sensor = self.timing.sensor
        return self._max_power_w * (span_ns * NS + max(2 * sensor.tick_s, 0.1) + sensor.lag_s)

    def _is_frozen(self, time_ns: int) -> bool:
        """Whether the counter stayed constant for longer than its ticks explain, while the device drew power."""
        if self._last_change is None:
            return False
        sensor = self.timing.sensor
        still_s = (time_ns - self._last_change.time_ns) * NS
        max_s = max(3 * sensor.tick_s, MIN_FROZEN_S) + sensor.lag_s
        return still_s > max_s and self._integrated_j - self._last_change.integrated_j > FROZEN_J

    def _stop_using_counter(self, base: _Base, why: str) -> None:
        self._doubted_base = base
        self._is_doubt_reported = True
        self._events.append(f"the energy counter is not used: {why}; integrated power is used instead")

    def _use_counter_again(self) -> None:
        self._doubted_base = None
        if self._is_doubt_reported:  # failed reads are reported by the sampler
            self._events.append("the energy counter is used again")
        self._is_doubt_reported = False


def _is_nearer(value: float, other: float, target: float | None) -> bool:
    return target is not None and abs(value - target) < abs(other - target)


def _usable(reading: float | None) -> float | None:
    return reading if reading is not None and math.isfinite(reading) and reading >= 0 else None
