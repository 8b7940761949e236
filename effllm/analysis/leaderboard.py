"""The table of the EfficientLLM paper (arXiv 2505.13840, section 5): efficiency metrics and a score."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from effllm.analysis.compared_metrics import ComparedMetric, compared_metrics
from effllm.analysis.comparison import OUTCOMES, compare
from effllm.analysis.run_folders import UnreadableRun
from effllm.analysis.sides import ComparedRun, Side
from effllm.metrics.contract import model_compression_ratio
from effllm.records.facts import float_or_none

#: The paper's names of metrics.
PAPER = {
    "AMU": "amu_gb",
    "PCU": "pcu_ratio",
    "AL": "al_seconds",
    "TT": "tt_tokens_per_param_per_sec",
    "ST": "st_samples_per_param_per_sec",
    "IT": "it_tokens_per_sec",
    "AEC": "aec_watts",
}
MCR = "MCR"
#: Facts of a run for MCR, from `PerformanceMonitor.set_compression_info`.
COMPRESSION_FACTS = ("original_size", "compressed_size", "original_perf", "compressed_perf")


class Standing(NamedTuple):
    """One configuration in the table."""

    side: Side
    parameters_kind: str
    values: Mapping[str, float | None]  # by the paper's names; means over runs
    quality: float | None
    score: float | None  # weighted harmonic mean of the normalised values, 0 to 1; None without a normalised value
    worst_in: tuple[str, ...]  # metrics with the normalised value 0: they make the paper's score 0
    next_outcomes: Mapping[str, int] | None  # this against the next configuration: number of quantities by outcome
    in_doubt: tuple[str, ...] = ()  # metrics that depend on a failed check of the audit


class Leaderboard(NamedTuple):
    """The configurations of one kind of parameters, the best first."""

    parameters_kind: str
    simulated: bool  # whether the devices are simulated
    standings: Sequence[Standing]
    scored: Sequence[str]  # metrics in the score
    not_scored: Mapping[str, str]  # metrics that are not in the score, with the reason


def weights_of(texts: Sequence[str]) -> dict[str, float]:
    """Return weights from texts such as ``AEC=2``; other metrics have the weight 1.

    Raises:
        ValueError: a text has another form, or names no metric.
    """
    weights = dict.fromkeys((*PAPER, MCR), 1.0)
    for text in texts:
        name, _, number = text.partition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if name not in weights or not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"{text!r} is not a weight such as AEC=2; the metrics are {', '.join(weights)}")
        weights[name] = weight
    return weights


def boards(
    sides: Sequence[Side], weights: Mapping[str, float], quality: str = "", floor: float = 0.0
) -> list[Leaderboard]:
    """Return one board for each kind of parameters, and for simulated devices: these are never in one table.

    Args:
        sides: the configurations.
        weights: by the paper's names.
        quality: a tag, fact or column; larger is better.
        floor: smallest normalised value; 0 is the paper's.

    Raises:
        UnreadableRun: a configuration has runs with different kinds of parameters, or also of simulated devices.
    """
    kinds: dict[tuple[str, bool], list[Side]] = {}
    for side in sides:
        simulated = {run.row.get("simulated") is True for run in side.runs}
        if len(simulated) > 1:
            raise UnreadableRun(f"{side.name} has runs of simulated devices beside others")
        of_side = {str(run.row.get("parameters_kind") or "unknown") for run in side.runs}
        if len(of_side) > 1:
            raise UnreadableRun(
                f"{side.name} has runs with different kinds of parameters: {', '.join(sorted(of_side))}"
            )
        kinds.setdefault((of_side.pop(), simulated.pop()), []).append(side)
    return [_board(kind, kinds[kind], weights, quality, floor) for kind in sorted(kinds)]


def normalised(values: Sequence[float], *, higher_is_better: bool) -> list[float] | None:
    """Return values between 0 (worst) and 1 (best), equations 10 and 11; ``None`` if all are equal."""
    low, high = min(values), max(values)
    if not high > low:
        return None
    shares = [(value - low) / (high - low) for value in values]
    return shares if higher_is_better else [1 - share for share in shares]


def harmonic_mean(shares: Sequence[float], weights: Sequence[float]) -> float | None:
    """Return the weighted harmonic mean, equation 12: 0 if any share with a weight is 0; ``None`` without weights."""
    return statistics.harmonic_mean(shares, weights) if any(weights) else None


def mean_of(side: Side, get: Callable[[ComparedRun], float | None]) -> float | None:
    """Return the mean over the runs of a side; ``None`` if a run has no value."""
    values = [get(run) for run in side.runs]
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _board(
    kind: tuple[str, bool],
    sides: Sequence[Side],
    weights: Mapping[str, float],
    quality: str,
    floor: float,
) -> Leaderboard:
    known = {metric.name: metric for metric in compared_metrics(PAPER.values())}
    metrics = {name: known[of] for name, of in PAPER.items()}
    values: dict[str, list[float | None]] = {
        name: [mean_of(side, lambda run, column=metric.column: run.value(column)) for side in sides]  # type: ignore[misc]
        for name, metric in metrics.items()
    }
    values[MCR] = [mean_of(side, compression) for side in sides]
    doubts = [_in_doubt(side, metrics) for side in sides]
    shares, not_scored = _shares(values, metrics, sides, {name for one in doubts for name in one})
    not_scored |= {name: "its weight is 0" for name in shares if not weights[name]}
    scored = [name for name in shares if name not in not_scored]
    standings: list[tuple[tuple[float, float], Standing]] = []
    for at, side in enumerate(sides):
        own = [max(shares[name][at], floor) for name in scored]
        worst = tuple(name for name, share in zip(scored, own, strict=True) if share <= 0)
        score = harmonic_mean(own, [weights[name] for name in scored])
        found = {name: column[at] for name, column in values.items()}
        # Configurations with the same score are in the order of their mean normalised values.
        order = (
            -1.0 if score is None else score,
            sum(share * weights[name] for share, name in zip(own, scored, strict=True)),
        )
        standing = Standing(side, kind[0], found, mean_of(side, _quality(quality)), score, worst, None, doubts[at])
        standings.append((order, standing))
    best_first = [one for _, one in sorted(standings, key=lambda pair: pair[0], reverse=True)]
    return Leaderboard(*kind, _with_outcomes(best_first, list(known.values())), scored, not_scored)


def _shares(
    values: Mapping[str, Sequence[float | None]],
    metrics: Mapping[str, ComparedMetric],
    sides: Sequence[Side],
    in_doubt: Collection[str],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the normalised values of the metrics that can be scored, and the reasons of the others."""
    shares, not_scored = {}, {}
    for name, column in values.items():
        known = [value for value in column if value is not None]
        if not known:
            continue
        higher = metrics[name].higher_is_better if name in metrics else True
        scopes = {run.row.get("energy_scope") for side in sides for run in side.runs}
        if len(known) < len(column):
            not_scored[name] = f"not measured in {len(column) - len(known)} of {len(column)} configurations"
        elif name in in_doubt:
            not_scored[name] = "a check of the counts failed, on which it depends (effllm inspect)"
        elif name == "AEC" and len(scopes) > 1:
            not_scored[name] = "the power scopes differ"
        elif (found := normalised(known, higher_is_better=higher)) is None:
            not_scored[name] = "the same in all configurations"
        else:
            shares[name] = found
    return shares, not_scored


def _in_doubt(side: Side, metrics: Mapping[str, ComparedMetric]) -> tuple[str, ...]:
    return tuple(name for name, one in metrics.items() if any(one.column in run.doubts for run in side.runs))


def _with_outcomes(standings: Sequence[Standing], metrics: Sequence[ComparedMetric]) -> list[Standing]:
    found = []
    for one, following in zip(standings, [*standings[1:], None], strict=True):
        counts = None
        if following is not None:
            rows = compare(following.side, one.side, metrics, comparisons=len(standings) - 1)
            counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in OUTCOMES}
        found.append(one._replace(next_outcomes=counts))
    return found


def compression(run: ComparedRun) -> float | None:
    """Return MCR (equation 9) of a run of a compressed model; ``None`` without the facts."""
    numbers = [number for name in COMPRESSION_FACTS if (number := float_or_none(run.facts.get(name))) is not None]
    if len(numbers) < len(COMPRESSION_FACTS):
        return None
    try:
        return model_compression_ratio(*numbers)
    except ValueError:
        return None


def _quality(name: str) -> Callable[[ComparedRun], float | None]:
    def get(run: ComparedRun) -> float | None:
        sources = (run.tags, run.facts, run.row.get("other_metrics") or {}, run.row)
        text = next((source[name] for source in sources if name in source), None) if name else None
        try:
            return float(text) if isinstance(text, (str, int, float)) else None
        except ValueError:
            return None

    return get
