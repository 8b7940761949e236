"""The error of a sensor that measures only a part of each tick, also for iterations in step with the sensor. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence

from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS
from effllm.energy.sensor_timing import SensorTiming
from effllm.energy.tick_energy import beat, beat_of
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


class Aliasing:
    """The aliasing error of one device's windows and of its run.

    Args:
        timing: the times of the device's readings.
        powers: the variation of the device's power.
    """

    def __init__(self, timing: SensorTiming, powers: PowerSpread) -> None:
        self._timing, self._powers = timing, powers
        self._rhythm: tuple[float, float] | None = None
        self._run_iterations = 0
        self._run_j = 0.0  # energy of all windows

    def set_rhythm(self, step_s: float, deviation_s: float) -> None:
        """Set median and deviation of the iteration time: iterations in step with ticks have a larger error."""
        self._rhythm = (step_s, deviation_s)

    def variance_j2(self, span_s: float) -> float:
        if not self._measures_part:
            return 0.0
        sensor = self._timing.sensor
        ticks = span_s / sensor.tick_s
        inflation = 1.0 if self._rhythm is None else beat(*self._rhythm, sensor.tick_s, span_s)
        inflation = max(inflation, MIN_INFLATION)
        return ticks * inflation * self._powers.alias_w2(sensor.duty) * sensor.tick_s**2

    @property
    def _measures_part(self) -> bool:
        sensor = self._timing.sensor
        return sensor.duty < 1.0 and self._timing.method == COUNTER and sensor.tick_s > 0

    def run_error(self, iterations: int, joules: float, durations_s: Sequence[float]) -> float | None:
        """Return the error of the run to date if iterations are in step with the sensor, else ``None``.

        The error is the half-width of a 95 % interval as a share of the energy, at most 1.  Call this once per window.
        The sensor may miss the change of power within an iteration, so the largest difference of all readings is used.

        Args:
            iterations: the window's number of iterations.
            joules: the window's energy.
            durations_s: durations of the last iterations, including the window's iterations.
        """
        self._run_iterations += iterations
        self._run_j += joules
        count = self._run_iterations
        if not self._measures_part or self._run_j <= 0 or count < MIN_RHYTHM or not durations_s:
            return None
        clock = self._timing.clock
        tick_s = clock.tick_ns * NS if clock is not None else self._timing.sensor.tick_s
        inflation = beat_of(durations_s, tick_s, count)
        swing_w = self._powers.max_w - self._powers.min_w
        deviation_j = swing_w * tick_s * math.sqrt(count * inflation * STEPS_J2)
        error = min(NORMAL_95 * deviation_j / self._run_j, 1.0)
        return error if inflation >= LOCKED * count and error > LOCKED_ERROR else None
