"""The metrics of comparisons, each with its better direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from effllm.analysis.runs_table import column_of
from effllm.metrics import METRICS

HIGHER, LOWER = True, False
LOSS = "loss"

#: Metrics in the order of the table: name -> (name in METRICS, whether a higher value is better).
_RATES: dict[str, tuple[str, bool]] = {
    "tokens_per_second": ("tokens_per_second", HIGHER),
    "tokens_per_second_per_gpu": ("tokens_per_second_per_gpu", HIGHER),
    "samples_per_second": ("samples_per_second", HIGHER),
    "seconds_per_iteration": ("seconds_per_iteration", LOWER),
    "mfu_ratio": ("mfu_ratio", HIGHER),
    "joules_per_token": ("joules_per_token", LOWER),
    "joules_per_sample": ("joules_per_sample", LOWER),
    "amu_gb": ("amu_gb", LOWER),
    "pcu_ratio": ("pcu_ratio", HIGHER),
    "al_seconds": ("al_seconds", LOWER),
    "tt_tokens_per_param_per_sec": ("tt_tokens_per_param_per_sec", HIGHER),
    "st_samples_per_param_per_sec": ("st_samples_per_param_per_sec", HIGHER),
    "it_tokens_per_sec": ("it_tokens_per_sec", HIGHER),
    "aec_watts": ("aec_watts", LOWER),
    "peak_gb": ("peak_gb", LOWER),
    "data_wait_ratio": ("data_wait_ratio", LOWER),
    "exposed_communication_ratio": ("exposed_communication_ratio", LOWER),
    "padding_ratio": ("padding_ratio", LOWER),
    "goodput_ratio": ("ratio", HIGHER),
    LOSS: (LOSS, LOWER),
}
#: Metrics that are compared only by name: they depend on the length of a run, or repeat another metric.
_BY_NAME: dict[str, tuple[str, bool]] = {
    "hfu_ratio": ("hfu_ratio", HIGHER),
    "tflops_per_gpu": ("tflops_per_gpu", HIGHER),
    "watts_per_gpu": ("watts_per_gpu", LOWER),
    "joules_per_iteration": ("joules_per_iteration", LOWER),
    "joules_per_generated_token": ("joules_per_generated_token", LOWER),
    "tokens_per_joule": ("tokens_per_joule", HIGHER),
    "total_joules": ("total_joules", LOWER),
    "co2_kg": ("co2_kg", LOWER),
    "electricity_cost": ("electricity_cost", LOWER),
    "gpu_cost": ("gpu_cost", LOWER),
    "throttled_ratio": ("throttled_ratio", LOWER),
    "waiting_ratio": ("waiting_ratio", LOWER),
    "startup_ratio": ("startup_ratio", LOWER),
    "redone_ratio": ("redone_ratio", LOWER),
}
_PER_PARAMETER = ("tt_tokens_per_param_per_sec", "st_samples_per_param_per_sec")


class ComparedMetric(NamedTuple):
    """A metric of a comparison."""

    name: str
    column: str  # in the table `runs`
    window_tag: str | None  # in windows-*.jsonl
    unit: str
    higher_is_better: bool

    @property
    def is_per_parameter(self) -> bool:
        return self.name in _PER_PARAMETER

    @property
    def is_energy(self) -> bool:
        """Whether the metric depends on the power scope."""
        words = ("joules", "watts", "co2", "electricity")
        return any(word in self.name for word in words) and self.name != "watts_per_gpu"


def compared_metrics(names: Sequence[str] = ()) -> list[ComparedMetric]:
    """Return the metrics with these names, or the metrics of the table.

    Raises:
        ValueError: a metric has no better direction, or there is no such metric.
    """
    known = {**_RATES, **_BY_NAME}
    for name in names:
        if name not in known:
            reason = "has no better direction" if name in METRICS else "is not a metric"
            raise ValueError(f"{name} {reason}; the metrics of comparisons are {', '.join(known)}")
    return [_metric(name, *known[name]) for name in dict.fromkeys(names or _RATES)]


def all_metrics() -> list[ComparedMetric]:
    """Return all metrics of comparisons, also those that are compared only by name."""
    return compared_metrics([*_RATES, *_BY_NAME])


def _metric(name: str, key: str, higher_is_better: bool) -> ComparedMetric:
    if name == LOSS:
        return ComparedMetric(name, "loss", None, "", higher_is_better)
    entry = METRICS[key]
    in_windows = "window" in entry.bases and entry.in_windows
    column = column_of(entry.tag(entry.run_bases[0]))
    return ComparedMetric(name, column, entry.tag("window") if in_windows else None, entry.unit, higher_is_better)
