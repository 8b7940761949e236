"""The energy of one device between any two times, with its error, from its readings. No I/O.

docs/energy.md describes the error model.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Collection, Sequence

from effllm.energy.counter_steps import UNLIMITED_W, CounterSteps
from effllm.energy.edge_levels import EdgeLevels
from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS, Readings
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.energy import NORMAL_95, NOT_MEASURED, EnergyAmount
from effllm.records.rank import COUNTER, Device, Event, Sample

#: Iterations are in step with the sensor if their aliasing is at least this share of the maximum.  An error up to
#: `LOCKED_ERROR` is not reported.
LOCKED, LOCKED_ERROR = 0.25, 0.02
#: Minimal variance, as a multiple of the variance of independent ticks.  The errors at the two edges of a pulse of
#: constant length may cancel, or add up to twice the variance.  It is also unknown whether all iterations have equal
#: power.
MIN_INFLATION = 1.5
#: Minimal number of iterations to find whether a run is in step with a sensor.
MIN_RHYTHM = 64
#: Variance for one rise and one fall of power per iteration, at random times within a tick: 2 / 12.
STEPS_J2 = 1 / 6
#: The harmonics of the tick for which the phases of iterations are added up.
HARMONICS = (1, 2, 3)


class Aliasing:
    """The aliasing error of one device's windows and of its run."""

    def __init__(self, timing: SensorTiming, powers: PowerSpread) -> None:
        self._timing, self._powers = timing, powers
        self._durations_s: Sequence[float] = ()
        self._run_iterations = 0
        self._run_j = 0.0  # energy of all windows

    def set_durations(self, durations_s: Sequence[float]) -> None:
        """Set the durations of the last iterations: iterations in step with ticks have a larger error."""
        self._durations_s = durations_s

    def variance_j2(self, span_s: float) -> float:
        if not self._measures_part:
            return 0.0
        sensor = self._timing.sensor
        inflation = MIN_INFLATION
        if total_s := sum(self._durations_s):
            count = span_s * len(self._durations_s) / total_s
            inflation = max(beat(self._durations_s, sensor.tick_s, count), MIN_INFLATION)
        return span_s * sensor.tick_s * inflation * self._powers.alias_w2(sensor.duty)

    @property
    def _measures_part(self) -> bool:
        sensor = self._timing.sensor
        return sensor.duty < 1.0 and self._timing.method == COUNTER and sensor.tick_s > 0

    def run_error(self, iterations: int, joules: float) -> float | None:
        """Return the error of the run to date if iterations are in step with the sensor, else ``None``.

        The error is the half-width of a 95 % interval as a share of the energy, at most 1.  Call this once per window.
        The sensor may miss the change of power within an iteration, so the largest difference of all readings is used.

        Args:
            iterations: the window's number of iterations.
            joules: the window's energy.
        """
        self._run_iterations += iterations
        self._run_j += joules
        count = self._run_iterations
        if not self._measures_part or self._run_j <= 0 or count < MIN_RHYTHM or not self._durations_s:
            return None
        clock = self._timing.clock
        tick_s = clock.tick_ns * NS if clock is not None else self._timing.sensor.tick_s
        inflation = beat(self._durations_s, tick_s, count)
        swing_w = self._powers.max_w - self._powers.min_w
        deviation_j = swing_w * tick_s * math.sqrt(count * inflation * STEPS_J2)
        error = min(NORMAL_95 * deviation_j / self._run_j, 1.0)
        return error if inflation >= LOCKED * count and error > LOCKED_ERROR else None


def beat(durations_s: Sequence[float], tick_s: float, count: float) -> float:
    """Return the variance of the aliasing error of iterations, relative to the variance for independent ticks.

    If the duration of iterations is a multiple of the tick, all iterations have the same phase, and their errors add
    up instead of averaging out.  The variance is the squared Fourier sum of the iterations' phases, over the first
    harmonics of the tick, with the weights of a step function.

    Args:
        durations_s: durations of consecutive iterations; at least one.
        tick_s: the sensor's period.
        count: number of iterations in the period that the error is for.
    """
    if count < 1.5:
        return 1.0
    total = weights = 0.0
    for harmonic in HARMONICS:
        turn = 2j * math.pi * harmonic / tick_s
        z = sum(cmath.exp(turn * duration_s) for duration_s in durations_s) / len(durations_s)
        if abs(1 - z) < 1e-6:
            power = count
        else:
            power = 1 + 2 * (z / (1 - z) - z * (1 - z**count) / (count * (1 - z) ** 2)).real
        total += max(power, 0.0) / harmonic**2
        weights += 1 / harmonic**2
    return total / weights


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
            self._powers.add(sample.time_ns, power_w, self.timing.sensor.tick_s, is_repeated=is_repeated)
        step = self._steps.step(sample, counter_j, power_w)
        self.readings.add(sample.time_ns, power_w, step)
        if counter_j is not None:
            self._steps.entered(sample.time_ns, counter_j)

    def take_events(self, time_s: float) -> list[Event]:
        """Return the events since the last call, with the unix time ``time_s`` of the newest sample."""
        return [Event(time_s, "energy_counter", text) for text in self._steps.take_events()]

    def is_settled(self, edge_ns: int) -> bool:
        """Return whether the energy at an edge is final: later readings do not improve it."""
        return self.timing.is_settled(edge_ns, self._steps.max_gap_ns)

    def energy(self, start_ns: int, end_ns: int) -> EnergyAmount:
        readings = self.readings
        if len(readings) < 2 or end_ns <= start_ns:
            return NOT_MEASURED
        # The last reading is valid until the sensor's next update.
        last_ns = readings[-1].time_ns + self.timing.reach_ns(self._steps.max_gap_ns)
        from_ns, to_ns = max(start_ns, readings[0].time_ns), min(end_ns, max(last_ns, start_ns))
        if to_ns <= from_ns:
            return NOT_MEASURED
        covered_s = (to_ns - from_ns - (readings.holes_ns(to_ns) - readings.holes_ns(from_ns))) * NS
        # Both levels are also computed for a hole, so that no joule is reported twice.
        start, end = self._levels.energy_level_at(from_ns), self._levels.energy_level_at(to_ns)
        if covered_s <= 0:
            return NOT_MEASURED
        joules = max(end.joules - start.joules, 0.0)
        # If the times of both edges have the same error, both edges are shifted by the same time.  Only the difference
        # between their powers then changes the energy.  An additional error of one edge shifts only this edge.
        both_s2 = min(start.shift_s2, end.shift_s2)
        # Even if power is equal at both edges of this span, it may differ at the edges of the run.  In a fast wave, the
        # power at an edge also differs from the power next to it.
        spread_w2 = self._powers.variance_w2 * (1 + 3 * self._powers.fastness()) / 4
        rise_j2 = both_s2 * max((end.power_w - start.power_w) ** 2 / 2, spread_w2)
        before_j2, after_j2 = readings.variances_j2(from_ns), readings.variances_j2(to_ns)
        return EnergyAmount(
            joules=joules,
            covered_s=covered_s,
            start_j2=start.variance_j2 + rise_j2 + (start.shift_s2 - both_s2) * start.power_w**2,
            end_j2=end.variance_j2 + rise_j2 + (end.shift_s2 - both_s2) * end.power_w**2,
            inside_j2=after_j2 - before_j2 + self.aliasing.variance_j2(covered_s),
            gain_j=self.timing.sensor.gain_error * joules,
            estimated_j=max(end.estimated_j - start.estimated_j, 0.0),
        )

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
