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
PARTS, MIN_PARTS = 16, 4
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
    every: int = 1  # so many windows have one mark
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
        left = max(total - self.newest.iteration, 0)
        remaining = foretold([(mark.iteration, mark.time_s) for mark in marks], left)
        forecast = {REMAINING_S: remaining}
        elapsed_s, joules = whole.loop.time_s, energy.total_joules(whole)
        unknown = [at for at, mark in enumerate(marks) if mark.joules is None]
        sums = [(mark.iteration, mark.joules or 0.0) for mark in marks[unknown[-1] + 1 if unknown else 0 :]]
        if joules and len(sums) > 1:
            forecast[JOULES] = _scaled_total(foretold(sums, left), 1.0, joules)
            for name, formula in ((CO2_KG, energy.co2_kg), (ELECTRICITY, energy.electricity_cost)):
                if (so_far := formula(whole)) is not None:
                    forecast[name] = _scaled_total(forecast[JOULES], so_far / joules)
        if (cost := energy.gpu_cost(whole)) is not None and elapsed_s:
            forecast[GPUS] = _scaled_total(remaining, cost / elapsed_s, elapsed_s)
        return forecast


def foretold(sums: Sequence[tuple[int, float]], left: int) -> Foretold:
    """Return what ``left`` further iterations will take.

    ``sums`` are at least two ends of windows: iteration, and time or energy so far; both increase.
    """
    at, so_far = np.array(sums, dtype=float).T
    goals = np.linspace(at[0], at[-1], min(PARTS, len(at) - 1) + 1)
    ends = np.unique(np.searchsorted(at, goals - 1e-6))
    counts, amounts = np.diff(at[ends]), np.diff(so_far[ends])
    mean = float(amounts.sum() / counts.sum())
    if len(counts) < MIN_PARTS or not left:
        return Foretold(left * mean)
    rates = amounts / counts - mean
    # The weighted least squares of the rates over the iterations.
    middles = (at[ends][1:] + at[ends][:-1]) / 2
    offsets = middles - np.average(middles, weights=counts)
    ahead = float(at[-1] + left / 2 - np.average(middles, weights=counts))
    slope = float(np.average(offsets * rates, weights=counts) / np.average(offsets**2, weights=counts))
    half = _half_width(counts, rates, 1) * math.sqrt(1 / len(counts) + counts.mean() / left)
    spread = _half_width(counts, rates - slope * offsets, 2)
    slope_error = spread / math.sqrt(float((counts / counts.mean() * offsets**2).sum()))
    of_trend = math.hypot(
        spread * math.sqrt(1 / len(counts) + counts.mean() / left), min(slope_error * ahead, MAX_SLOPE_ERROR * mean)
    )
    trend = mean + slope * ahead
    low, high = min(mean - half, trend - of_trend), max(mean + half, trend + of_trend)
    value = trend if abs(slope) > slope_error else mean
    return Foretold(left * max(value, 0.0), left * max(low, 0.0), left * high)


def _half_width(counts: Array, residuals: Array, num_fitted: int) -> float:
    """Return the standard deviation of the rate of a part, times Student's quantile for 95 %."""
    freedom = len(counts) - num_fitted
    weights = counts / counts.mean()
    # Abramowitz and Stegun, 26.7.5.
    quantile = 1.960 + 2.372 / freedom + 2.823 / freedom**2 + 2.556 / freedom**3
    return quantile * math.sqrt(float((weights * residuals**2).sum()) / freedom)


def _scaled_total(more: Foretold, factor: float, so_far: float = 0.0) -> Foretold:
    """Return `factor` times the sum of what was and what will be, with its bounds."""
    low, high = (None if bound is None else factor * (so_far + bound) for bound in (more.low, more.high))
    return Foretold(factor * (so_far + more.value), low, high)
