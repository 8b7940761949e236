"""Names of metrics in outputs: in base units, and as charts of TensorBoard."""

from __future__ import annotations

from effllm.metrics.table import Metric, describe
from effllm.records.board import GROUP

#: Base units, which readers of some outputs expect: unit -> (word in the metric's name, replacement, factor).
UNITS: dict[str, tuple[str, str, float]] = {
    "GB": ("gb", "bytes", 1e9),
    "GiB": ("gb", "bytes", 2.0**30),
    "MHz": ("mhz", "hertz", 1e6),
    "TFLOP/s": ("tflops", "flops_per_second", 1e12),
    "degC": ("c", "celsius", 1.0),
    "kg CO2e": ("kg", "grams", 1000.0),
    "Wh": ("wh", "joules", 3600.0),
    "s": ("s", "seconds", 1.0),
}

#: Unit of a metric -> the unit of its value in base units, in UCUM's notation (ucum.org); in braces are annotations.
UCUM: dict[str, str] = {
    "GB": "By",
    "GiB": "By",
    "MHz": "Hz",
    "TFLOP/s": "{flop}/s",
    "degC": "Cel",
    "kg CO2e": "g",
    "Wh": "J",
    "s": "s",
    "J": "J",
    "W": "W",
    "ratio": "1",
    "s/iteration": "s/{iteration}",
    "tokens/s": "{token}/s",
    "tokens/parameter/s": "{token}/{parameter}/s",
    "samples/s": "{sample}/s",
    "samples/parameter/s": "{sample}/{parameter}/s",
    "J/token": "J/{token}",
}


def name_of(entry: Metric) -> tuple[str, float]:
    """Return a metric's name in base units, and the factor of its values."""
    word, base, factor = UNITS.get(entry.unit, ("", "", 1.0))
    words = [base if base and part == word else part for part in entry.name.split("_")]
    return "_".join([entry.group, *words] if entry.group else words), factor


#: TensorBoard makes a group of all tags with the same first path element, and sorts the groups by their characters, so
#: that a capital letter is before "efficientllm".  The values that most people look for are in the first group; the
#: metrics of the contract are in the next one.
FIRST, CONTRACT = GROUP, "efficientllm"
#: Tag of reports -> name in the group `FIRST`.
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
    """Return the TensorBoard tag of a tag of reports.

    >>> chart_tag("amu_gb"), chart_tag("health/hottest_c"), chart_tag("throughput/mfu_ratio")
    ('efficientllm/amu_gb', 'efficientllm-health/hottest_c', 'EffLLM/mfu')
    """
    if tag in AT_A_GLANCE:
        return f"{FIRST}/{AT_A_GLANCE[tag]}"
    return f"{CONTRACT}-{tag}" if "/" in tag else f"{CONTRACT}/{tag}"


def has_chart(tag: str) -> bool:
    """Whether a tag of reports is shown in TensorBoard: a metric has one chart, those of the contract for the run."""
    entry = describe(tag)
    return entry is None or (entry.chart and tag == entry.tag(entry.bases[0] if entry.group else "run"))
