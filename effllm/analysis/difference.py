"""The difference between two configurations from the values of their runs, and the word for it.

The unit of a statement about configurations is the run: the windows of one run share its node, board and temperature,
so tests on windows call identical configurations different (docs/comparing.md has the numbers). A value is one number
of one run. The ledger (earlier runs of a configuration) gives the spread between runs, never the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "not distinguishable", "unknown"
WORDS = (BETTER, WORSE, SAME, UNKNOWN)
ALPHA = 0.05  # share of identical configurations that may be called different
POWER = 0.8  # share of experiments in which a difference of the size of the minimum detectable effect is found
#: If the spread of a side is larger than the ledger's with this p-value, the ledger is not used for the side.
LARGER_SPREAD_P = 0.1
#: Quantiles of each estimated variance over which the power is averaged.
POWER_POINTS = 24

Numbers = NDArray[np.float64]


class RunSpread(NamedTuple):
    """Variance between runs of a configuration, and the degrees of freedom of its estimate."""

    variance: float
    df: float


class Difference(NamedTuple):
    """The difference ``estimate`` with its standard error, and the degrees of freedom of the standard error."""

    estimate: float
    standard_error: float
    df: float
    uses_ledger: bool = False

    @property
    def p(self) -> float:
        """Probability of a difference at least as large between identical configurations (two-sided t-test)."""
        from scipy.special import stdtr

        return float(2 * stdtr(self.df, -abs(self.estimate) / self.standard_error))

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the confidence interval at level 1 - ``alpha``."""
        half = t_quantile(self.df, alpha) * self.standard_error
        return self.estimate - half, self.estimate + half


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def squares(values: Sequence[float]) -> float:
    """Return the sum of squared deviations from the mean."""
    center = mean(values)
    return math.fsum((value - center) ** 2 for value in values)


def t_quantile(df: float, alpha: float) -> float:
    """Return the number that Student's t exceeds, in absolute value, with probability ``alpha``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - alpha / 2))


def spread_of(groups: Sequence[Sequence[float]]) -> RunSpread | None:
    """Return the pooled variance within groups of runs of one configuration each; ``None`` without repeats."""
    df = sum(max(len(group) - 1, 0) for group in groups)
    return RunSpread(sum(squares(group) for group in groups if group) / df, df) if df else None


def difference(
    a: Sequence[float], b: Sequence[float], ledger: RunSpread | None = None, resolution: float = 0.0
) -> Difference | None:
    """Return the mean of B minus the mean of A by Welch's t-test, with the ledger as prior knowledge of the spread.

    Args:
        a: one value per run.
        b: one value per run.
        ledger: spread between earlier runs of the same configuration; none of these runs is in ``a`` or ``b``.
        resolution: standard deviation that a value has at least, because it is rounded.

    Returns:
        ``None`` if the spread of a side is unknown, or if no run has shown any spread.
    """
    if not a or not b or not (ledger or (len(a) > 1 and len(b) > 1)):
        return None
    variance, ledger_df = ledger or (0.0, 0.0)
    error2, df, used = _welch(squares(a), len(a), squares(b), len(b), variance, ledger_df)
    error2 = max(float(error2), resolution**2 * (1 / len(a) + 1 / len(b)))
    if error2 <= 0 or not math.isfinite(error2):
        return None
    return Difference(mean(b) - mean(a), math.sqrt(error2), float(df), bool(used))


def _welch(squares_a: Any, runs_a: int, squares_b: Any, runs_b: int, variance: Any, ledger_df: float) -> Any:
    """Return the squared standard error of a difference, its degrees of freedom, and whether the ledger is used.

    The variance of a side is the posterior estimate under a scaled inverse chi-square prior: (ledger_df x variance +
    squares) / (ledger_df + runs - 1). The degrees of freedom follow Welch and Satterthwaite over the independent
    estimates (ledger, A, B). If a side varies more than the ledger (F-test), its own runs alone are used.
    """
    shared: Any = 0.0  # part of the ledger in the squared standard error
    own_parts: list[tuple[Any, int]] = []
    uses: Any = False
    for side, runs in ((squares_a, runs_a), (squares_b, runs_b)):
        prior_df = np.where(_is_larger(side, runs - 1, variance, ledger_df), 0.0, ledger_df)
        shared = shared + prior_df * variance / (prior_df + runs - 1) / runs
        own_parts.append((side / (prior_df + runs - 1) / runs, runs - 1))
        uses = uses | (prior_df > 0)
    error2 = shared + own_parts[0][0] + own_parts[1][0]
    spent = sum(part**2 / df for part, df in [*own_parts, (shared, ledger_df)] if df)
    most = ledger_df + runs_a + runs_b - 2
    df = np.where(spent > 0, error2**2 / np.where(spent > 0, spent, 1.0), most)
    return error2, df, uses


def _is_larger(side: Any, df: int, variance: Any, ledger_df: float) -> Any:
    from scipy.special import fdtrc

    if not df or not ledger_df:
        return np.zeros(np.shape(side), bool)
    ratio = np.where(side > 0, side / df / np.maximum(variance, 1e-300), 0.0)
    return fdtrc(df, ledger_df, ratio) < LARGER_SPREAD_P


def detectable(
    spread: RunSpread, runs_a: int, runs_b: int, ledger_df: float = 0.0, alpha: float = ALPHA
) -> float | None:
    """Return the minimum detectable effect of a comparison of runs with this spread.

    Its only error is the error of the spread, of which the median-unbiased estimate is used.

    Args:
        spread: estimate of the spread, from all runs that are known.
        runs_a: number of runs of side A.
        runs_b: number of runs of side B.
        ledger_df: degrees of freedom of the ledger in the comparison.
        alpha: level of the comparison.

    Returns:
        ``None`` if the comparison is not possible: a side with one run, and no ledger.
    """
    from scipy.special import gammaincinv

    if not ledger_df and min(runs_a, runs_b) < 2:
        return None
    median_share = 2 * float(gammaincinv(spread.df / 2, 0.5)) / spread.df
    return math.sqrt(spread.variance / median_share) * _detectable_sd(runs_a, runs_b, round(ledger_df), alpha)


@cache
def _detectable_sd(runs_a: int, runs_b: int, ledger_df: int, alpha: float) -> float:
    """Return the minimum detectable effect in standard deviations between runs.

    The power is averaged over the distributions of the estimated variances: Welch's degrees of freedom vary so much
    with few runs that the formula of the noncentral t distribution gives half of the true value at 2 + 2 runs.
    """
    from scipy.special import ndtr, stdtrit

    grid = np.meshgrid(*(_chi_square(df) for df in (runs_a - 1, runs_b - 1, ledger_df)), indexing="ij")
    squares_a, squares_b, of_ledger = (axis.ravel() for axis in grid)
    error2, df, _ = _welch(squares_a, runs_a, squares_b, runs_b, of_ledger / max(ledger_df, 1), ledger_df)
    limit, sd = stdtrit(df, 1 - alpha / 2) * np.sqrt(error2), math.sqrt(1 / runs_a + 1 / runs_b)
    low, high = 0.0, 1e4
    for _ in range(60):
        effect = (low + high) / 2
        found = float(np.mean(ndtr((effect - limit) / sd) + ndtr((-effect - limit) / sd)))
        low, high = (effect, high) if found < POWER else (low, effect)
    return high


def _chi_square(df: int) -> Numbers:
    """Return quantiles of the chi-square distribution with equal probabilities; 0 without degrees of freedom."""
    from scipy.special import gammaincinv

    if not df:
        return np.zeros(1)
    return 2 * np.asarray(gammaincinv(df / 2, (np.arange(POWER_POINTS) + 0.5) / POWER_POINTS), np.float64)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values: in at most a share `ALPHA` of families is any statement false (Holm, 1979)."""
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for place, at in enumerate(sorted(range(count), key=lambda at: p_values[at])):
        largest = max(largest, min(1.0, (count - place) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def word(estimate: float, adjusted_p: float, *, higher_is_better: bool) -> str:
    """Return the word for a difference with its adjusted p-value."""
    if adjusted_p > ALPHA or estimate == 0:
        return SAME
    return BETTER if (estimate > 0) == higher_is_better else WORSE
