"""The difference between two configurations from the values of their runs: Welch's test, its power, and Holm.

The unit of a statement about configurations is the run: the windows of one run share its node, board and temperature,
so tests on windows call identical configurations different (docs/comparing.md has the numbers).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ALPHA = 0.05  # level of the test of a primary quantity, and of the intervals
#: Share of comparisons in which a difference of the size of the minimum detectable effect is found.
POWER = 0.8


class Difference(NamedTuple):
    """The mean of B minus the mean of A, by Welch's test."""

    estimate: float
    standard_error: float
    df: float  # degrees of freedom of the standard error
    p: float  # probability of a difference at least as large between identical configurations

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the confidence interval at level 1 - ``alpha``."""
        half = _critical(self.df, alpha) * self.standard_error
        return self.estimate - half, self.estimate + half

    def detectable(self, alpha: float = ALPHA) -> float:
        """Return the minimum detectable effect of a test at the level ``alpha`` of runs with this standard error.

        The effect is ``standard_error`` times the noncentrality d for which P(T > t) = `POWER`, where T has the
        noncentral t distribution with ``df`` degrees of freedom and noncentrality d, and t is the critical value of the
        test. Welch's degrees of freedom vary with few runs: the median statement is 0.9 of the truth at 3 runs a side,
        and 0.7 at 2 runs.
        """
        from scipy.special import nctdtrinc

        return self.standard_error * float(nctdtrinc(self.df, 1 - POWER, _critical(self.df, alpha)))


def _critical(df: float, alpha: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - alpha / 2))


def difference(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Return the difference of B from A by Welch's test; ``None`` if a side has fewer than two runs.

    Args:
        a: one value per run.
        b: one value per run.
    """
    from scipy.stats import ttest_ind

    if min(len(a), len(b)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a side whose runs have the same value
        test = ttest_ind(b, a, equal_var=False)
    estimate = float(np.mean(b) - np.mean(a))
    standard_error = math.sqrt(np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b))
    p = float(test.pvalue) if standard_error else float(estimate == 0)
    return Difference(estimate, standard_error, float(test.df), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return adjusted p-values: any false statement of a family has at most the probability of the level (Holm)."""
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for place, at in enumerate(sorted(range(count), key=lambda at: p_values[at])):
        largest = max(largest, min(1.0, (count - place) * p_values[at]))
        adjusted[at] = largest
    return adjusted
