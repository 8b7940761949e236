"""Estimates of a sensor from its readings under a known load. No I/O.

A reading is modelled as the mean of power over a window that ends some time before the reading is shown.  The load
switches power between two levels at known times, so the share of time under load is known for each window and delay.
The estimate is the pair of window and delay for which readings and shares correlate best.  The load's edges are at
varying phases of the sensor, so the error of window and delay is far smaller than a tick.  See docs/calibration.md.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from effllm.energy.readings import NS
from effllm.energy.tick_clock import DENSE_S, MIN_PERIOD_CHANGES
from effllm.sensor_profile.record import LoadEdge, Response, Rhythm

#: If more than this share of the reads shows a new value, the reading is continuous.
CONTINUOUS = 0.6
#: If the times of changes deviate from a regular grid by more than this share of the period, they are irregular.
MAX_JITTER = 0.15
#: If the ticks' jitter is larger, the measured length of each tick is used instead of the period.
REGULAR_S = 0.001
#: The smallest error of time stamps and of the times of ticks.
MIN_ERROR_S = 0.0005
#: The windows and delays that are tried.
MIN_WINDOW_S, MAX_WINDOW_S = 0.004, 2.5
MAX_DELAY_S = 0.6
#: More readings than this make a fit slow, not better.
MAX_READINGS = 1200
MIN_READINGS = 24
#: Lag and window are estimated only if the load explains at least this share of the reading's variance.
MIN_FIT = 0.9
#: Number of parts of the readings; each part is left out once, to find the error of an estimate.
PARTS = 8
_STUDENT_95 = 2.365  # quantile of Student's t for `PARTS` estimates: 7 degrees of freedom

Readings = Sequence[tuple[float, float]]  # seconds and value


class Tick(NamedTuple):
    """A change of a reading: its time, the number of periods since the first change, and the new value."""

    at_s: float
    number: int
    value: float


class Load:
    """A load that was switched on and off at known times, counted in seconds from ``origin_ns``."""

    def __init__(self, edges: Sequence[LoadEdge], origin_ns: int) -> None:
        self.times_s = [(edge.time_ns - origin_ns) * NS for edge in edges]
        self._is_on = [edge.is_on for edge in edges]  # from each of these times on
        spans = zip(pairwise(self.times_s), self._is_on, strict=False)
        loaded_s = [later_s - earlier_s if is_on else 0.0 for (earlier_s, later_s), is_on in spans]
        self._loaded_until_s = list(accumulate(loaded_s, initial=0.0))

    def loaded_share(self, middles_s: np.ndarray, window_s: float | np.ndarray) -> np.ndarray:
        """Return the share of time under load in windows of one length or of their own, by their middles."""
        start_s, end_s = (
            np.interp(edges_s, self.times_s, self._loaded_until_s)
            + self._is_on[-1] * np.maximum(edges_s - self.times_s[-1], 0.0)  # a load that is on stays on
            for edges_s in (middles_s - window_s / 2, middles_s + window_s / 2)
        )
        share: np.ndarray = (end_s - start_s) / window_s
        return share


def ticks_of(readings: Readings) -> tuple[Rhythm, list[Tick]] | None:
    """Return the rhythm and the changes of a reading; ``None`` if the changes are too few or not periodic.

    The time of a change is a time of a regular grid, limited to the time between the two reads that show the change.
    """
    moves = [(before, after) for before, after in pairwise(readings) if before[1] != after[1]]
    if len(moves) < MIN_PERIOD_CHANGES:
        return None
    apart_s = statistics.median(after[0] - before[0] for before, after in pairwise(readings))
    if len(moves) > CONTINUOUS * (len(readings) - 1):
        if apart_s > DENSE_S:
            return None
        changes = [Tick(after[0], number, after[1]) for number, (_, after) in enumerate(moves)]
        return Rhythm(0.0, apart_s, 0.0, len(moves)), changes
    middles = [(before[0] + after[0]) / 2 for before, after in moves]
    numbers = _period_numbers(middles)
    period_s, first_s = statistics.linear_regression(numbers, middles)
    residuals = [middle - first_s - number * period_s for number, middle in zip(numbers, middles, strict=True)]
    variance_s2 = sum(residual**2 for residual in residuals) / max(len(residuals) - 2, 1)
    if variance_s2 > (MAX_JITTER * period_s) ** 2:
        return None
    # A change is anywhere between two reads: the variance of a uniform distribution is a twelfth of its squared width.
    reads_s2 = sum((after[0] - before[0]) ** 2 for before, after in moves) / len(moves) / 12
    number_squares = sum((number - statistics.fmean(numbers)) ** 2 for number in numbers)
    error_s = 1.96 * math.sqrt(max(variance_s2, 1e-12) / number_squares) if number_squares else period_s  # of the slope
    ticks = [
        Tick(min(max(first_s + number * period_s, before[0]), after[0]), number, after[1])
        for number, (before, after) in zip(numbers, moves, strict=True)
    ]
    return Rhythm(period_s, error_s, math.sqrt(max(variance_s2 - reads_s2, 0.0)), len(moves)), ticks


def _period_numbers(middles: Sequence[float]) -> list[int]:
    """Return the number of periods from the first change to each change; the period is found from the smallest gaps."""
    gaps_s = [later - earlier for earlier, later in pairwise(middles)]
    period_s = sorted(gaps_s)[len(gaps_s) // 10]  # some gaps may be too small, and others several periods long
    for _ in range(4):  # each time with a better period
        counts = [max(round(gap_s / period_s), 1) for gap_s in gaps_s]
        period_s = sum(gaps_s) / sum(counts)
    return list(accumulate(counts, initial=0))


def changes_with(ticks: Sequence[Tick], other_ticks: Sequence[Tick], within_s: float) -> bool:
    """Whether nine in ten changes of a reading are at the time of a change of another reading."""
    times_s = [tick.at_s for tick in other_ticks]
    num_near = 0
    for tick in ticks:
        index = bisect.bisect_left(times_s, tick.at_s)
        num_near += any(abs(time_s - tick.at_s) <= within_s for time_s in times_s[max(index - 1, 0) : index + 1])
    return num_near >= 0.9 * len(ticks)


def powers_of_increases(ticks: Sequence[Tick], rhythm: Rhythm) -> list[tuple[float, float]]:
    """Return the time and the mean power of each increase of a counter, in W; those over several ticks are left out."""
    is_regular = rhythm.period_s > 0 and rhythm.jitter_s < REGULAR_S
    pairs = [(before, after) for before, after in pairwise(ticks) if after.at_s > before.at_s]
    if rhythm.period_s > 0:
        pairs = [(before, after) for before, after in pairs if after.number == before.number + 1]
    return [
        (
            after.at_s if rhythm.period_s > 0 else (before.at_s + after.at_s) / 2,
            (after.value - before.value) / (rhythm.period_s if is_regular else after.at_s - before.at_s),
        )
        for before, after in pairs
    ]


def fit_response(load: Load, readings: Readings) -> Response | None:
    """Return the window of readings and its delay behind the load; ``None`` if readings do not follow the load.

    The load was switched on before the window of the first reading begins.  Readings have the times at which their
    values were first shown.
    """
    if len(readings) < MIN_READINGS or not load.times_s:
        return None
    points = _thinned(np.array(readings), MAX_READINGS)
    middle_s, window_s = _best_of_grid(load, points)
    middle_s, window_s, fit = _best_nearby(load, points, middle_s, window_s)
    if fit < MIN_FIT:
        return None
    cuts = [part * len(points) // PARTS for part in range(PARTS + 1)]
    without_part = (np.delete(points, slice(first, last), axis=0) for first, last in pairwise(cuts))
    fits = [_best_nearby(load, other_points, middle_s, window_s, 0.1) for other_points in without_part]
    middles_s, windows_s, _ = zip(*fits, strict=True)
    middle_error_s, window_error_s = (max(_jackknife_95(values_s), MIN_ERROR_S) for values_s in (middles_s, windows_s))
    at_s, watts = points.T
    rise_w, idle_w = statistics.linear_regression(load.loaded_share(at_s - middle_s, window_s).tolist(), watts.tolist())
    return Response(
        window_s=window_s,
        window_error_s=window_error_s,
        ends_s=middle_s - window_s / 2,
        middle_s=middle_s,
        middle_error_s=middle_error_s,
        fit=fit,
        idle_w=idle_w,
        loaded_w=idle_w + rise_w,
    )


def _explained_share(load: Load, readings: np.ndarray, middle_s: float, window_s: float) -> float:
    """Return the share of the readings' variance that this window explains; 0 if readings fall when load rises."""
    at_s, values = readings.T
    shares = load.loaded_share(at_s - middle_s, window_s)
    x, y = shares - shares.mean(), values - values.mean()
    xy, xx, yy = float(x @ y), float(x @ x), float(y @ y)
    return xy * xy / (xx * yy) if xy > 0 and xx > 0 and yy > 0 else 0.0


def _best_of_grid(load: Load, readings: np.ndarray) -> tuple[float, float]:
    """Return the middle and the length of the window with the best fit, among windows and delays of all lengths."""
    few_readings = _thinned(readings, MAX_READINGS // 3)
    candidates, window_s = [], MIN_WINDOW_S
    while window_s <= MAX_WINDOW_S:
        step_s = max(window_s, 0.04) / 3
        middle_s = -window_s / 2
        while middle_s <= MAX_DELAY_S + window_s / 2:
            candidates.append((_explained_share(load, few_readings, middle_s, window_s), middle_s, window_s))
            middle_s += step_s
        window_s *= 1.4
    _, middle_s, window_s = max(candidates)
    return middle_s, window_s


def _best_nearby(
    load: Load, readings: np.ndarray, middle_s: float, window_s: float, step: float = 0.5
) -> tuple[float, float, float]:
    """Search for the best fit near a window; return the middle and length of the best window, and its fit."""
    best_fit = _explained_share(load, readings, middle_s, window_s)
    shift_s, factor = step * max(window_s, 0.02), 1 + step
    while shift_s > 5e-5 or factor > 1.002:
        candidates = [
            (middle_s + shift_s, window_s),
            (middle_s - shift_s, window_s),
            (middle_s, min(window_s * factor, MAX_WINDOW_S)),
            (middle_s, max(window_s / factor, MIN_WINDOW_S)),
        ]
        fits = [_explained_share(load, readings, *candidate) for candidate in candidates]
        if max(fits) > best_fit:
            best_fit = max(fits)
            middle_s, window_s = candidates[fits.index(best_fit)]
        else:
            shift_s, factor = shift_s / 2, 1 + (factor - 1) / 2
    return middle_s, window_s, best_fit


def _thinned(readings: np.ndarray, maximum: int) -> np.ndarray:
    count = len(readings)
    return readings if count <= maximum else readings[np.arange(maximum) * count // maximum]


def _jackknife_95(values: Sequence[float]) -> float:
    """Return an estimate's 95 % half-width, from estimates, each of which omits one part of the readings."""
    count, mean = len(values), statistics.fmean(values)
    return _STUDENT_95 * math.sqrt((count - 1) / count * sum((value - mean) ** 2 for value in values))
