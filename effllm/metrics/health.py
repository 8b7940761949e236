"""Metrics of device memory and state, of clocks and stalls, of the cost of measuring, and of elapsed time by class.

The classes of time are defined in docs/goodput.md.
"""

from __future__ import annotations

from effllm.metrics.table import GB, measured_quotient, metric, no_error, quotient
from effllm.records.job import ClusterTotals


@metric("GB", needs=("memory",), group="memory", bases=("run",))
def peak_gb(totals: ClusterTotals) -> float | None:
    """Largest memory reading on any device, run to date."""
    return measured_quotient(totals.devices.memory_peak_bytes, GB)


@metric("GB", needs=("memory",), group="memory", bases=("window",))
def smallest_mean_gb(totals: ClusterTotals) -> float | None:
    """Smallest mean memory of a device in the window."""
    return measured_quotient(totals.devices.memory_min_bytes, GB)


@metric("GB", needs=("memory",), group="memory", bases=("window",))
def largest_mean_gb(totals: ClusterTotals) -> float | None:
    """Largest mean memory of a device in the window."""
    return measured_quotient(totals.devices.memory_max_bytes, GB)


@metric("ratio", needs=("utilization",), group="health", bases=("window",))
def least_utilization_ratio(totals: ClusterTotals) -> float | None:
    """Utilization of the least busy device in the window."""
    return totals.devices.utilization_min


@metric("ratio", needs=("gpu", "throttling"), group="health", bases=("window",))
def throttled_ratio(totals: ClusterTotals) -> float | None:
    """Share of GPU time in which heat or the board lowered a clock; time at the power limit is not counted."""
    return measured_quotient(totals.devices.throttled_s, totals.devices.throttle_covered_s)


@metric("degC", needs=("gpu", "temperature"), group="health", bases=("window",))
def hottest_c(totals: ClusterTotals) -> float | None:
    """Highest temperature reading of any GPU in the window."""
    return totals.devices.temperature_max_c


@metric("MHz", needs=("gpu", "clocks"), group="health", bases=("window",))
def sm_clock_mhz(totals: ClusterTotals) -> float | None:
    """Clock of the streaming multiprocessors, mean over the window and over GPUs."""
    return None if totals.devices.sm_clock_hz is None else totals.devices.sm_clock_hz / 1e6


@metric("ratio", needs=("gpu", "activity"), group="health", bases=("window",))
def sm_activity_ratio(totals: ClusterTotals) -> float | None:
    """Mean share of busy SMs (GPM, Hopper and later). Utilization only shows whether any kernel was running."""
    return totals.devices.sm_activity


@metric("ratio", needs=("gpu", "activity"), group="health", bases=("window",))
def tensor_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of time in which tensor cores were busy (GPM, Hopper and later)."""
    return totals.devices.tensor_activity


@metric("ratio", needs=("gpu", "activity"), group="health", bases=("window",))
def dram_activity_ratio(totals: ClusterTotals) -> float | None:
    """Share of the memory's bandwidth in use (GPM, Hopper and later)."""
    return totals.devices.dram_activity


@metric("s", needs=("stalls",), group="health", bases=("job",))
def stalled_s(totals: ClusterTotals) -> float | None:
    """Time during which no rank made progress; updated while the stall lasts."""
    return totals.health.stalled_s


@metric("ratio", needs=("elapsed time", "own cost"), group="health", bases=("job",), chart=False)
def agent_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the agents divided by the elapsed time of their ranks: mean share of a core per agent."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.agents_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", needs=("elapsed time", "own cost"), group="health", bases=("job",), chart=False)
def recorder_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds in recorder calls divided by the ranks' elapsed time; a call's cost is measured at the start."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.recorder_cpu_s, totals.goodput.rank_seconds)


@metric("ratio", needs=("elapsed time", "own cost"), group="health", bases=("job",), chart=False)
def aggregator_cpu_ratio(totals: ClusterTotals) -> float | None:
    """CPU seconds of the aggregator and its sinks divided by the elapsed time: share of one core."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.aggregator_cpu_s, totals.goodput.elapsed_s)


@metric("bytes/s", needs=("elapsed time", "own cost"), group="health", bases=("job",), chart=False)
def sent_bytes_per_second(totals: ClusterTotals) -> float | None:
    """Sent bytes of an agent per second of elapsed time, mean over ranks."""
    spent = totals.overhead
    return None if spent is None else measured_quotient(spent.sent_bytes, totals.goodput.rank_seconds)


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",))
def ratio(totals: ClusterTotals) -> float | None:
    """Goodput: share of the elapsed time of all attempts that was spent in kept iterations and in generation."""
    productive_s = sum(totals.goodput.class_s.get(name, 0.0) for name in ("kept", "generation"))
    return quotient(productive_s, totals.goodput.elapsed_s)


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",), chart=False)
def redone_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time that was spent in iterations that a restart repeated."""
    return _share_of_elapsed(totals, "redone")


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",), chart=False)
def restart_gap_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time between the end of an attempt and the beginning of the next."""
    return _share_of_elapsed(totals, "restart_gap")


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",), chart=False)
def startup_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time before the first iteration of each attempt."""
    return _share_of_elapsed(totals, "startup")


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",), chart=False)
def checkpoint_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time in checkpoints."""
    return _share_of_elapsed(totals, "checkpoint")


@metric("ratio", needs=("elapsed time",), group="goodput", bases=("job",), chart=False)
def unknown_ratio(totals: ClusterTotals) -> float | None:
    """Share of the elapsed time that no report covers."""
    return _share_of_elapsed(totals, "unknown")


@metric("J", needs=("energy",), group="goodput", bases=("job",), chart=False, error=no_error)
def lost_joules(totals: ClusterTotals) -> float | None:
    """Measured energy of lost time: repeated iterations, waits for stragglers, waits of uneven ranks, hangs."""
    lost = [totals.goodput.class_j.get(name) for name in ("redone", "straggling", "uneven_ranks", "hang")]
    return None if None in lost else sum(joules for joules in lost if joules is not None)


@metric("ranks", needs=("own time",), group="straggler", bases=("window",), chart=False)
def named_ranks(totals: ClusterTotals) -> float | None:
    """Number of reported stragglers at the end of the window; no value if no rank has a sync point."""
    return None if totals.health.straggling_s is None else float(totals.health.stragglers)


@metric("ratio", needs=("iterations", "own time"), group="straggler", bases=("window",), chart=False)
def waiting_ratio(totals: ClusterTotals) -> float | None:
    """Share of iteration time in which the job waited for reported stragglers."""
    return measured_quotient(totals.health.straggling_s, totals.loop.time_s)


@metric("GPU-s", needs=("own time",), group="straggler", bases=("job",), chart=False)
def waiting_gpu_seconds(totals: ClusterTotals) -> float | None:
    """Sum over ranks of the time in which a rank waited for reported stragglers."""
    return None if totals.health.straggling_s is None else totals.health.straggling_gpu_s


@metric("J", needs=("energy", "own time"), group="straggler", bases=("job",), chart=False, error=no_error)
def waiting_joules(totals: ClusterTotals) -> float | None:
    """Energy of devices while their ranks waited for reported stragglers, from the mean power in each window."""
    return None if totals.health.straggling_s is None else totals.health.straggling_j


def _share_of_elapsed(totals: ClusterTotals, name: str) -> float | None:
    return quotient(totals.goodput.class_s[name], totals.goodput.elapsed_s) if name in totals.goodput.class_s else None
