"""Metrics of device memory and device state, of clocks and stalls, and of the cost of measuring."""

from __future__ import annotations

from effllm.metrics.table import GB, measured_quotient, metric
from effllm.records.job import ClusterTotals


@metric("GB", group="memory", bases=("run",))
def peak_gb(totals: ClusterTotals) -> float | None:
    """Largest memory reading on any device, run to date."""
    return measured_quotient(totals.devices.memory_peak_bytes, GB)


@metric("GB", group="memory", bases=("window",))
def smallest_mean_gb(totals: ClusterTotals) -> float | None:
    """Smallest mean memory of a device in the window."""
    return measured_quotient(totals.devices.memory_min_bytes, GB)


@metric("GB", group="memory", bases=("window",))
def largest_mean_gb(totals: ClusterTotals) -> float | None:
    """Largest mean memory of a device in the window."""
    return measured_quotient(totals.devices.memory_max_bytes, GB)


@metric("ratio", group="health", bases=("window",))
def least_utilization_ratio(totals: ClusterTotals) -> float | None:
    """Utilization of the least busy device in the window."""
    return totals.devices.utilization_min


@metric("ratio", group="health", bases=("window",))
def throttled_ratio(totals: ClusterTotals) -> float | None:
    """Share of GPU time in which heat or the board lowered a clock; time at the power limit is not counted."""
    return measured_quotient(totals.devices.throttled_s, totals.devices.throttle_covered_s)


@metric("degC", group="health", bases=("window",))
def hottest_c(totals: ClusterTotals) -> float | None:
    """Highest temperature reading of any GPU in the window."""
    return totals.devices.temperature_max_c


@metric("MHz", group="health", bases=("window",))
def sm_clock_mhz(totals: ClusterTotals) -> float | None:
    """Clock of the streaming multiprocessors, mean over the window and over GPUs."""
    return None if totals.devices.sm_clock_hz is None else totals.devices.sm_clock_hz / 1e6


@metric("ratio", group="health", bases=("window",))
def sm_activity_ratio(totals: ClusterTotals) -> float | None:
    """Mean share of busy SMs (GPM, Hopper and later). Utilization only shows whether any kernel was running."""
    return totals.devices.sm_activity


@metric("ratio", group="health", bases=("window",))
def tensor_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of time in which tensor cores were busy (GPM, Hopper and later)."""
    return totals.devices.tensor_activity


@metric("ratio", group="health", bases=("window",))
def dram_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of the memory's bandwidth in use (GPM, Hopper and later)."""
    return totals.devices.dram_activity


@metric("s", group="health", bases=("job",))
def stalled_s(totals: ClusterTotals) -> float | None:
    """Time during which no rank made progress; updated while the stall lasts."""
    return totals.health.stalled_s


@metric("ratio", group="health", bases=("job",), chart=False)
def agent_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the agents divided by the elapsed time of their ranks: mean share of a core per agent."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.agents_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", group="health", bases=("job",), chart=False)
def recorder_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds in recorder calls divided by the ranks' elapsed time; a call's cost is measured at the start."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.recorder_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", group="health", bases=("job",), chart=False)
def aggregator_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the aggregator and its sinks divided by the elapsed time: share of one core."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.aggregator_cpu_s, totals.goodput.elapsed_s)


@metric("bytes/s", group="health", bases=("job",), chart=False)
def sent_bytes_per_second(totals: ClusterTotals) -> float | None:
    """Sent bytes of an agent per second of elapsed time, mean over ranks."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.sent_bytes, totals.goodput.rank_seconds)
