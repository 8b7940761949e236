"""What differs between the sides of a comparison: unfair differences, and all other settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from effllm.analysis.sides import CAMPAIGN, CONFIGURATION, REPEAT, ComparedRun, Side
from effllm.records.plain_text import one_line

#: Mean iterations, and mean SM clocks, that differ by at most this share are alike.
ALIKE, ALIKE_CLOCK = 0.10, 0.03
MAX_SHOWN = 120

_COLUMNS = {
    "GPU model": "gpu_models",
    "boards": "device_keys",
    "hosts": "hosts",
    "driver": "drivers",
    "power limit": "gpu_power_limits_w",
    "power profile": "gpu_power_profiles",
    "ranks": "world_size",
    "GPUs": "gpus_expected",
    "parameters": "parameters",
    "parameter kind": "parameters_kind",
    "power scope": "energy_scope",
    "source of the energy": "energy_method",
    "simulated devices": "simulated",
    "status": "status",
}
#: Facts that are unfair if they differ.
_FACTS = (
    "sequence_length",
    "global_batch_size",
    "micro_batch_size",
    "per_device_batch_size",
    "gradient_accumulation_steps",
    "batch_size",
    "precision",
)
#: Facts, and fields of the config, that are no settings of the training: their differences are not shown as such.
_NO_SETTINGS = {"job", "command", "aggregator_host", "kernel", "cpus", "style", "name", "pid", "schema_version"}
_NO_CONFIG = {"run_name", "run_dir", "tags", "endpoint", "secret_file"}


class Dissimilarity(NamedTuple):
    """A difference between two sides that is not a measured value."""

    name: str
    a: str
    b: str


def unfair_differences(a: Side, b: Side) -> list[Dissimilarity]:
    """Return the differences that can explain a measured difference without the configuration."""
    differences = [
        _unlike_means("iterations", a, b, lambda run: run.value("iterations"), share=ALIKE),
        _unlike_means("coverage of the energy", a, b, lambda run: run.value("energy_iterations_coverage"), share=0.001),
        _unlike_means("coverage of the ranks", a, b, _reporting_share, share=0.001),
        _unlike_means("SM clock (MHz)", a, b, lambda run: run.value("run_health_sm_clock_mhz"), share=ALIKE_CLOCK),
        _unlike_means("losses not finite", a, b, lambda run: run.value("losses_not_finite") or 0.0),
        _several_configurations(a, b),
    ]
    return [*_unlike_values(a, b, _conditions), *(difference for difference in differences if difference)]


def setting_differences(a: Side, b: Side) -> list[Dissimilarity]:
    """Return the other differences of tags, commits, packages, facts and settings: often the object of a comparison."""
    return _unlike_values(a, b, _settings)


def board_sets(side: Side) -> set[tuple[str, ...]]:
    """Return the sets of boards on which the runs of a side ran."""
    return {tuple(run.row.get("device_keys") or ()) for run in side.runs}


def _unlike_values(a: Side, b: Side, values: Callable[[ComparedRun], Mapping[str, Any]]) -> list[Dissimilarity]:
    """Return the named values whose sets differ between the runs of the sides."""
    per_side = [[values(run) for run in side.runs] for side in (a, b)]
    differences = []
    for name in dict.fromkeys(name for side in per_side for of_run in side for name in of_run):
        texts = [sorted({_text(of_run.get(name)) for of_run in side}) for side in per_side]
        if texts[0] != texts[1]:
            differences.append(Dissimilarity(name, _shown(texts[0]), _shown(texts[1])))
    return differences


def _conditions(run: ComparedRun) -> dict[str, Any]:
    values = {name: run.row.get(column) for name, column in _COLUMNS.items()}
    values |= {name.replace("_", " "): run.facts.get(name) for name in _FACTS}
    return values | {"warm-up": _config(run).get("warmup")}


def _settings(run: ComparedRun) -> dict[str, Any]:
    facts = {name: value for name, value in run.facts.items() if name not in _NO_SETTINGS and name not in _FACTS}
    values: dict[str, Any] = {
        f"tag {name}": value or name for name, value in run.tags.items() if name not in (CAMPAIGN, REPEAT)
    }
    values |= {name: run.row.get(name) for name in ("model", "git_commit", "git_dirty", "launcher", "user")}
    values |= {f"package {name}": version for name, version in (run.row.get("packages") or {}).items()}
    values |= {name: value for name, value in facts.items() if isinstance(value, (str, int, float, bool))}
    return values | {f"setting {name}": value for name, value in _config(run).items() if name not in _NO_CONFIG}


def _config(run: ComparedRun) -> Mapping[str, Any]:
    config = run.row.get("config")
    return config if isinstance(config, dict) else {}


def _reporting_share(run: ComparedRun) -> float | None:
    expected, reporting = run.value("ranks_expected"), run.value("ranks_reporting")
    return reporting / expected if expected and reporting is not None else None


def _several_configurations(a: Side, b: Side) -> Dissimilarity | None:
    """Return the configurations of campaigns if a side has several: their difference is in the spread of the side."""
    texts = [sorted({name for run in side.runs if (name := run.tags.get(CONFIGURATION))}) for side in (a, b)]
    if max(map(len, texts)) < 2:
        return None
    a_text, b_text = (_shown(text) or "none" for text in texts)
    return Dissimilarity("several configurations on a side", a_text, b_text)


def _unlike_means(
    name: str, a: Side, b: Side, get: Callable[[ComparedRun], float | None], share: float = 0.0
) -> Dissimilarity | None:
    """Return the means if they differ by more than a share of the larger one, or if only one side has values."""
    sides = [[value for run in side.runs if (value := get(run)) is not None] for side in (a, b)]
    means = [fmean(values) for values in sides if values]
    if not means or (len(means) == 2 and abs(means[0] - means[1]) <= share * max(map(abs, means))):
        return None
    a_text, b_text = (f"{fmean(values):.4g}" if values else "unknown" for values in sides)
    return Dissimilarity(name, a_text, b_text)


def _text(value: Any) -> str:
    if value is None or value in ("", []):
        return "unknown"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value) if isinstance(value, (str, int, float)) else json.dumps(value, default=str)


def _shown(texts: Sequence[str]) -> str:
    text = one_line(" | ".join(texts))
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
