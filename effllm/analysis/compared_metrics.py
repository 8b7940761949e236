"""The metrics of comparisons, each with its quantity and its better direction."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from effllm.analysis.column import column_of
from effllm.metrics import METRICS

HIGHER, LOWER = True, False
THROUGHPUT, LOSS = "throughput", "loss"

#: Metrics in the order of the table: quantity, name, and whether a higher value is better. Metrics of one quantity are
#: functions of each other for one model and batch.
_TABLE = (
    (THROUGHPUT, "tokens_per_second", HIGHER),
    (THROUGHPUT, "tokens_per_second_per_gpu", HIGHER),
    (THROUGHPUT, "samples_per_second", HIGHER),
    (THROUGHPUT, "seconds_per_iteration", LOWER),
    (THROUGHPUT, "mfu_ratio", HIGHER),
    (THROUGHPUT, "hfu_ratio", HIGHER),
    (THROUGHPUT, "tflops_per_gpu", HIGHER),
    (THROUGHPUT, "tt_tokens_per_param_per_sec", HIGHER),
    (THROUGHPUT, "st_samples_per_param_per_sec", HIGHER),
    (THROUGHPUT, "al_seconds", LOWER),
    ("energy", "joules_per_token", LOWER),
    ("energy", "joules_per_sample", LOWER),
    ("energy", "joules_per_iteration", LOWER),
    ("energy", "tokens_per_joule", HIGHER),
    ("power", "aec_watts", LOWER),
    ("power", "watts_per_gpu", LOWER),
    ("memory in use", "amu_gb", LOWER),
    ("peak memory", "peak_gb", LOWER),
    ("utilization", "pcu_ratio", HIGHER),
    ("inference throughput", "it_tokens_per_sec", HIGHER),
    ("inference energy", "joules_per_generated_token", LOWER),
    ("data wait", "data_wait_ratio", LOWER),
    ("communication", "exposed_communication_ratio", LOWER),
    ("padding", "padding_ratio", LOWER),
    ("goodput", "goodput_ratio", HIGHER),
    (LOSS, LOSS, LOWER),
    ("total energy", "total_joules", LOWER),
    ("total energy", "co2_kg", LOWER),
    ("total energy", "electricity_cost", LOWER),
    ("GPU cost", "gpu_cost", LOWER),
    ("throttling", "throttled_ratio", LOWER),
    ("waiting", "waiting_ratio", LOWER),
    ("startup", "startup_ratio", LOWER),
    ("redone work", "redone_ratio", LOWER),
)
#: Metrics that are compared only by name: they depend on the length of a run, or repeat another metric.
_BY_NAME = {
    *("hfu_ratio", "tflops_per_gpu", "joules_per_iteration", "joules_per_generated_token", "tokens_per_joule"),
    *("watts_per_gpu", "total_joules", "co2_kg", "electricity_cost", "gpu_cost", "throttled_ratio", "waiting_ratio"),
    *("startup_ratio", "redone_ratio"),
}
PER_PARAMETER = ("tt_tokens_per_param_per_sec", "st_samples_per_param_per_sec")


class ComparedMetric(NamedTuple):
    """A metric of a comparison."""

    name: str
    quantity: str
    column: str  # in the table `runs`
    unit: str
    higher_is_better: bool

    @property
    def is_energy(self) -> bool:
        """Whether the metric depends on the power scope."""
        words = ("joules", "watts", "co2", "electricity")
        return any(word in self.name for word in words) and self.name != "watts_per_gpu"


def compared_metrics(names: Collection[str] = ()) -> list[ComparedMetric]:
    """Return the metrics with these names, or the default table, in the order of the table.

    Raises:
        ValueError: a metric has no better direction, or there is no such metric.
    """
    known = [name for _, name, _ in _TABLE]
    for name in names:
        if name not in known:
            reason = "has no better direction" if name in METRICS else "is not a metric"
            raise ValueError(f"{name} {reason}; the metrics of comparisons are {', '.join(known)}")
    return [_metric(*entry) for entry in _TABLE if (entry[1] in names if names else entry[1] not in _BY_NAME)]


def _metric(quantity: str, name: str, higher_is_better: bool) -> ComparedMetric:
    if name == LOSS:
        return ComparedMetric(name, quantity, "loss", "", higher_is_better)
    entry = METRICS["ratio" if name == "goodput_ratio" else name]
    return ComparedMetric(name, quantity, column_of(entry.tag(entry.run_bases[0])), entry.unit, higher_is_better)
