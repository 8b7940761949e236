"""The error of a sensor that measures only a part of each tick, and of iterations in step with the sensor. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence

from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS
from effllm.energy.sensor_timing import SensorTiming
from effllm.energy.tick_energy import beat, beat_of
from effllm.records.energy import NORMAL_95
from effllm.records.rank import COUNTER

#: Iterations are in step with the sensor from this share of the maximal aliasing on; reported if the error is larger.
LOCKED, LOCKED_ERROR = 0.25, 0.02
#: Relative to independent ticks: the errors at both edges of a pulse of constant length cancel, or add up to twice the
#: variance.  Which case applies, and whether the power of all iterations is equal, is unknown.
MIN_INFLATION = 1.5
#: Minimal number of iterations with a measurable rhythm.
MIN_RHYTHM = 64
#: Power rises once and falls once in an iteration, each at a uniformly distributed time within a tick: 2 / 12.
STEPS_J2 = 1 / 6


class Aliasing:
    """The aliasing error of one device's windows and of its run.

    Args:
        timing: the times of its readings.
        powers: the variation of its power.
    """

    def __init__(self, timing: SensorTiming, powers: PowerSpread) -> None:
        self._timing, self._powers = timing, powers
        self._rhythm: tuple[float, float] | None = None
        self._run_iterations = 0
        self._run_j = 0.0  # of all windows

    def set_rhythm(self, step_s: float, deviation_s: float) -> None:
        """Set the mean and the deviation of the iteration time, since ticks may beat with iterations."""
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
        """Return the error of the run to date if iterations are in step with the sensor; ``None`` if they are not.

        It is a half-width of 95 % as a share of the energy, at most 1.  Call it once for each window, in order.
        The sensor may miss the change of power within an iteration, so the largest difference of all readings is used.

        Args:
            iterations: the window's number of iterations.
            joules: the window's energy.
            durations_s: durations of the last iterations, including this window's.
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
