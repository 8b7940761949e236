"""Names of metrics in outputs: in base units, and as charts of TensorBoard."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from effllm.metrics.table import Metric, metric_of_tag
from effllm.records.board import GROUP


class Unit(Struct, frozen=True, forbid_unknown_fields=True):
    """A unit of metrics: its text in UCUM's notation, and the base unit that readers of some outputs expect."""

    ucum: str
    word: str = ""  # in the metric's name, which `base` replaces
    base: str = ""
    factor: float = 1.0  # of values


UNITS = msgspec.toml.decode(Path(__file__).with_name("units.toml").read_bytes(), type=dict[str, Unit])


def unit_of(entry: Metric) -> Unit:
    """Return the unit of a metric; a unit that is not in the table is a word, which UCUM writes in braces."""
    return UNITS.get(entry.unit, Unit(f"{{{entry.unit}}}"))


def base_unit_name(entry: Metric) -> tuple[str, float]:
    """Return a metric's name with its base unit, and the factor that converts its values to this unit."""
    unit = unit_of(entry)
    words = [unit.base if part == unit.word else part for part in entry.name.split("_")]
    return "_".join([entry.group, *words] if entry.group else words), unit.factor


#: TensorBoard makes a group of all tags with the same first path element, and sorts the groups by their characters, so
#: that this group, with a capital letter and the values that most people look for, is before those of the prefix.
GLANCE_GROUP, PREFIX = GROUP, "efficientllm"
#: Tag of reports -> name in the group `GLANCE_GROUP`.
AT_A_GLANCE = {
    "training/loss": "loss",
    "throughput/tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "throughput/mfu_ratio": "mfu",
    "energy/joules_per_token": "joules_per_token",
    "energy/watts_per_gpu": "watts_per_gpu",
    "throughput/data_wait_ratio": "data_wait",
    "straggler/p50_step_seconds": "step_p50_seconds",
    "straggler/p95_step_seconds": "step_p95_seconds",
}


def chart_tag(tag: str) -> str:
    """Return the name under which TensorBoard, MLflow and `effllm explain` show a tag of reports.

    >>> chart_tag("amu_gb"), chart_tag("health/hottest_c"), chart_tag("throughput/mfu_ratio")
    ('efficientllm/amu_gb', 'efficientllm-health/hottest_c', 'EffLLM/mfu')
    """
    if tag in AT_A_GLANCE:
        return f"{GLANCE_GROUP}/{AT_A_GLANCE[tag]}"
    return f"{PREFIX}-{tag}" if "/" in tag else f"{PREFIX}/{tag}"


def has_chart(tag: str) -> bool:
    """Whether a tag has a chart: of a metric, only the tag of its first base, or of the run if it has no group."""
    entry = metric_of_tag(tag)
    return entry is None or (entry.chart and tag == entry.tag(entry.bases[0] if entry.group else "run"))
