"""The values that the aggregator publishes to the training processes, besides those of the contract.

The training adds them to its own calls of a tracker, such as W&B. Standard library only.
"""

from __future__ import annotations

#: Tag of the number of values that depend on a failed check of the audit; it has no value while all checks hold.
DOUBTFUL = "health/doubtful_values"

#: Tag of reports -> (key in a tracker, factor of the value). The keys are the tags in TensorBoard, except for kWh.
TRACKED: dict[str, tuple[str, float]] = {
    "throughput/tokens_per_second_per_gpu": ("efficientllm-at-a-glance/tokens_per_second_per_gpu", 1.0),
    "throughput/mfu_ratio": ("efficientllm-at-a-glance/mfu_ratio", 1.0),
    "energy/joules_per_token": ("efficientllm-at-a-glance/joules_per_token", 1.0),
    "energy/total_joules": ("efficientllm-at-a-glance/energy_kwh", 1 / 3.6e6),
    "throughput/data_wait_ratio": ("efficientllm-throughput/data_wait_ratio", 1.0),
    "goodput/ratio": ("efficientllm-at-a-glance/goodput_ratio", 1.0),
    DOUBTFUL: ("efficientllm-health/doubtful_values", 1.0),
}
