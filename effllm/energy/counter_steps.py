"""The energy step of each reading: from the counter if its step is plausible, else from power, else a hole. No I/O.

Each step of a counter must be physically possible.  If a counter fails (reset, frozen or unreadable), the gap is
estimated from power and marked as estimated; without power the gap is a hole.  A gap never counts as zero energy.
"""

from __future__ import annotations

from typing import NamedTuple

from effllm.energy.edge_levels import EdgeLevels
from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import HOLE, NS, Point, Readings, Step
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.rank import AVERAGE, COUNTER, INSTANT, Sample

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
    variances_j2: float
    flow_j: float  # running total of integrated power


class CounterSteps:
    """Checks the steps of the counter of one device.

    Args:
        readings: the device's readings so far.
        timing: the times of the readings.
        powers: the variation of power.
        levels: the energy at the edges of windows; steps before the last edge are not replaced.
        power_limit_w: the device's power limit, or 0 if it is unknown.
        max_gap_ns: maximal time between power readings; a longer time is a hole.
    """

    def __init__(
        self,
        readings: Readings,
        timing: SensorTiming,
        powers: PowerSpread,
        levels: EdgeLevels,
        power_limit_w: float,
        max_gap_ns: int,
    ) -> None:
        self._readings, self._timing, self._powers, self._levels = readings, timing, powers, levels
        self.max_gap_ns = max_gap_ns
        self._limit_w = power_limit_w * OVERSHOOT or UNLIMITED_W
        self._last_counter: tuple[int, float] | None = None
        self._doubted: _Base | None = None  # the last plausible reading, while the counter is not used
        self._left: _Base | None = None  # the last reading before a jump, because the counter may jump back
        self._moved: _Base | None = None  # the last change of the counter
        self._flow_j = 0.0  # running total of integrated power
        self._is_doubt_reported = False
        self._events: list[str] = []

    @property
    def was_read(self) -> bool:
        return self._last_counter is not None

    @property
    def bases_ns(self) -> list[int]:
        """Times of the readings from which a later step may be computed."""
        return [base.time_ns for base in (self._doubted, self._left, self._moved) if base is not None]

    def take_events(self) -> list[str]:
        events, self._events = self._events, []
        return events

    def raise_limit(self, power_limit_w: float) -> None:
        """Raise the limit of plausible power if the device's power limit is raised during a run."""
        self._limit_w = max(self._limit_w, power_limit_w * OVERSHOOT)

    def step(self, sample: Sample, counter_j: float | None, power_w: float | None) -> Step:
        """Return the step from the last reading to a sample; a step of the counter may replace earlier steps."""
        if not self._readings:
            return HOLE
        last, method = self._readings[-1], self._timing.method
        by_power = self._by_power(last, sample.time_ns - last.time_ns, power_w)
        if method != COUNTER:
            return Step(method, *by_power, False) if by_power else HOLE
        expected_j = by_power[0] if by_power else None
        self._flow_j += expected_j or 0.0
        if counter_j is not None and self._last_counter is not None:
            step = self._by_counter(last, sample.time_ns, counter_j, expected_j)
            if step is not None:
                return step
        elif self._doubted is None and self._last_counter is not None:
            self._doubted = self._base(*self._last_counter)  # the read has failed
        if by_power is None:
            return HOLE
        return Step(INSTANT if sample.power_w is not None else AVERAGE, *by_power, True)

    def note_counter(self, time_ns: int, counter_j: float) -> None:
        if self._last_counter is None or counter_j != self._last_counter[1]:
            self._moved = self._base(time_ns, counter_j)
        self._last_counter = (time_ns, counter_j)

    def _by_power(self, last: Point, span_ns: int, power_w: float | None) -> tuple[float, float] | None:
        if last.power_w is None or power_w is None or span_ns > self.max_gap_ns:
            return None
        span_s = span_ns * NS
        return (last.power_w + power_w) / 2 * span_s, self._powers.sampling_j2(span_s)

    def _by_counter(self, last: Point, time_ns: int, counter_j: float, expected_j: float | None) -> Step | None:
        """Return the step from the counter, or ``None`` if the step is not plausible."""
        assert self._last_counter is not None
        before_ns, before_j = self._last_counter
        step_j = counter_j - before_j
        is_possible = 0.0 <= step_j <= self._max_j(time_ns - before_ns)
        if self._doubted is not None:
            return self._step_after_distrust(last, time_ns, counter_j, expected_j, is_possible)
        if self._left is not None:
            # The counter may jump back.  Of the step from the last value and the step from the value before the jump,
            # the step nearer to the expected energy is right.
            as_if_j = counter_j - self._left.counter_j - (last.total_j - self._left.total_j)
            returned = 0.0 <= as_if_j <= self._max_j(time_ns - before_ns)
            usual_j = self._powers.mean_w * (time_ns - before_ns) * NS or None
            if returned and (not is_possible or _nearer(as_if_j, step_j, expected_j or usual_j)):
                return Step(COUNTER, as_if_j, 0.0, False)
        if not is_possible:
            why = f"a decrease of {-step_j:.0f} J" if step_j < 0 else f"a jump of {step_j:.0f} J"
            self._doubt(self._base(before_ns, before_j), why)
            return None
        if step_j == 0.0 and self._is_frozen(time_ns):
            assert self._moved is not None
            flow_j = self._flow_j - self._moved.flow_j
            self._doubt(self._moved, "no change while the device draws power")
            variance_j2 = self._powers.sampling_j2((time_ns - self._moved.time_ns) * NS)
            return self._corrected(time_ns, self._moved, flow_j, variance_j2, INSTANT)
        self._timing.add_tick_bounds(before_ns, time_ns, has_moved=step_j > 0.0)
        return Step(COUNTER, step_j, 0.0, False)

    def _step_after_distrust(
        self, last: Point, time_ns: int, counter_j: float, expected_j: float | None, is_possible: bool
    ) -> Step | None:
        """Return the step of a counter that is not used, if it has jumped back or now counts from a new value."""
        assert self._doubted is not None and self._last_counter is not None
        base, (before_ns, before_j) = self._doubted, self._last_counter
        since_j, entered_j = counter_j - base.counter_j, last.total_j - base.total_j
        counter_resumed = counter_j != before_j and 0.0 <= since_j <= self._max_j(time_ns - base.time_ns)
        counter_continues = is_possible and counter_j != before_j and base.time_ns < before_ns == last.time_ns
        if counter_resumed and not (
            counter_continues and _nearer(counter_j - before_j, since_j - entered_j, expected_j)
        ):
            self._trust_counter_again()
            # Windows that were reported in the meantime keep the variance of integrated power.
            return self._corrected(time_ns, base, since_j, last.variances_j2 - base.variances_j2, COUNTER)
        if counter_continues:
            self._left = base
            self._trust_counter_again()
            return Step(COUNTER, counter_j - before_j, 0.0, False)
        return None

    def _corrected(self, time_ns: int, since: _Base, joules: float, variance_j2: float, method: str) -> Step:
        """Replace the steps since `since` by one corrected step; steps already reported in a window are kept."""
        last = self._readings.remove_steps_after(max([since.time_ns, *self._levels.edges_ns]))
        left_j = since.total_j + joules - last.total_j
        max_j = self._max_j(time_ns - last.time_ns)
        is_reported = last.time_ns > since.time_ns or method != COUNTER
        return Step(method, min(max(left_j, 0.0), max_j), variance_j2 if is_reported else 0.0, method != COUNTER)

    def _base(self, time_ns: int, counter_j: float) -> _Base:
        last = self._readings[-1]
        return _Base(time_ns, counter_j, last.total_j, last.variances_j2, self._flow_j)

    def _max_j(self, span_ns: int) -> float:
        sensor = self._timing.sensor
        return self._limit_w * (span_ns * NS + max(2 * sensor.tick_s, 0.1) + sensor.lag_s)

    def _is_frozen(self, time_ns: int) -> bool:
        """Whether the counter stayed constant for longer than its ticks explain, while the device drew power."""
        if self._moved is None:
            return False
        sensor = self._timing.sensor
        still_s = (time_ns - self._moved.time_ns) * NS
        max_s = max(3 * sensor.tick_s, MIN_FROZEN_S) + sensor.lag_s
        return still_s > max_s and self._flow_j - self._moved.flow_j > FROZEN_J

    def _doubt(self, base: _Base, why: str) -> None:
        self._doubted = base
        self._is_doubt_reported = True
        self._events.append(f"the energy counter is not used: {why}; integrated power is used instead")

    def _trust_counter_again(self) -> None:
        self._doubted = None
        if self._is_doubt_reported:  # failed reads are reported by the sampler
            self._events.append("the energy counter is used again")
        self._is_doubt_reported = False


def _nearer(value: float, other: float, target: float | None) -> bool:
    return target is not None and abs(value - target) < abs(other - target)
