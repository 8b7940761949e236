"""The table of configurations: each metric as the mean over runs with its 95 % interval, and the paper's score."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from effllm.analysis.compared_metrics import ComparedMetric, compared_metrics
from effllm.analysis.comparison import ALPHA
from effllm.analysis.run_folders import UnreadableRun
from effllm.analysis.sides import ComparedRun, Side
from effllm.metrics.table import model_compression_ratio
from effllm.records.facts import float_or_none
from effllm.records.plain_text import one_line

#: The names of metrics in the EfficientLLM paper (arXiv 2505.13840, section 5).
PAPER = {
    "amu_gb": "AMU",
    "pcu_ratio": "PCU",
    "al_seconds": "AL",
    "tt_tokens_per_param_per_sec": "TT",
    "st_samples_per_param_per_sec": "ST",
    "it_tokens_per_sec": "IT",
    "aec_watts": "AEC",
}
#: The columns of a table that has not the paper's.
DEFAULT_COLUMNS = (
    "tokens_per_second", "tokens_per_second_per_gpu", "samples_per_second", "seconds_per_iteration", "mfu_ratio",
    "joules_per_token", "watts_per_gpu", "peak_gb", "data_wait_ratio", "loss",
)  # fmt: skip
#: The model compression ratio, of models with these facts, from `PerformanceMonitor.set_compression_info`.
MCR = ComparedMetric("mcr", "compression", "", "", higher_is_better=True)
COMPRESSION_FACTS = ("original_size", "compressed_size", "original_perf", "compressed_perf")
MIN_SCORED = 3  # configurations: of two, each metric has only the normalised values 0 and 1


class MeanOfRuns(NamedTuple):
    """A metric of a configuration."""

    mean: float | None = None  # None if a run has no value
    half: float | None = None  # half of the 95 % interval by Student's t; None for one run
    is_in_doubt: bool = False  # whether it depends on a failed check of the audit


class Configurations(NamedTuple):
    """The table: a row for each configuration."""

    sides: Sequence[Side]
    metrics: Sequence[ComparedMetric]
    rows: Sequence[Sequence[MeanOfRuns]]
    scores: Sequence[float | None]  # weighted harmonic mean of normalised values, 0 to 1; empty without a score
    notes: Sequence[str]


def configurations(sides: Sequence[Side], *, is_paper: bool, names: Sequence[str] = ()) -> Configurations:
    """Return the table of configurations.

    With ``is_paper`` it has the metrics and the score of the paper, and the best configuration is first; ``names`` are
    further metrics.
    """
    _check_comparable(sides, is_paper=is_paper)
    wanted = [*(PAPER if is_paper else DEFAULT_COLUMNS), *names]
    chosen = sorted(compared_metrics(wanted), key=lambda metric: wanted.index(metric.name))
    metrics = [*chosen, MCR] if is_paper else chosen
    columns = [[_mean_of_runs(side, metric) for side in sides] for metric in metrics]
    measured = [index for index, column in enumerate(columns) if any(cell.mean is not None for cell in column)]
    metrics, columns = [metrics[index] for index in measured], [columns[index] for index in measured]
    notes, scores, order = list(_unfinished_notes(sides)), [None] * len(sides), list(range(len(sides)))
    if is_paper and len(sides) >= MIN_SCORED:
        normalised = {}  # values of the sides by the label of a metric
        for metric, column in zip(metrics, columns, strict=True):
            values = _normalised(metric, column, sides)
            if isinstance(values, str):
                notes.append(f"not in the score: {label(metric)}: {values}")
            else:
                normalised[label(metric)] = values
        # Equation 12; by this formula, the worst configuration in any metric has the score 0.
        scores = [statistics.harmonic_mean(of_side) for of_side in zip(*normalised.values(), strict=True)] or scores
        sums = [sum(of_side) for of_side in zip(*normalised.values(), strict=True)] or [0.0] * len(sides)
        order.sort(key=lambda index: (-(scores[index] or 0.0), -sums[index]))  # sums order sides with the score 0
        if normalised:
            notes.insert(0, f"score: {', '.join(normalised)}, each from 0 (worst) to 1 (best); harmonic mean")
    elif is_paper:
        notes.insert(0, f"no score: it needs at least {MIN_SCORED} configurations")
    if any(cell.is_in_doubt for column in columns for cell in column):
        notes.append("!: in doubt, because a check of the counts failed (effllm inspect)")
    return Configurations(
        [sides[index] for index in order],
        metrics,
        [[column[index] for column in columns] for index in order],
        [scores[index] for index in order] if any(score is not None for score in scores) else [],
        notes,
    )


def label(metric: ComparedMetric) -> str:
    return PAPER.get(metric.name, metric.name.upper() if metric is MCR else metric.name)


def _check_comparable(sides: Sequence[Side], *, is_paper: bool) -> None:
    runs = [run for side in sides for run in side.runs]
    if len({run.row.get("simulated") is True for run in runs}) > 1:
        raise UnreadableRun("some runs are of simulated devices, and others not: compare them apart")
    kinds = sorted({str(run.row.get("parameters_kind") or "unknown") for run in runs})
    if is_paper and len(kinds) > 1:
        raise UnreadableRun(f"the runs have different kinds of parameters: {', '.join(kinds)}; compare them apart")


def _mean_of_runs(side: Side, metric: ComparedMetric) -> MeanOfRuns:
    get: Callable[[ComparedRun], float | None] = compression if metric is MCR else lambda run: run.value(metric.column)
    values = [value for run in side.runs if (value := get(run)) is not None and math.isfinite(value)]
    if not values or len(values) < len(side.runs):
        return MeanOfRuns()
    half = None
    if len(values) > 1:
        from scipy.stats import t  # the extra analysis

        half = float(t.isf(ALPHA / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return MeanOfRuns(statistics.fmean(values), half, any(metric.column in run.doubts for run in side.runs))


def _normalised(metric: ComparedMetric, column: Sequence[MeanOfRuns], sides: Sequence[Side]) -> list[float] | str:
    """Return values from 0 (worst) to 1 (best) by equations 10 and 11, or the reason why they are missing."""
    values = [cell.mean for cell in column if cell.mean is not None]
    scopes = {run.row.get("energy_scope") for side in sides for run in side.runs}
    if len(values) < len(column):
        return f"not measured in {len(column) - len(values)} of {len(column)} configurations"
    if any(cell.is_in_doubt for cell in column):
        return "a check of the counts failed, on which it depends"
    if metric.depends_on_power_scope and len(scopes) > 1:
        return "the power scopes differ"
    low, high = min(values), max(values)
    if not high > low:
        return "the same in all configurations"
    worst, best = (low, high) if metric.higher_is_better else (high, low)
    return [(value - worst) / (best - worst) for value in values]


def _unfinished_notes(sides: Sequence[Side]) -> Iterator[str]:
    for side in sides:
        statuses = Counter(str(run.row.get("status") or "unknown") for run in side.runs)
        others = [f"{count} {one_line(status)}" for status, count in sorted(statuses.items()) if status != "completed"]
        if others:
            yield f"{one_line(side.name)}: status of its runs: {', '.join(others)}"


def compression(run: ComparedRun) -> float | None:
    """Return the model compression ratio (equation 9) of a run of a compressed model; ``None`` without the facts."""
    numbers = [number for name in COMPRESSION_FACTS if (number := float_or_none(run.facts.get(name))) is not None]
    if len(numbers) < len(COMPRESSION_FACTS):
        return None
    try:
        return model_compression_ratio(*numbers)
    except ValueError:
        return None
