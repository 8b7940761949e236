"""The energy within a tick of a counter, and the beat of ticks with iterations. No I/O."""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

from effllm.energy.power_spread import PowerSpread

#: A change of power is abrupt if it exceeds the usual change from tick to tick by this factor.
STEP = 8.0
#: The error of a wave that is approximated by a parabola, relative to the bend of the parabola.  For a sine with a
#: period of ten ticks, this error is 0.016; for other waves, it is larger.
BEND = 0.04
#: The harmonics of the tick for which the phases of iterations are added up.
HARMONICS = (1, 2, 3)


def in_tick(
    since_s: float, tick_s: float, joules: float, before_w: float | None, after_w: float | None, powers: PowerSpread
) -> tuple[float, float, float]:
    """Return the part of a tick's energy before a time in this tick, its variance, and the power at the time.

    Training power changes abruptly.  The time of a single change follows from the tick's energy and from the power of
    the ticks before and after.  If a single change does not explain the tick's energy, or if power varies smoothly,
    the energy is distributed over the tick.
    """
    mean_w = joules / tick_s
    rest_s = tick_s - since_s
    flat_j = mean_w * since_s
    if before_w is None or after_w is None:
        return flat_j, powers.jump_j2(min(since_s, rest_s)), mean_w
    rise_w = after_w - before_w
    low_w, high_w = min(before_w, after_w), max(before_w, after_w)
    noise_w = powers.noise_w()
    # Smooth power is approximated by the parabola that has the mean powers of all three ticks.
    x = since_s / tick_s
    slope_w, bend_w = mean_w - before_w, (before_w + after_w - 2 * mean_w) / 2
    start_w = mean_w - slope_w / 2 - bend_w / 3
    smooth_j = tick_s * (start_w * x + slope_w * x**2 / 2 + bend_w * x**3 / 3)
    change_w = max(abs(mean_w - before_w), abs(after_w - mean_w))
    unseen_j2 = powers.unseen_w2(change_w) * tick_s**2 * 4 * x * (1 - x)
    if low_w - noise_w <= mean_w <= high_w + noise_w and abs(rise_w) > STEP * noise_w:
        step_s = min(max((joules - after_w * tick_s) / (before_w - after_w), 0.0), tick_s)
        step_j = before_w * min(since_s, step_s) + after_w * max(since_s - step_s, 0.0)
        return step_j, unseen_j2, before_w if since_s < step_s else after_w
    outside_w = max(mean_w - high_w, low_w - mean_w, 0.0)
    if outside_w > 3 * noise_w:  # a short peak, at an unknown time within the tick
        excess_j = joules - (before_w + after_w) / 2 * tick_s
        return flat_j, excess_j**2 * x * (1 - x) * 0.35 + unseen_j2, mean_w
    return smooth_j, unseen_j2 + (BEND * bend_w * tick_s) ** 2, mean_w


def beat(step_s: float, deviation_s: float, tick_s: float, span_s: float) -> float:
    """Return the variance of a span's aliasing error, relative to the variance for independent ticks.

    If the duration of iterations is a multiple of the tick, all iterations have the same phase, and their errors add
    up instead of averaging out.  The variance is the squared Fourier sum of the phases of N iterations, over the
    first harmonics of the tick, with the weights of a step function.

    Args:
        step_s: iteration time.
        deviation_s: standard deviation of the iteration time.
        tick_s: the sensor's period.
        span_s: duration of the period that the error is for.
    """
    count = span_s / step_s if step_s > 0 else 1.0
    turn = 2 * math.pi / tick_s
    phases = (cmath.rect(math.exp(-0.5 * (turn * n * deviation_s) ** 2), turn * n * step_s) for n in HARMONICS)
    return _inflation(tuple(phases), count)


def beat_of(durations_s: Sequence[float], tick_s: float, count: int) -> float:
    """Return the variance as `beat` does, for ``count`` iterations with durations like those in ``durations_s``.

    Args:
        durations_s: durations of consecutive iterations; at least one.
        tick_s: the sensor's period.
        count: number of iterations in the period that the error is for.
    """
    turn = 2j * math.pi / tick_s
    return _inflation(
        tuple(sum(cmath.exp(turn * n * d) for d in durations_s) / len(durations_s) for n in HARMONICS), count
    )


def _inflation(phases: Sequence[complex], count: float) -> float:
    """Return the squared Fourier sum of the iterations' phases, relative to the sum for one iteration.

    Args:
        phases: mean phase factor from one iteration to the next, at each harmonic.
        count: number of iterations.
    """
    if count < 1.5:
        return 1.0
    total = weights = 0.0
    for harmonic, z in zip(HARMONICS, phases, strict=True):
        if abs(1 - z) < 1e-6:
            power = count
        else:
            power = 1 + 2 * (z / (1 - z) - z * (1 - z**count) / (count * (1 - z) ** 2)).real
        total += max(power, 0.0) / harmonic**2
        weights += 1 / harmonic**2
    return total / weights
