"""The metrics of comparisons, each with its quantity and its better direction."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from effllm.analysis.column import column_of
from effllm.metrics import METRICS

THROUGHPUT, LOSS = "throughput", "loss"


class _ComparedRow(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A row of compared_metrics.toml."""

    quantity: str
    better: Literal["higher", "lower"]
    compared: Literal["", "by name"] = ""  # "by name": only if the user names the metric


_TABLE = msgspec.toml.decode(Path(__file__).with_suffix(".toml").read_bytes(), type=dict[str, _ComparedRow])
PER_PARAMETER = ("tt_tokens_per_param_per_sec", "st_samples_per_param_per_sec")


class ComparedMetric(NamedTuple):
    """A metric of a comparison."""

    name: str
    quantity: str
    column: str  # in the table `runs`
    unit: str
    higher_is_better: bool

    @property
    def depends_on_power_scope(self) -> bool:
        """Whether the metric depends on the power scope."""
        words = ("joules", "watts", "co2", "electricity")
        return any(word in self.name for word in words) and self.name != "watts_per_gpu"


def compared_metrics(names: Collection[str] = ()) -> list[ComparedMetric]:
    """Return the metrics with these names, or the default table, in the order of the table."""
    for name in names:
        if name not in _TABLE:
            reason = "has no better direction" if name in METRICS else "is not a metric"
            raise ValueError(f"{name} {reason}; the metrics of comparisons are {', '.join(_TABLE)}")
    return [_compared_metric(name) for name, row in _TABLE.items() if (name in names if names else not row.compared)]


def _compared_metric(name: str) -> ComparedMetric:
    quantity, is_higher_better = _TABLE[name].quantity, _TABLE[name].better == "higher"
    if name == LOSS:
        return ComparedMetric(name, quantity, "loss", "", is_higher_better)
    entry = METRICS["ratio" if name == "goodput_ratio" else name]  # METRICS has it as ratio of the group goodput
    return ComparedMetric(name, quantity, column_of(entry.tag(entry.summary_bases[0])), entry.unit, is_higher_better)
