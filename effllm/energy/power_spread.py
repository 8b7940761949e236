"""The variation of a device's power, overall and from tick to tick, and the errors that follow from it. No I/O."""

from __future__ import annotations

import cmath
import math
from collections import deque
from collections.abc import Sequence
from operator import mul

from effllm.energy.readings import NS
from effllm.energy.sensor_timing import SensorTiming
from effllm.energy.tick_clock import USUAL_TICK_S
from effllm.records.energy import NORMAL_95
from effllm.records.rank import COUNTER

#: `_independence` of a wave with a period of seven ticks; faster waves have larger values.
MIN_FAST = 0.4
#: The hidden variation within a tick of a fast wave, and its increase if power alternates from tick to tick.
FAST_HIDDEN, ALTERNATING_HIDDEN = 0.5, 4.2
#: Adjacent readings may have missed changes of power: with k changes, a 95 % interval by Student's t with 2k degrees
#: of freedom has about 1 + 1.5 / k times the variance.
MISSED_CHANGES = 1.5
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


class PowerSpread:
    """The variation of power, overall and from one reading to the next, with slowly decaying weights."""

    def __init__(self) -> None:
        self.mean_w = self.variance_w2 = 0.0  # over about the last minute
        self._num_readings = 0
        self._changes_w: deque[float] = deque(maxlen=96)  # changes between readings at most a few ticks apart
        self._mean_change_w2 = 0.0  # mean square of the changes in `_changes_w`
        self._change_products: deque[float] = deque(maxlen=96)  # products of two consecutive changes
        self._last_change_w: float | None = None
        self._last_power: tuple[int, float] | None = None  # time in ns, and watts
        # Sums that decay within a minute: times between readings, and their changes to the powers of two and four.
        self._decayed_s = self._decayed_w2 = self._decayed_w4 = 0.0
        self._tick_s = USUAL_TICK_S
        self.min_w, self.max_w = math.inf, 0.0

    def add_power(self, time_ns: int, power_w: float, tick_s: float, *, is_repeated: bool = False) -> None:
        """Add a reading of power; it is repeated if this held value was already read in the same tick.

        The tick of a continuous sensor is 0.
        """
        self._num_readings += 1
        weight = max(1 / self._num_readings, 1 / 64)
        deviation_w = power_w - self.mean_w
        self.mean_w += weight * deviation_w
        self.variance_w2 = (1 - weight) * (self.variance_w2 + weight * deviation_w * deviation_w)
        self.min_w, self.max_w = min(self.min_w, power_w), max(self.max_w, power_w)
        tick_s = tick_s or USUAL_TICK_S
        if self._last_power is None:
            self._last_power = (time_ns, power_w)
            return
        gap_s, step_w = (time_ns - self._last_power[0]) * NS, power_w - self._last_power[1]
        # These sums give a lower bound of the changes from tick to tick, even if power is read only once per second.
        decay = math.exp(-gap_s / 60)
        self._decayed_s = decay * self._decayed_s + gap_s
        self._decayed_w2 = decay * self._decayed_w2 + step_w**2
        self._decayed_w4 = decay * self._decayed_w4 + step_w**4
        self._tick_s = tick_s
        if gap_s <= 0.6 * tick_s or is_repeated:  # less than a tick since the last reading
            return
        change_w = step_w if gap_s < 1.5 * tick_s else None  # of one tick
        if change_w is not None:
            self._changes_w.append(abs(change_w))
            self._mean_change_w2 = sum(map(mul, self._changes_w, self._changes_w)) / len(self._changes_w)
            if self._last_change_w is not None:
                self._change_products.append(change_w * self._last_change_w)
        self._last_power, self._last_change_w = (time_ns, power_w), change_w

    def _change_w2(self) -> float:  # mean square of the changes from tick to tick
        min_change_w2 = self._decayed_w2 / self._decayed_s * self._tick_s if self._decayed_s > 0 else 0.0
        return max(self._mean_change_w2, min_change_w2)

    def noise_w(self) -> float:
        """Return the lower quartile of the changes from one tick to the next: power is noise if it changes less."""
        return sorted(self._changes_w)[len(self._changes_w) // 4] + 0.05 if self._changes_w else 0.05

    def unseen_w2(self, change_w: float) -> float:
        """Return the variance of power within a tick that is not visible in the adjacent ticks.

        The more often power changes from tick to tick, the more likely are several changes within three ticks.
        ``change_w`` is the difference of this tick from the adjacent ticks.  The factors are empirical.
        """
        if not self._changes_w:
            return self.variance_w2 * 0.02
        noise_w = self.noise_w()
        large_share = sum(change > 4 * noise_w for change in self._changes_w) / len(self._changes_w)
        alternation = self._alternation()
        fast = self.fastness() * (FAST_HIDDEN + ALTERNATING_HIDDEN * alternation)
        return 0.055 * max(large_share**3, alternation, fast) * min(change_w**2, self._change_w2())

    def _alternation(self) -> float:
        """Return 0 if power keeps rising or falling, 1 if its changes alternate in sign from tick to tick.

        If they alternate, power changes more than once per tick.  Neither a single change nor a parabola through three
        ticks then describes the power.
        """
        if not self._change_products or self._mean_change_w2 <= 0:
            return 0.0
        opposition = -sum(self._change_products) / len(self._change_products) / self._mean_change_w2  # -correlation
        return min(max((opposition - 0.1) / 0.9, 0.0), 1.0)

    def _independence(self) -> float:
        """Return 0 if adjacent readings are equal, 1 if they are independent."""
        return min(self._change_w2() / (2 * self.variance_w2), 1.0) if self.variance_w2 > 0 else 1.0

    def fastness(self) -> float:
        """Return 0 for waves of seven ticks or longer, 1 if the powers of consecutive ticks are independent.

        A power level shorter than about two ticks fills no whole tick, so changes between such levels are not found.
        """
        return max((self._independence() - MIN_FAST) / (1 - MIN_FAST), 0.0)

    def alias_w2(self, duty: float) -> float:
        """Return the variance of the difference between the means over part of a tick and over the whole tick."""
        missed_w2 = 0.0
        if self._changes_w and self._decayed_w2:  # too few readings may have missed some changes
            missed_w2 = MISSED_CHANGES * self._decayed_w4 / self._decayed_w2 / len(self._changes_w)
        change_w2 = max(self._mean_change_w2 + missed_w2, self._change_w2())
        return (1 - duty) ** 2 * change_w2 * (0.1 + 0.56 * self._independence() ** 2)  # empirical factors

    def sampling_j2(self, span_s: float) -> float:
        """Return the variance of the energy between two readings of power, computed as a trapezoid."""
        independence = self._independence()
        return self.variance_w2 * span_s**2 * (1 / 6 + 5 / 6 * independence) * min(1.0, independence + 0.1)

    def jump_j2(self, span_s: float) -> float:
        """Return the variance of the energy of a span next to a reading, if power is assumed to be constant."""
        return self.variance_w2 * span_s**2 / 3

    def bridge_j2(self, since_s: float, rest_s: float, change_w: float) -> float:
        """Return the variance of the energy up to a time between two readings, if power is assumed to be linear."""
        return (self.variance_w2 / 2 + change_w**2 / 12) * since_s * rest_s


class Aliasing:
    """The aliasing error of one device's windows and of its run."""

    def __init__(self, timing: SensorTiming, powers: PowerSpread) -> None:
        self._timing, self._powers = timing, powers
        self._durations_s: Sequence[float] = ()  # of the last iterations
        self._run_iterations = 0  # of all windows
        self._run_j = 0.0  # energy of all windows

    def set_durations(self, durations_s: Sequence[float]) -> None:
        """Set the durations of the last iterations: iterations in step with ticks have a larger error."""
        self._durations_s = durations_s

    def variance_j2(self, span_s: float) -> float:
        """Return the variance of a span's energy from aliasing: the sensor measures only a part of each tick."""
        if not self._measures_part:
            return 0.0
        sensor = self._timing.sensor
        inflation = MIN_INFLATION
        if total_s := sum(self._durations_s):
            count = span_s * len(self._durations_s) / total_s
            inflation = max(rhythm_inflation(self._durations_s, sensor.tick_s, count), MIN_INFLATION)
        return span_s * sensor.tick_s * inflation * self._powers.alias_w2(sensor.duty)

    @property
    def _measures_part(self) -> bool:
        sensor = self._timing.sensor
        return sensor.duty < 1.0 and self._timing.method == COUNTER and sensor.tick_s > 0

    def add_window(self, iterations: int, joules: float) -> float | None:
        """Add a window; return the error of the run to date if iterations are in step with the sensor, else ``None``.

        The error is the half-width of a 95 % interval as a share of the energy, at most 1.
        The sensor may miss the change of power within an iteration, so the largest difference of all readings is used.
        """
        self._run_iterations += iterations
        self._run_j += joules
        count = self._run_iterations
        if not self._measures_part or self._run_j <= 0 or count < MIN_RHYTHM or not self._durations_s:
            return None
        clock = self._timing.clock
        tick_s = clock.tick_ns * NS if clock is not None else self._timing.sensor.tick_s
        inflation = rhythm_inflation(self._durations_s, tick_s, count)
        swing_w = self._powers.max_w - self._powers.min_w
        deviation_j = swing_w * tick_s * math.sqrt(count * inflation * STEPS_J2)
        error = min(NORMAL_95 * deviation_j / self._run_j, 1.0)
        return error if inflation >= LOCKED * count and error > LOCKED_ERROR else None


def rhythm_inflation(durations_s: Sequence[float], tick_s: float, count: float) -> float:
    """Return the variance of the aliasing error of iterations, relative to the variance for independent ticks.

    If the duration of iterations is a multiple of the tick, all iterations have the same phase, and their errors add
    up instead of averaging out.  The variance is the squared Fourier sum of the iterations' phases, over the first
    harmonics of the tick, with the weights of a step function.  ``durations_s`` is not empty, and its iterations are
    consecutive; ``count`` is the number of iterations in the period that the error is for.
    """
    if count < 1.5:
        return 1.0
    total = weights = 0.0
    for harmonic in HARMONICS:
        turn_per_s = 2j * math.pi * harmonic / tick_s
        z = sum(cmath.exp(turn_per_s * duration_s) for duration_s in durations_s) / len(durations_s)
        if abs(1 - z) < 1e-6:
            power = count
        else:
            power = 1 + 2 * (z / (1 - z) - z * (1 - z**count) / (count * (1 - z) ** 2)).real
        total += max(power, 0.0) / harmonic**2
        weights += 1 / harmonic**2
    return total / weights
