"""The charts of a report: which curves, in which unit."""

from __future__ import annotations

from typing import NamedTuple

from effllm.analysis.window_curves import LOSS, spread_tag
from effllm.records.job import GPU_WATTS, STEP_SECONDS, UTILIZATION_RATIO

J_PER_KWH = 3.6e6


class Line(NamedTuple):
    """A curve of a chart."""

    tag: str
    label: str


class Chart(NamedTuple):
    """A chart over the iterations; with several runs, each run has only the first line."""

    title: str
    unit: str
    factor: float  # from the base unit of the curves to the unit of the chart
    lines: tuple[Line, ...]
    instead: tuple[Line, ...] = ()  # for runs without the first line: no GPUs, or no count of tokens
    note: str = ""


def _spread(name: str, **labels: str) -> tuple[Line, ...]:
    return tuple(Line(spread_tag(name, field), label) for field, label in labels.items())


CHARTS = (
    Chart(
        "Throughput", "tokens/s per GPU", 1.0,
        (Line("throughput/tokens_per_second_per_gpu", "tokens/s per GPU"),),
        note="Per rank, if the job has no GPUs.",
    ),
    Chart("Samples", "samples/s", 1.0, (Line("throughput/samples_per_second", "samples/s of the job"),)),
    Chart(
        "Step time", "s", 1.0,
        _spread(STEP_SECONDS, most="slowest rank", p95="95th percentile of ranks", median="median of ranks",
                p5="5th percentile of ranks"),
        note="Mean step time of a rank in each window; exact percentiles over all ranks.",
    ),
    Chart(
        "Waiting", "% of iteration time", 100.0,
        (
            Line("throughput/data_wait_ratio", "data wait"),
            Line("straggler/waiting_ratio", "wait for stragglers"),
            Line("throughput/exposed_communication_ratio", "exposed communication"),
        ),
    ),
    Chart(
        "FLOPs utilization", "%", 100.0,
        (Line("throughput/mfu_ratio", "MFU"), Line("throughput/hfu_ratio", "HFU")),
    ),
    Chart(
        "Memory", "GB (2^30 bytes)", 1.0,
        (
            Line("window/amu_gb", "mean of devices"),
            Line("memory/largest_mean_gb", "fullest device"),
            Line("memory/smallest_mean_gb", "emptiest device"),
            Line("memory/peak_gb", "peak so far"),
        ),
    ),
    Chart(
        "Utilization", "%", 100.0,
        _spread(UTILIZATION_RATIO, median="median of GPUs", most="busiest GPU", p5="5th percentile of GPUs",
                least="least busy GPU"),
        (Line("window/pcu_ratio", "mean of devices"),),
        "Share of time in which a kernel was running; it does not show how well the kernel uses the GPU.",
    ),
    Chart(
        "Activity inside the GPU", "%", 100.0,
        (
            Line("health/sm_activity_ratio", "SMs"),
            Line("health/tensor_activity_ratio", "tensor cores"),
            Line("health/dram_activity_ratio", "memory bandwidth"),
        ),
    ),
    Chart(
        "Power", "W per GPU", 1.0,
        (
            Line("energy/watts_per_gpu", "mean"),
            *_spread(GPU_WATTS, most="highest GPU", median="median of GPUs", least="lowest GPU"),
        ),
        (Line("window/aec_watts", "whole job"),),
    ),
    Chart(
        "Energy per token", "J/token", 1.0,
        (Line("energy/joules_per_token", "this window"), Line("run_energy/joules_per_token", "run to date")),
        (Line("energy/joules_per_iteration", "J per iteration"),),
    ),
    Chart("Energy so far", "kWh", 1 / J_PER_KWH, (Line("energy/measured_joules", "measured energy"),)),
    Chart("SM clock", "MHz", 1.0, (Line("health/sm_clock_mhz", "mean of GPUs"),)),
    Chart("Temperature", "°C", 1.0, (Line("health/hottest_c", "hottest GPU"),)),
    Chart("Loss", "", 1.0, (Line(LOSS, "loss"),)),
    Chart(
        "Goodput", "% of elapsed time so far", 100.0,
        (Line("goodput/ratio", "goodput"),),
    ),
)  # fmt: skip

#: The tags of all curves.
TAGS = tuple(dict.fromkeys(line.tag for chart in CHARTS for line in (*chart.lines, *chart.instead)))
