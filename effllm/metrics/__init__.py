"""Every metric, one function each: totals of the cluster in, a number or ``None`` (not measured) out.

A function's name is the name and the TensorBoard tag of its metric, its docstring the help text; its decorator has the
unit.  Console, TensorBoard, run folder and command line all use `METRICS`.

Definitions: EfficientLLM, arXiv 2505.13840, section 5.1, equations 1 to 12; docs/metrics.md extends them to a cluster.
"""

# Every output has the metrics in the order of these imports.
# isort: off
from effllm.metrics import contract, energy, throughput, health, goodput

# isort: on
from effllm.metrics.evaluation import errors, evaluate, evaluate_run
from effllm.metrics.table import METRICS, Formula, Metric, describe, headline, metric

__all__ = [
    "METRICS",
    "Formula",
    "Metric",
    "contract",
    "describe",
    "energy",
    "errors",
    "evaluate",
    "evaluate_run",
    "goodput",
    "headline",
    "health",
    "metric",
    "throughput",
]
