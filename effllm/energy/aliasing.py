"""The error of a sensor that measures only a part of each tick, also for iterations in step with the sensor. No I/O."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS
from effllm.energy.sensor_timing import SensorTiming
from effllm.records.energy import NORMAL_95
from effllm.records.rank import COUNTER

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
    """The aliasing error of one device's windows and of its run.

    Args:
        timing: the times of the device's readings.
        powers: the variation of the device's power.
    """

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
