"""All metrics. A metric is a function from the totals of the cluster to a number, or to ``None`` if not measured.

The name of the function is the name of the metric, its docstring is the help text, and its decorator has the unit.
Console, TensorBoard, run folder and command line use `METRICS`.

Definitions: EfficientLLM, arXiv 2505.13840, section 5.1, equations 1 to 12; docs/metrics.md has
the definitions for a cluster.
"""

# All outputs list the metrics in the order of these imports.
# isort: off
from effllm.metrics import table, energy, throughput, health
from effllm.metrics.table import METRICS, Formula, Metric, contract_metrics, metric, metric_of_tag
from effllm.metrics.table import errors, summary_values, window_values

# isort: on

__all__ = [
    "METRICS",
    "Formula",
    "Metric",
    "contract_metrics",
    "energy",
    "errors",
    "health",
    "metric",
    "metric_of_tag",
    "summary_values",
    "table",
    "throughput",
    "window_values",
]
