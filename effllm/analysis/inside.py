"""The comparison of two values of a knob inside one run, which the loop switched back and forth."""

from __future__ import annotations

import math

from effllm.analysis.always_valid import always_valid, switchback
from effllm.analysis.compared_metrics import LOSS, ComparedMetric
from effllm.analysis.comparison import MetricComparison, Scale
from effllm.analysis.difference import ALPHA, SAME, UNKNOWN
from effllm.analysis.difference import word as word_of
from effllm.analysis.run_folders import UnreadableRun
from effllm.analysis.sides import ComparedRun, Side
from effllm.analysis.window_values import WindowValues, windows_of

SETTLE = 1  # windows after a switch that are left out


def compare_inside(
    run: ComparedRun, name: str, metrics: list[ComparedMetric]
) -> tuple[Side, Side, list[MetricComparison]]:
    """Compare two values of an instrument inside one run, by blocks A B B A.

    A window in which the value changed belongs to no arm. The intervals are always valid, and all words together hold
    at the level of the comparison (Bonferroni). The statement is about this run: its boards and temperatures.

    Args:
        run: a run whose loop recorded the value of the knob as an instrument.
        name: name of the instrument.
        metrics: the metrics.

    Raises:
        UnreadableRun: the instrument does not have exactly two values.
    """
    windows = windows_of(run)
    arms = [_arm(line, name) for line in windows]
    known = list(dict.fromkeys(arm for arm in arms if arm))
    if len(known) != 2:
        found = ", ".join(known[:5]) or "none"
        raise UnreadableRun(f"the instrument {name} needs two values inside the run, but has {len(known)}: {found}")
    tags = [one for one in metrics if one.name != LOSS and any(one.window_tag in line.values for line in windows)]
    rows = [_row(metric, windows, arms, (known[0], known[1]), ALPHA / len(tags)) for metric in tags]
    sides = [Side(f"{name}={arm}", (run,)) for arm in known]
    return sides[0], sides[1], rows


def _arm(line: WindowValues, name: str) -> str:
    values = line.instruments.get(name)
    if values is None or values.least is None or values.least != values.most:
        return ""
    return f"{values.least:g}"


def _row(
    metric: ComparedMetric, windows: list[WindowValues], arms: list[str], known: tuple[str, str], alpha: float
) -> MetricComparison:
    measured = [
        (arm, value) for arm, line in zip(arms, windows, strict=True) if (value := _value(line, metric)) is not None
    ]
    raw = [value for _, value in measured]
    by_arm = [[value for arm, value in measured if arm == one] for one in known]
    mean_a, mean_b = (math.fsum(values) / len(values) if values else None for values in by_arm)
    scale = Scale(True, 1.0) if all(value > 0 for value in raw) else Scale(False, mean_a or 0.0)
    scaled = [scale.of(value) or 0.0 for value in raw]
    blocks = switchback([arm for arm, _ in measured], scaled, *known, SETTLE)
    interval = always_valid(blocks, alpha)
    is_known = math.isfinite(interval.low)
    word = SAME if is_known else UNKNOWN
    if is_known and interval.excludes_zero:
        word = word_of(interval.estimate, 0.0, higher_is_better=metric.higher_is_better)
    return MetricComparison(
        metric.name,
        metric.unit,
        metric.higher_is_better,
        mean_a,
        mean_b,
        len(by_arm[0]),
        len(by_arm[1]),
        word,
        f"{len(blocks)} blocks inside one run; valid after any number of looks",
        share=scale.share(interval.estimate) if blocks else None,
        low=scale.share(interval.low) if is_known else None,
        high=scale.share(interval.high) if is_known else None,
        always_valid=True,
    )


def _value(line: WindowValues, metric: ComparedMetric) -> float | None:
    value = line.values.get(metric.window_tag or "")
    return value if value is not None and math.isfinite(value) else None
