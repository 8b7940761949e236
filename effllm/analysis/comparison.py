"""The comparison of two sides of runs: an outcome for each quantity, with its evidence.

Metrics that are functions of each other are one quantity: the first of them that was measured is tested. The primary
quantity is tested first, and the others after it (`_tests`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from effllm.analysis.compared_metrics import LOSS, PER_PARAMETER, THROUGHPUT, ComparedMetric
from effllm.analysis.fairness import board_sets
from effllm.analysis.sides import ComparedRun, Side

ALPHA = 0.05  # level of the test of a primary quantity, and of the intervals
#: Share of comparisons in which a difference of the size of the minimum detectable effect is found.
POWER = 0.8

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "not distinguishable", "unknown"
OUTCOMES = (BETTER, WORSE, SAME, UNKNOWN)
#: Level of the other quantities if the primary quantity does not differ.
STRICT_ALPHA = 0.01
#: A smaller difference is rounding; as a share of the value.
RESOLUTION = 1e-4
#: If a test could miss a difference of this share, finding no difference means nothing: the outcome is unknown.
MAX_DETECTABLE = 1.0
#: A larger value is not a measurement, and its powers overflow.
MAX_VALUE = 1e60


class Difference(NamedTuple):
    """The mean of B minus the mean of A, by Welch's test over runs (docs/comparing.md has the reason)."""

    estimate: float
    standard_error: float
    df: float  # degrees of freedom of the standard error
    p: float  # probability of a difference at least as large between identical configurations

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the confidence interval at level 1 - ``alpha``."""
        half = _critical_t(self.df, alpha) * self.standard_error
        return self.estimate - half, self.estimate + half

    def detectable(self, alpha: float = ALPHA) -> float:
        """Return the minimum detectable effect of a test at the level ``alpha`` of runs with this standard error.

        The effect is ``standard_error`` times the noncentrality d for which P(T > t) = `POWER`, where T has the
        noncentral t distribution with ``df`` degrees of freedom and noncentrality d, and t is the critical value of the
        test. Welch's degrees of freedom vary with few runs: the median statement is 0.9 of the truth at 3 runs a side,
        and 0.7 at 2 runs.
        """
        from scipy.special import nctdtrinc

        return self.standard_error * float(nctdtrinc(self.df, 1 - POWER, _critical_t(self.df, alpha)))


def _critical_t(df: float, alpha: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, 1 - alpha / 2))


def difference(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """Return the difference of B from A, by a value of each run; ``None`` if a side has fewer than two runs."""
    from scipy.stats import ttest_ind

    if min(len(a), len(b)) < 2:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of a side whose runs have the same value
        test = ttest_ind(b, a, equal_var=False)
    estimate = fmean(b) - fmean(a)
    standard_error = math.sqrt(np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b))
    p = float(test.pvalue) if standard_error else float(estimate == 0)
    return Difference(estimate, standard_error, float(test.df), p)


def holm_adjusted(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: of tests at a level, any false outcome has at most this probability."""
    count, adjusted, largest = len(p_values), [0.0] * len(p_values), 0.0
    for num_smaller, index in enumerate(sorted(range(count), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (count - num_smaller) * p_values[index]))
        adjusted[index] = largest  # at least that of each smaller p-value
    return adjusted


class MetricComparison(NamedTuple):
    """The comparison of a metric of two sides; shares are of the value of side A, and ``None`` means unknown."""

    metric: str
    quantity: str
    unit: str
    higher_is_better: bool
    a: float | None  # mean over the runs
    b: float | None
    runs_a: int
    runs_b: int
    outcome: str | None  # None: another metric of the quantity has the outcome
    reason: str
    share: float | None  # (B - A) / A
    low: float | None  # interval of this metric alone
    high: float | None
    is_primary: bool
    p: float | None  # None: not tested
    adjusted_p: float | None  # by Holm
    level: float | None  # of the adjusted p-value
    detectable_share: float | None  # minimum detectable effect at the level; None above MAX_DETECTABLE


class MetricEvidence(NamedTuple):
    """What is known about a metric of two sides; differences are of logarithms if all values are positive."""

    a: list[float]  # one value per run: its logarithm if is_log
    b: list[float]
    is_log: bool
    is_comparable: bool = False
    reason: str = ""  # why there is no test
    difference: Difference | None = None  # None: not tested
    gain_error: float = 0.0  # half-width of the error of the sensors, which differ between the sides

    @property
    def estimate(self) -> float | None:
        return fmean(self.b) - fmean(self.a) if self.is_comparable else None

    def interval(self, alpha: float) -> tuple[float, float] | None:
        """Return the interval of the difference; the errors of the sensors do not average out over repeats."""
        if self.difference is None:
            return None
        low, high = self.difference.interval(alpha)
        return low - self.gain_error, high + self.gain_error

    def share(self, difference: float | None) -> float | None:
        """Return a difference as a share of the value of side A."""
        if not difference:
            return difference
        if self.is_log:
            return math.expm1(min(difference, 700.0))  # exp(710) overflows
        center = abs(fmean(self.a))
        share = difference / center if center else math.inf
        return share if math.isfinite(share) else None

    def mean(self, values: Sequence[float]) -> float | None:
        """Return the mean over the runs of a side, which is the geometric mean of positive values."""
        if not values:
            return None
        return math.exp(fmean(values)) if self.is_log else fmean(values)


class AdjustedP(NamedTuple):
    """The p-value of a metric that is tested among others."""

    adjusted_p: float  # by Holm
    level: float
    num_tests: int  # of the family that Holm's correction covers
    is_primary: bool

    @property
    def is_significant(self) -> bool:
        return self.adjusted_p <= self.level


def compare(
    a: Side,
    b: Side,
    metrics: Sequence[ComparedMetric],
    *,
    are_primary: bool = False,
    alpha: float = ALPHA,
    comparisons: int = 1,
) -> list[MetricComparison]:
    """Compare side B with side A; a metric that no run has is left out.

    All metrics that the user has named are primary (``are_primary``), else only throughput is. ``alpha`` is the level
    of the intervals, each of one metric alone. The outcomes of so many ``comparisons`` hold together (Bonferroni).
    """
    evidence = {metric: _evidence(a, b, metric) for metric in metrics if any(_values(side, metric) for side in (a, b))}
    first: dict[str, ComparedMetric] = {}  # comparable metric of each quantity
    for metric, entry in evidence.items():
        if entry.is_comparable:
            first.setdefault(metric.quantity, metric)
    p_values = {metric: change.p for metric in first.values() if (change := evidence[metric].difference) is not None}
    primary = [metric for metric in p_values if are_primary or metric.quantity == THROUGHPUT]
    tests = _tests(p_values, primary, comparisons)
    return [
        _comparison_row(metric, entry, tests.get(metric), alpha, is_first=first.get(metric.quantity) is metric)
        for metric, entry in evidence.items()
    ]


def _tests(
    p_values: Mapping[ComparedMetric, float], primary: Collection[ComparedMetric], comparisons: int
) -> dict[ComparedMetric, AdjustedP]:
    """Return the tests: the primary metrics at `ALPHA`, and the others after these, both by Holm.

    If no primary metric differs, the others are tested at `STRICT_ALPHA`, so the probability of any false outcome is at
    most the sum of both levels (union bound). If one differs, or without a primary metric, the others are tested at
    `ALPHA`.
    """
    tests = _adjusted_family({metric: p_values[metric] for metric in primary}, ALPHA / comparisons, is_primary=True)
    is_strict = bool(tests) and not any(test.is_significant for test in tests.values())
    others = {metric: p for metric, p in p_values.items() if metric not in tests}
    return tests | _adjusted_family(others, (STRICT_ALPHA if is_strict else ALPHA) / comparisons, is_primary=False)


def _adjusted_family(
    p_values: Mapping[ComparedMetric, float], level: float, *, is_primary: bool
) -> dict[ComparedMetric, AdjustedP]:
    adjusted = holm_adjusted(list(p_values.values()))
    pairs = zip(p_values, adjusted, strict=True)
    return {metric: AdjustedP(p, level, len(adjusted), is_primary) for metric, p in pairs}


def _values(side: Side, metric: ComparedMetric) -> list[float]:
    """Return one value per run; a value that cannot be a measurement is left out."""
    values = [value for run in side.runs if (value := run.value(metric.column)) is not None]
    return [value for value in values if abs(value) <= MAX_VALUE and (value >= 0 or metric.name == LOSS)]


def _evidence(a: Side, b: Side, metric: ComparedMetric) -> MetricEvidence:
    raw_a, raw_b = _values(a, metric), _values(b, metric)
    is_log = all(value > 0 for value in (*raw_a, *raw_b))
    values_a, values_b = ([math.log(value) for value in raw] if is_log else raw for raw in (raw_a, raw_b))
    if reason := _not_comparable(a, b, metric, len(raw_a), len(raw_b)):
        return MetricEvidence(values_a, values_b, is_log, reason=reason)
    if any(run.continues for side in (a, b) for run in side.runs):
        reason = "a run continues: compare after its end"
        return MetricEvidence(values_a, values_b, is_log, is_comparable=True, reason=reason)
    change = difference(values_a, values_b)
    reason = "" if change else "one run a side does not show the spread between runs: compare 3 or more runs a side"
    return MetricEvidence(values_a, values_b, is_log, True, reason, change, _gain_error(a, b, metric, is_log=is_log))


def _not_comparable(a: Side, b: Side, metric: ComparedMetric, num_a: int, num_b: int) -> str:
    """Return why two sides cannot be compared by a metric; "" if they can."""
    runs = [*a.runs, *b.runs]
    if not num_a or not num_b:
        return f"not measured in {'A' if not num_a else 'B'}"
    if missing := len(runs) - num_a - num_b:
        return f"not measured in {missing} of {len(runs)} runs"
    if any(metric.column in run.doubts for run in runs):
        return "a check of the counts failed, on which this metric depends (effllm inspect)"
    if _differs("simulated", runs):
        return "some devices are simulated"
    if metric.name in PER_PARAMETER and _differs("parameters_kind", runs):
        return "the kinds of parameters differ (total, trainable, active)"
    if metric.depends_on_power_scope and _differs("energy_scope", runs):
        return "the power scopes differ"
    return ""


def _differs(column: str, runs: Sequence[ComparedRun]) -> bool:
    return len({str(run.row.get(column)) for run in runs}) > 1


def _gain_error(a: Side, b: Side, metric: ComparedMetric, *, is_log: bool) -> float:
    """Return the error of the sensors in the difference; it cancels if both sides ran on the same boards."""
    if board_sets(a) & board_sets(b):
        return 0.0
    errors = []
    for side in (a, b):
        sensor_errors = [(run.row.get("metric_sensor_errors") or {}).get(metric.column, 0.0) for run in side.runs]
        values = [run.value(metric.column) or 0.0 for run in side.runs]
        shares = [error / value if is_log else error for error, value in zip(sensor_errors, values, strict=True)]
        errors.append(max(map(abs, shares)) / math.sqrt(max(len(board_sets(side)), 1)))  # boards err independently
    return math.hypot(*errors)


def _comparison_row(
    metric: ComparedMetric, evidence: MetricEvidence, test: AdjustedP | None, alpha: float, *, is_first: bool
) -> MetricComparison:
    interval = evidence.interval(alpha)
    low, high = (evidence.share(edge) for edge in interval) if interval else (None, None)
    detectable = None
    if test is not None and evidence.difference is not None:
        effect = evidence.share(evidence.difference.detectable(test.level / test.num_tests))
        if effect is not None and effect <= MAX_DETECTABLE:
            detectable = max(effect, RESOLUTION)  # a smaller difference would be taken as rounding
    outcome: str | None = None
    reason = evidence.reason
    if is_first or not evidence.is_comparable:
        outcome, reason = _outcome(metric, evidence, test, interval, detectable)
    return MetricComparison(
        metric.name,
        metric.quantity,
        metric.unit,
        metric.higher_is_better,
        evidence.mean(evidence.a),
        evidence.mean(evidence.b),
        len(evidence.a),
        len(evidence.b),
        outcome,
        reason,
        share=evidence.share(evidence.estimate),
        low=low,
        high=high,
        is_primary=test is not None and test.is_primary,
        p=evidence.difference.p if test and evidence.difference else None,
        adjusted_p=test.adjusted_p if test else None,
        level=test.level if test else None,
        detectable_share=detectable,
    )


def _outcome(
    metric: ComparedMetric,
    evidence: MetricEvidence,
    test: AdjustedP | None,
    interval: tuple[float, float] | None,
    detectable: float | None,
) -> tuple[str, str]:
    if test is None or interval is None or evidence.difference is None:
        return UNKNOWN, evidence.reason
    share = evidence.share(evidence.difference.estimate)
    if test.is_significant and (share is None or abs(share) > RESOLUTION):
        if interval[0] <= 0 <= interval[1]:
            return SAME, "within the errors of the sensors, because the sides ran on other boards"
        return BETTER if (evidence.difference.estimate > 0) == metric.higher_is_better else WORSE, ""
    if detectable is None:
        return UNKNOWN, f"too few runs: a difference of {100 * MAX_DETECTABLE:.0f} % may be missed"
    return SAME, ""


# --- conditions that fail a CI job: ``joules_per_token > +2%`` ---

#: The answers about a condition, with the exit status of `effllm compare`.
TRUE, FALSE, OPEN = "true", "false", "unknown"
EXIT_STATUS = {FALSE: 0, TRUE: 1, OPEN: 3}

_CONDITION = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(>|<)\s*([+-]?\d+(?:\.\d+)?)\s*%\s*")


class Condition(NamedTuple):
    """A limit for the difference of a metric, as a share of the value of side A."""

    text: str
    metric: str
    is_above: bool  # True: the condition is true above the limit
    limit: float


class ConditionAnswer(NamedTuple):
    """Whether a condition is true for a side."""

    condition: str
    side: str
    answer: str
    reason: str


def parse_condition(text: str) -> Condition:
    """Return the condition in a text such as ``joules_per_token > +2%``."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a condition such as 'joules_per_token > +2%' or 'tokens_per_second < -1%'")
    return Condition(" ".join(text.split()), match[1], match[2] == ">", float(match[3]) / 100)


def answer_to(condition: Condition, side: str, rows: Sequence[MetricComparison]) -> ConditionAnswer:
    """Return whether a condition is true for the configuration of a side, from the interval of the difference.

    The condition is true if the whole interval is beyond the limit, and false if no part is beyond the limit.
    """
    row = next((row for row in rows if row.metric == condition.metric), None)
    if row is None:
        return ConditionAnswer(condition.text, side, OPEN, "the metric was not measured")
    if row.low is None or row.high is None:
        return ConditionAnswer(condition.text, side, OPEN, row.reason)
    shown = f"{100 * row.low:+.2f} to {100 * row.high:+.2f} %"
    beyond = [edge > condition.limit if condition.is_above else edge < condition.limit for edge in (row.low, row.high)]
    if all(beyond) or not any(beyond):
        return ConditionAnswer(condition.text, side, TRUE if all(beyond) else FALSE, f"the difference is {shown}")
    return ConditionAnswer(condition.text, side, OPEN, f"the difference is {shown}, which includes the limit")


def exit_status(answers: Sequence[ConditionAnswer]) -> int:
    """Return 1 if any condition is true, else 3 if any is unknown, else 0."""
    outcomes = {result.answer for result in answers}
    return EXIT_STATUS[next((outcome for outcome in (TRUE, OPEN) if outcome in outcomes), FALSE)]
