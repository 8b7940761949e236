"""The comparison of two or more sides: a word for each metric, with its evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from effllm.analysis.always_valid import BATCH_WINDOWS, ValidInterval, pairs, these_two_runs, while_running
from effllm.analysis.campaign_journal import PlannedRuns, has_ended
from effllm.analysis.compared_metrics import ComparedMetric
from effllm.analysis.difference import (
    ALPHA,
    SAME,
    UNKNOWN,
    Difference,
    RunSpread,
    detectable,
    difference,
    holm,
    spread_of,
)
from effllm.analysis.difference import word as word_of
from effllm.analysis.fairness import boards
from effllm.analysis.sides import CAMPAIGN, CONFIGURATION, ComparedRun, Side
from effllm.analysis.window_values import window_values

#: Rounding of a value: standard deviation as a share of the value.
RESOLUTION = 1e-4
RUNS_FOR_AN_ANSWER = 3


class MetricEvidence(NamedTuple):
    """What is known about a metric of two sides, on the scale of the comparison."""

    difference: Difference | None = None
    interval: ValidInterval | None = None  # always valid, instead of a difference
    reason: str = ""
    is_comparable: bool = True
    gain_error: float = 0.0  # half-width of the error of the sensors, which differ between the sides
    detectable: float | None = None
    spread: RunSpread | None = None  # of the ledger
    ledger_runs: int = 0
    these_two: Difference | None = None


class MetricComparison(NamedTuple):
    """The word for one metric of two sides; shares are of the value of side A, and ``None`` means unknown."""

    metric: str
    unit: str
    higher_is_better: bool
    a: float | None  # mean over the runs
    b: float | None
    runs_a: int
    runs_b: int
    word: str
    reason: str
    share: float | None = None  # (B - A) / A
    low: float | None = None  # interval of this metric alone
    high: float | None = None
    p: float | None = None
    adjusted_p: float | None = None  # by Holm, over all metrics and sides
    detectable_share: float | None = None  # minimum detectable effect at the level of one of all metrics
    spread_share: float | None = None  # standard deviation between runs in the ledger
    ledger_runs: int = 0
    these_two_share: float | None = None  # difference of these two runs
    these_two_error: float | None = None  # half-width, 95 %
    always_valid: bool = False


class EarlierRuns:
    """Earlier runs by configuration.

    Args:
        runs: finished runs that are on no side.
    """

    def __init__(self, runs: Sequence[ComparedRun]) -> None:
        self._groups: dict[str, dict[str, list[ComparedRun]]] = {}
        for run in runs:
            commit = str(run.row.get("git_commit"))
            self._groups.setdefault(run.configuration(), {}).setdefault(commit, []).append(run)

    def spread(self, sides: Sequence[Side], get: Callable[[ComparedRun], float | None]) -> tuple[RunSpread | None, int]:
        """Return the spread of the configurations of the sides, and the number of runs that show it."""
        wanted = {run.configuration() for side in sides for run in side.runs}
        groups = []
        for key in wanted & set(self._groups):
            for runs in self._groups[key].values():
                values = [value for run in runs if (value := get(run)) is not None]
                if len(values) > 1:
                    groups.append(values)
        return spread_of(groups), sum(map(len, groups))

    def spread_of_others(self, get: Callable[[ComparedRun], float | None]) -> RunSpread | None:
        """Return the spread of all configurations in the ledger."""
        every = [runs for by_commit in self._groups.values() for runs in by_commit.values()]
        return spread_of([[value for run in runs if (value := get(run)) is not None] for runs in every])


class Scale(NamedTuple):
    """The scale on which values are compared: logarithms if all values are positive, so that differences are shares."""

    is_log: bool
    reference: float  # mean of side A; 1 on the logarithmic scale

    def of(self, value: float | None) -> float | None:
        if value is None or not math.isfinite(value):
            return None
        return math.log(value) if self.is_log and value > 0 else None if self.is_log else value

    def share(self, difference: float) -> float | None:
        if self.is_log:
            return math.expm1(min(difference, 700.0))
        return difference / abs(self.reference) if self.reference else None

    def mean(self, values: Sequence[float]) -> float:
        center = math.fsum(values) / len(values)
        return math.exp(center) if self.is_log else center


def compare(
    sides: Sequence[Side],
    metrics: Sequence[ComparedMetric],
    ledger: EarlierRuns,
    alpha: float = ALPHA,
    comparisons: int = 1,
) -> list[tuple[Side, list[MetricComparison]]]:
    """Compare every side with the first; Holm's correction is over all metrics and sides together.

    A metric that no run has is left out.

    Args:
        sides: two or more sides.
        metrics: the metrics.
        ledger: earlier runs.
        alpha: level of the printed intervals, each of one metric alone.
        comparisons: number of such comparisons whose words must hold together (Bonferroni).
    """
    first, others = sides[0], sides[1:]
    metrics = [one for one in metrics if any(_values(side, one.column) for side in sides)]
    count = max(len(metrics) * len(others), 1) * comparisons
    plans = [_unfinished_plan(first, other) for other in others]
    found = {
        (at, metric.name): _evidence(first, other, metric, ledger, ALPHA / count, plans[at])
        for at, other in enumerate(others)
        for metric in metrics
    }
    tested = {key: one.difference.p for key, (_, one) in found.items() if one.difference is not None}
    adjusted = dict(zip(tested, holm([min(1.0, comparisons * p) for p in tested.values()]), strict=True))
    # Always-valid intervals have the level of one of all metrics already.
    return [
        (
            other,
            [
                _row(metric, first, other, *found[at, metric.name], adjusted.get((at, metric.name)), alpha)
                for metric in metrics
            ],
        )
        for at, other in enumerate(others)
    ]


def _values(side: Side, column: str) -> list[float]:
    return [value for run in side.runs if (value := run.value(column)) is not None and math.isfinite(value)]


def _scale(a: Sequence[float], b: Sequence[float]) -> Scale:
    if all(value > 0 for value in (*a, *b)):
        return Scale(True, 1.0)
    return Scale(False, math.fsum(a) / len(a) if a else 0.0)


def _evidence(
    a: Side, b: Side, metric: ComparedMetric, ledger: EarlierRuns, alpha: float, plan: str
) -> tuple[Scale, MetricEvidence]:
    raw_a, raw_b = _values(a, metric.column), _values(b, metric.column)
    scale = _scale(raw_a, raw_b)
    if reason := _not_comparable(a, b, metric, raw_a, raw_b):
        return scale, MetricEvidence(reason=reason, is_comparable=False)

    def get(run: ComparedRun) -> float | None:
        return scale.of(run.value(metric.column))

    spread, count = ledger.spread((a, b), get)
    known = MetricEvidence(spread=spread, ledger_runs=count, gain_error=_gain_error(a, b, metric, scale))
    continuing = [run for side in (a, b) for run in side.runs if run.continues]
    if continuing:
        return scale, _running(a, b, metric, scale, known, alpha)
    if plan:
        return scale, _looking(a, b, get, plan, known, alpha)
    values = [[scaled for run in side.runs if (scaled := get(run)) is not None] for side in (a, b)]
    return scale, _finished((a, b), metric, scale, (values[0], values[1]), known, ledger, alpha, get)


def _finished(
    sides: tuple[Side, Side],
    metric: ComparedMetric,
    scale: Scale,
    values: tuple[list[float], list[float]],
    known: MetricEvidence,
    ledger: EarlierRuns,
    alpha: float,
    get: Callable[[ComparedRun], float | None],
) -> MetricEvidence:
    a, b = values
    resolution = RESOLUTION * (1.0 if scale.is_log else max(map(abs, (*a, *b))))
    known = known._replace(these_two=_these_two(sides, metric, scale) if len(a) == len(b) == 1 else None)
    found = difference(a, b, known.spread, resolution)
    if found is None:
        if len(set(a) | set(b)) == 1 and min(len(a), len(b)) > 1:
            return known._replace(difference=Difference(0.0, 1.0, 1.0), reason="all runs have the same value")
        return known._replace(reason=_no_repeats(scale, ledger.spread_of_others(get), alpha))
    used = known.spread.df if known.spread and found.uses_ledger else 0.0
    own = spread_of([a, b])
    known_spreads = [one for one in (own, known.spread if used else None) if one is not None]
    df = sum(one.df for one in known_spreads)
    pooled = RunSpread(sum(one.variance * one.df for one in known_spreads) / df + resolution**2, df)
    return known._replace(difference=found, detectable=detectable(pooled, len(a), len(b), used, alpha))


def _running(
    a: Side, b: Side, metric: ComparedMetric, scale: Scale, known: MetricEvidence, alpha: float
) -> MetricEvidence:
    """Return the always-valid interval of one running run against finished runs."""
    sides = (a, b) if any(run.continues for run in b.runs) else (b, a)
    reference, current = sides
    if len(current.runs) != 1 or any(run.continues for run in reference.runs):
        return known._replace(reason="a run continues; a running run is compared if it is alone on its side")
    if known.spread is None:
        return known._replace(reason="the run continues, and the ledger has no repeats of these configurations")
    if metric.window_tag is None:
        return known._replace(reason="the run continues, and its windows do not have this metric")
    scaled = [scale.of(value) for value in window_values(current.runs[0], metric.window_tag)]
    windows = [value for value in scaled if value is not None]
    of_reference = [value for run in reference.runs if (value := scale.of(run.value(metric.column))) is not None]
    interval = while_running(windows, of_reference, known.spread, alpha)
    if math.isinf(interval.low):
        return known._replace(reason=f"the run continues: a statement needs {3 * BATCH_WINDOWS} windows or more")
    if sides[1] is a:
        interval = ValidInterval(-interval.estimate, -interval.high, -interval.low)
    return known._replace(interval=interval, reason="the run continues; valid after any number of looks")


def _looking(
    a: Side, b: Side, get: Callable[[ComparedRun], float | None], plan: str, known: MetricEvidence, alpha: float
) -> MetricEvidence:
    """Return the always-valid interval of an unfinished campaign, over pairs of repeats with the same number."""
    by_number: list[dict[int, float]] = []
    for side in (a, b):
        repeats = ((run.repeat(), get(run)) for run in side.runs)
        by_number.append({number[0]: value for number, value in repeats if number and value is not None})
    numbers = sorted(by_number[0].keys() & by_number[1].keys())
    interval = pairs([by_number[0][one] for one in numbers], [by_number[1][one] for one in numbers], alpha)
    if math.isinf(interval.low):
        return known._replace(reason=plan)
    return known._replace(interval=interval, reason=f"{plan}; valid after any number of looks")


def _unfinished_plan(a: Side, b: Side) -> str:
    """Return a sentence if both sides are of one campaign that has not ended.

    A campaign has also ended if repeats failed, or if the user compares a part of its runs.
    """
    campaigns = {run.tags.get(CAMPAIGN) for side in (a, b) for run in side.runs}
    plans = [[number for run in side.runs if (number := run.repeat())] for side in (a, b)]
    if len(campaigns) != 1 or None in campaigns or not plans[0] or not plans[1]:
        return ""
    planned = max(of for plan in plans for _, of in plan)
    done = min(len({number for number, _ in plan}) for plan in plans)
    if done >= planned or all(map(has_ended, {_campaign_of(run) for side in (a, b) for run in side.runs})):
        return ""
    return f"{done} of {planned} planned repeats are complete"


def _campaign_of(run: ComparedRun) -> PlannedRuns:
    _, planned = run.repeat() or (0, 0)
    return PlannedRuns(run.folder.parent, run.tags.get(CONFIGURATION, ""), planned)


def _not_comparable(a: Side, b: Side, metric: ComparedMetric, raw_a: Sequence[float], raw_b: Sequence[float]) -> str:
    if not raw_a or not raw_b:
        return f"not measured in {'A' if not raw_a else 'B'}"
    if len(raw_a) < len(a.runs) or len(raw_b) < len(b.runs):
        missing = len(a.runs) + len(b.runs) - len(raw_a) - len(raw_b)
        return f"not measured in {missing} of {len(a.runs) + len(b.runs)} runs"
    if any(metric.column in run.doubts for side in (a, b) for run in side.runs):
        return "a check of the counts failed, on which this metric depends (effllm inspect)"
    columns = {"simulated": "some devices are simulated"}
    if metric.is_per_parameter:
        columns["parameters_kind"] = "the kinds of parameters differ (total, trainable, active)"
    if metric.is_energy:
        columns["energy_scope"] = "the power scopes differ"
    for column, reason in columns.items():
        if len({run.row.get(column) for side in (a, b) for run in side.runs}) > 1:
            return reason
    return ""


def _gain_error(a: Side, b: Side, metric: ComparedMetric, scale: Scale) -> float:
    """Return the error of the sensors in the difference; it cancels if both sides ran on the same boards."""
    if boards(a) & boards(b):
        return 0.0
    total = 0.0
    for side in (a, b):
        errors = [(run.row.get("metric_sensor_errors") or {}).get(metric.column, 0.0) for run in side.runs]
        values = [abs(run.value(metric.column) or 0.0) for run in side.runs]
        shares = [
            error / value if scale.is_log and value else error for error, value in zip(errors, values, strict=True)
        ]
        total += (max(shares) ** 2) / max(len(boards(side)), 1)
    return math.sqrt(total)


def _these_two(sides: tuple[Side, Side], metric: ComparedMetric, scale: Scale) -> Difference | None:
    if metric.window_tag is None:
        return None
    windows = [
        [scaled for value in window_values(side.runs[0], metric.window_tag) if (scaled := scale.of(value)) is not None]
        for side in sides
    ]
    return these_two_runs(windows[0], windows[1])


def _no_repeats(scale: Scale, others: RunSpread | None, alpha: float) -> str:
    runs = RUNS_FOR_AN_ANSWER
    if others is None or not others.variance:
        ratio = detectable(RunSpread(1.0, 1e6), runs, runs, 0.0, alpha) or 0.0
        return f"no repeats; {runs} runs a side would show differences above {ratio:.1f} times the sd between runs"
    effect = scale.share(detectable(others, runs, runs, 0.0, alpha) or 0.0)
    shown = f"{100 * effect:.2g} %" if effect is not None else "an unknown size"
    return (
        f"no repeats; {runs} runs a side would show differences above {shown}, if the spread is that of the other "
        "configurations in the ledger"
    )


def _row(
    metric: ComparedMetric,
    a: Side,
    b: Side,
    scale: Scale,
    evidence: MetricEvidence,
    adjusted_p: float | None,
    alpha: float,
) -> MetricComparison:
    raw_a, raw_b = _values(a, metric.column), _values(b, metric.column)
    means = [_mean(scale, raw) for raw in (raw_a, raw_b)]
    word, reason, estimate, low, high, p = UNKNOWN, evidence.reason, None, None, None, None
    if evidence.difference is not None:
        one = evidence.difference
        estimate, p = one.estimate, one.p
        low, high = one.interval(alpha)
        word = word_of(
            estimate, adjusted_p if adjusted_p is not None else 1.0, higher_is_better=metric.higher_is_better
        )
    elif evidence.interval is not None:
        estimate, low, high = evidence.interval
        if evidence.interval.excludes_zero:
            word = word_of(estimate, 0.0, higher_is_better=metric.higher_is_better)
    if estimate is not None and low is not None and high is not None and evidence.gain_error:
        # The errors of the sensors do not average out over repeats.
        low, high = low - evidence.gain_error, high + evidence.gain_error
        if word not in (SAME, UNKNOWN) and low <= 0 <= high:
            word, reason = SAME, "within the errors of the sensors, because the sides ran on other boards"
    elif evidence.is_comparable and estimate is None and means[0] is not None and means[1] is not None:
        estimate = (scale.of(means[1]) or 0.0) - (scale.of(means[0]) or 0.0)
    shares = _shares(scale, estimate=estimate, low=low, high=high, detectable_share=evidence.detectable)
    if scale.is_log and evidence.spread:
        shares["spread_share"] = math.sqrt(evidence.spread.variance)
    if evidence.these_two:
        low_two, high_two = evidence.these_two.interval()
        shares |= _shares(scale, these_two_share=evidence.these_two.estimate, these_two_error=(high_two - low_two) / 2)
    shares["share"] = shares.pop("estimate")
    return MetricComparison(
        metric.name,
        metric.unit,
        metric.higher_is_better,
        means[0],
        means[1],
        len(raw_a),
        len(raw_b),
        word,
        reason,
        p=p,
        adjusted_p=adjusted_p,
        ledger_runs=evidence.ledger_runs,
        always_valid=evidence.interval is not None,
        **shares,
    )


def _mean(scale: Scale, raw: Sequence[float]) -> float | None:
    scaled = [value for one in raw if (value := scale.of(one)) is not None]
    return scale.mean(scaled) if scaled else None


def _shares(scale: Scale, **differences: float | None) -> dict[str, float | None]:
    return {name: None if one is None else scale.share(one) for name, one in differences.items()}
