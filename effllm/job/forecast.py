"""Foretells the end of a job whose length is known: remaining time, energy, CO2 and money. No I/O.

The rate per iteration, with evaluations and checkpoints, is compared between parts of equal length. An interval has
what follows if the mean rate continues, and what follows if its trend continues, each with the spread of the parts; the
uncertainty of the trend counts up to `MAX_SLOPE_ERROR`. docs/decisions/verdict.md has how often the ends of simulated
jobs were inside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from effllm.metrics import energy
from effllm.records.columns import Array
from effllm.records.forecast import CO2_KG, ELECTRICITY, GPUS, JOULES, REMAINING_S, Forecast, Foretold
from effllm.records.job import ClusterTotals

MAX_MARKS = 128
PARTS, MIN_PARTS = 16, 4  # number of compared parts; with less than the smallest number, only the mean is foretold
#: As a share of the rate: with noise alone, the whole uncertainty is several times as large early in a job.
MAX_SLOPE_ERROR = 0.05


class Mark(NamedTuple):
    """The end of a window."""

    iteration: int  # as shown to users
    time_s: float  # of the run so far
    joules: float | None  # of the run so far


class Progress(Struct):
    """The ends of the windows of an attempt: the newest one, and of long attempts every second, fourth, ... one."""

    marks: list[Mark] = field(default_factory=list)
    newest: Mark | None = None
    every: int = 1  # number of windows per mark
    windows: int = 0  # since the last mark

    def add_mark(self, mark: Mark) -> None:
        """Add the end of a window; if the iterations or the energy begin again, so do the marks."""
        before = self.newest
        if before is not None and (mark.iteration < before.iteration or (mark.joules or 0.0) < (before.joules or 0.0)):
            self.marks, self.every, self.windows, before = [], 1, 0, None
        if before is not None and (mark.iteration == before.iteration or mark.time_s <= before.time_s):
            return
        self.newest = mark
        self.windows += 1
        if self.windows >= self.every or not self.marks:
            self.marks.append(mark)
            self.windows = 0
        if len(self.marks) > MAX_MARKS:
            del self.marks[1::2]
            self.every *= 2

    def forecast(self, total: int | None, whole: ClusterTotals) -> Forecast:
        """Return the remaining time, and energy and costs of the whole job; empty if its length or rate is not known.

        ``total`` is the number of the job's last iteration.
        """
        if total is None or self.newest is None:
            return {}
        marks = [*self.marks, *([self.newest] if self.newest != self.marks[-1] else [])]
        if len(marks) < 2:
            return {}
        num_left = max(total - self.newest.iteration, 0)
        remaining = foretold([(mark.iteration, mark.time_s) for mark in marks], num_left)
        forecast = {REMAINING_S: remaining}
        elapsed_s, joules = whole.loop.time_s, energy.total_joules(whole)
        unknown = [i for i, mark in enumerate(marks) if mark.joules is None]
        energy_marks = marks[unknown[-1] + 1 if unknown else 0 :]  # since the energy is known
        if joules and len(energy_marks) > 1:
            joules_at = [(mark.iteration, mark.joules or 0.0) for mark in energy_marks]
            forecast[JOULES] = _scaled_total(foretold(joules_at, num_left), 1.0, joules)
            for name, formula in ((CO2_KG, energy.co2_kg), (ELECTRICITY, energy.electricity_cost)):
                if (so_far := formula(whole)) is not None:
                    forecast[name] = _scaled_total(forecast[JOULES], so_far / joules)
        if (cost := energy.gpu_cost(whole)) is not None and elapsed_s:
            forecast[GPUS] = _scaled_total(remaining, cost / elapsed_s, elapsed_s)
        return forecast


def foretold(sums: Sequence[tuple[int, float]], num_left: int) -> Foretold:
    """Return what ``num_left`` further iterations will take.

    ``sums`` are at least two ends of windows: iteration, and time or energy so far; both increase.
    """
    iterations, so_far = np.array(sums, dtype=float).T
    # The parts of about the same number of iterations: their ends, and the iterations and the amount of each.
    part_ends = np.linspace(iterations[0], iterations[-1], min(PARTS, len(iterations) - 1) + 1)
    ends = np.unique(np.searchsorted(iterations, part_ends - 1e-6))
    counts, amounts = np.diff(iterations[ends]), np.diff(so_far[ends])
    mean = float(amounts.sum() / counts.sum())
    if len(counts) < MIN_PARTS or not num_left:
        return Foretold(num_left * mean)
    deviations = amounts / counts - mean  # of the rate of each part
    # The trend: weighted least squares of the rates over the iterations.
    middles = (iterations[ends][1:] + iterations[ends][:-1]) / 2
    offsets = middles - np.average(middles, weights=counts)
    offset_left = float(iterations[-1] + num_left / 2 - np.average(middles, weights=counts))  # of what is left
    slope = float(np.average(offsets * deviations, weights=counts) / np.average(offsets**2, weights=counts))
    spread_to_error = math.sqrt(1 / len(counts) + counts.mean() / num_left)
    mean_error = _half_width(counts, deviations, 1) * spread_to_error
    trend_spread = _half_width(counts, deviations - slope * offsets, 2)
    slope_error = trend_spread / math.sqrt(float((counts / counts.mean() * offsets**2).sum()))
    trend_error = math.hypot(trend_spread * spread_to_error, min(slope_error * offset_left, MAX_SLOPE_ERROR * mean))
    trend = mean + slope * offset_left
    low, high = min(mean - mean_error, trend - trend_error), max(mean + mean_error, trend + trend_error)
    value = trend if abs(slope) > slope_error else mean
    return Foretold(num_left * max(value, 0.0), num_left * max(low, 0.0), num_left * high)


def _half_width(counts: Array, residuals: Array, num_fitted: int) -> float:
    """Return the standard deviation of the rate of a part, times Student's quantile for 95 %."""
    freedom = len(counts) - num_fitted
    weights = counts / counts.mean()
    # Student's quantile: Abramowitz and Stegun, 26.7.5.
    quantile = 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return quantile * math.sqrt(float((weights * residuals**2).sum()) / freedom)


def _scaled_total(remaining: Foretold, factor: float, so_far: float = 0.0) -> Foretold:
    """Return ``factor`` times the sum of what was and what will be, with its bounds."""
    low, high = (None if bound is None else factor * (so_far + bound) for bound in (remaining.low, remaining.high))
    return Foretold(factor * (so_far + remaining.value), low, high)
