"""The TensorBoard tags of metrics.  TensorBoard makes a group of all tags with the same first path element.

The contract's metrics are in the first group, ``efficientllm``; the values that most people look for are in the second.
Groups are in alphabetical order.
"""

from __future__ import annotations

from effllm.metrics.table import describe

FIRST = "efficientllm"
#: Group of the values that most people look for.
GLANCE = "at-a-glance"
#: Tag of a metric -> name in the group `GLANCE`.
AT_A_GLANCE = {
    "goodput/ratio": "goodput_ratio",
    "energy/joules_per_token": "joules_per_token",
    "memory/peak_gb": "memory_peak_gb",
    "throughput/mfu_ratio": "mfu_ratio",
    "throughput/seconds_per_iteration": "seconds_per_iteration",
    "throughput/tokens_per_second_per_gpu": "tokens_per_second_per_gpu",
    "energy/watts_per_gpu": "watts_per_gpu",
}


def chart_tag(tag: str) -> str:
    """Return the TensorBoard tag of a tag of reports.

    >>> chart_tag("amu_gb"), chart_tag("window/amu_gb")
    ('efficientllm/amu_gb', 'efficientllm-window/amu_gb')
    >>> chart_tag("health/hottest_c"), chart_tag("goodput/ratio")
    ('efficientllm-health/hottest_c', 'efficientllm-at-a-glance/goodput_ratio')
    """
    if tag in AT_A_GLANCE:
        return f"{FIRST}-{GLANCE}/{AT_A_GLANCE[tag]}"
    return f"{FIRST}-{tag}" if "/" in tag else f"{FIRST}/{tag}"


def has_chart(tag: str) -> bool:
    """Whether a tag of reports is shown in TensorBoard.

    The whole wall time differs little from the run to date, so metrics of the contract have no chart on the base job.
    """
    entry = describe(tag)
    if entry is None:
        return True
    bases = entry.bases[:1] if entry.group else ("run", "window")
    return entry.chart and tag in {entry.tag(base) for base in bases}
