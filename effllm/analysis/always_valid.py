"""Statements that remain valid after any number of looks, and comparisons inside one run.

The intervals are confidence sequences: the probability that the truth is outside of any interval of the sequence, at
any time, is at most alpha (Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with
unknown variance", arXiv 2310.03722; the test is of Lai, 1976). Values must be independent and near normal: windows of
a run are correlated, so their means over `batch_means` are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from effllm.analysis.difference import ALPHA, Difference, RunSpread, mean, squares, t_quantile

#: Batches of windows for the error of the mean of a finished run.
BATCHES = 10
#: Windows per batch while a run continues; the correlation between batches of this length is small.
BATCH_WINDOWS = 10
#: Effects of this size, in standard deviations of one value, are found soonest.
EFFECT = 1.0
#: The share of ALPHA for the part within a running run; the rest is for the part between runs.
WITHIN_SHARE = 0.2


class ValidInterval(NamedTuple):
    """An estimate with its confidence sequence; the bounds are infinite while too little is known."""

    estimate: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def always_valid(values: Sequence[float], alpha: float = ALPHA, effect: float = EFFECT) -> ValidInterval:
    """Return the confidence sequence at the present number of values, for the mean of independent normal values.

    The likelihood ratio of the t statistic, with a normal mixture over effects with the standard deviation ``effect``,
    is a martingale; by Ville's inequality it exceeds 1 / alpha at any time with a probability of at most alpha.
    """
    count = len(values)
    if not count:
        return ValidInterval(math.nan, -math.inf, math.inf)
    center, weight = mean(values), 1 / effect**2
    share = -math.expm1(math.log(alpha**2 * weight / (count + weight)) / count) * (count + weight) / count
    if share >= 1 or count < 2:
        return ValidInterval(center, -math.inf, math.inf)
    half = math.sqrt(squares(values) / count * share / (1 - share))
    return ValidInterval(center, center - half, center + half)


def batch_means(windows: Sequence[float], batch: int) -> list[float]:
    """Return the means of consecutive batches of windows; an incomplete last batch is left out."""
    return [mean(windows[start : start + batch]) for start in range(0, len(windows) - batch + 1, batch)]


def run_mean(windows: Sequence[float]) -> Difference | None:
    """Return the mean of a finished run with its error from `BATCHES` batches; ``None`` with fewer windows.

    The error is that of the mean of this run: it is not the spread between runs.
    """
    batches = batch_means(windows, len(windows) // BATCHES) if len(windows) >= BATCHES else []
    total = squares(batches) if batches else 0.0
    if total <= 0:
        return None
    df = len(batches) - 1
    return Difference(mean(windows), math.sqrt(total / df / len(batches)), df)


def these_two_runs(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Return how much two runs differ, from their windows: a statement about these runs, not their configurations."""
    one, other = run_mean(a), run_mean(b)
    if one is None or other is None:
        return None
    error2 = one.standard_error**2 + other.standard_error**2
    df = error2**2 / (one.standard_error**4 / one.df + other.standard_error**4 / other.df)
    return Difference(other.estimate - one.estimate, math.sqrt(error2), df)


def while_running(
    windows: Sequence[float],
    reference: Sequence[float],
    ledger: RunSpread,
    alpha: float = ALPHA,
    batch: int = BATCH_WINDOWS,
) -> ValidInterval:
    """Return the always-valid interval of a running run minus finished runs of another configuration.

    The part within the run shrinks with its windows; it has a confidence sequence at `WITHIN_SHARE` of alpha. The part
    between runs is drawn once, at the start of the run: looking again does not draw it again, so it has an ordinary
    t interval at the rest of alpha. By the union bound, the sum is valid at alpha at all times together.

    Args:
        windows: values of the windows of the run so far.
        reference: values of the finished runs, one per run.
        ledger: spread between runs, of runs that are not compared.
        alpha: probability of an interval without the truth, at any time.
        batch: number of windows in a batch.
    """
    within = always_valid(batch_means(windows, batch), WITHIN_SHARE * alpha)
    if math.isinf(within.low):
        return ValidInterval(within.estimate - mean(reference), -math.inf, math.inf)
    t = t_quantile(ledger.df, (1 - WITHIN_SHARE) * alpha)
    half = within.high - within.estimate + t * math.sqrt(ledger.variance * (1 + 1 / len(reference)))
    estimate = within.estimate - mean(reference)
    return ValidInterval(estimate, estimate - half, estimate + half)


def pairs(a: Sequence[float], b: Sequence[float], alpha: float = ALPHA) -> ValidInterval:
    """Return the always-valid interval of B minus A, over pairs of runs in the order of their starts.

    For looking after every run of a campaign. The spreads of A and B may differ. Runs without a partner are left out.
    """
    return always_valid([other - one for one, other in zip(a, b, strict=False)], alpha, PAIR_EFFECT)


#: Effects of this size, in standard deviations of the difference of a pair, are found soonest among pairs of runs.
PAIR_EFFECT = 3.0


def switchback(arms: Sequence[str], values: Sequence[float], first: str, second: str, settle: int = 0) -> list[float]:
    """Return the difference second minus first in each block A B B A inside one run.

    A block is a stretch of windows of the second arm with half as many windows of the first arm before and after it. In
    a block, the part between runs and a linear drift are the same for both arms, and cancel. Each window is in at most
    one block, so the differences are values for `always_valid`.

    Args:
        arms: the arm of each window, in the order of time.
        values: the value of each window.
        first: arm A.
        second: arm B.
        settle: windows after each switch that are left out.
    """
    starts = [at for at in range(len(arms)) if not at or arms[at] != arms[at - 1]]
    ends = [*starts[1:], len(arms)][: len(starts)]
    runs = [(arms[start], start, end) for start, end in zip(starts, ends, strict=True)]
    differences = []
    for at in range(1, len(runs) - 1):
        (before, _, _), (middle, start, end), (after, _, _) = runs[at - 1 : at + 2]
        if (before, middle, after) != (first, second, first):
            continue
        around = [_share(runs, at - 1, settle), _share(runs, at + 1, settle)]
        half = min((end - start - settle) // 2, *around)
        if half < 1:
            continue
        # Both means have the same middle in time: an odd stretch keeps its middle window.
        cut = (end - start - settle) // 2 - half
        of_second = values[start + settle + cut : end - cut]
        of_first = [*values[start - half : start], *values[end + settle : end + settle + half]]
        differences.append(mean(of_second) - mean(of_first))
    return differences


def _share(runs: Sequence[tuple[str, int, int]], at: int, settle: int) -> int:
    """Return the windows of a stretch for one of its neighbours: half, or all at the edge of the run."""
    _, start, end = runs[at]
    windows = end - start - settle
    return windows if at in (0, len(runs) - 1) else windows // 2
