"""Metrics of tokens, samples, iterations and FLOPs over time."""

from __future__ import annotations

from effllm.metrics.table import al_seconds, counted_quotient, metric, quotient
from effllm.records.job import ClusterTotals


@metric("tokens/s", needs=("iterations", "tokens"), group="throughput", bases=("window",))
def tokens_per_second(totals: ClusterTotals) -> float | None:
    """Tokens of the whole job per second, without padding if the loop counts padding."""
    return counted_quotient(totals.counts.tokens, totals.loop.time_s)


@metric("tokens/s", needs=("iterations", "tokens"), group="throughput", bases=("window",))
def tokens_per_second_per_gpu(totals: ClusterTotals) -> float | None:
    """Tokens per second and GPU, or per second and rank if there are no GPUs."""
    return counted_quotient(totals.counts.tokens, totals.loop.time_s * totals.constants.devices)


@metric("samples/s", needs=("iterations", "samples"), group="throughput", bases=("window",))
def samples_per_second(totals: ClusterTotals) -> float | None:
    """Samples of the whole job per second."""
    return counted_quotient(totals.counts.samples, totals.loop.time_s)


@metric("s/iteration", needs=("iterations",), group="throughput", bases=("window",))
def seconds_per_iteration(totals: ClusterTotals) -> float | None:
    """Iteration time: data wait and step, from the end of an iteration to the end of the next iteration."""
    return quotient(totals.loop.time_s, totals.counts.iterations)


@metric("ratio", needs=("iterations",), group="throughput", bases=("window",))
def data_wait_ratio(totals: ClusterTotals) -> float | None:
    """Data wait (the time between two steps) divided by iteration time."""
    return quotient(totals.loop.wait_s, totals.loop.time_s)


@metric("ratio", needs=("profile",), group="throughput", bases=("window",))
def exposed_communication_ratio(totals: ClusterTotals) -> float | None:
    """Time with communication but without computation, divided by the time of profiled iterations, over all ranks."""
    return None if totals.profile is None else quotient(totals.profile.exposed_s, totals.profile.time_s)


@metric("s/iteration", needs=("iterations", "profile"), group="throughput", bases=("window",), chart=False)
def exposed_seconds(totals: ClusterTotals) -> float | None:
    """Part of AL that has communication without computation: AL times `exposed_communication_ratio`."""
    return _part_of_al(totals, exposed_communication_ratio(totals))


@metric("s/iteration", needs=("iterations", "profile"), group="throughput", bases=("window",), chart=False)
def computation_seconds(totals: ClusterTotals) -> float | None:
    """AL minus `exposed_seconds`. Idle time is included."""
    exposed = exposed_communication_ratio(totals)
    return None if exposed is None else _part_of_al(totals, 1.0 - exposed)


@metric("s/iteration", needs=("iterations", "profile"), group="throughput", bases=("window",), chart=False)
def communication_seconds(totals: ClusterTotals) -> float | None:
    """Part of AL with communication; a part of it overlaps with computation: do not add `computation_seconds`."""
    profile = totals.profile
    return None if profile is None else _part_of_al(totals, quotient(profile.communication_s, profile.time_s))


@metric("s/iteration", needs=("gpu", "steps on CUDA"), group="throughput", bases=("window",), chart=False)
def device_step_seconds(totals: ClusterTotals) -> float | None:
    """Step time on the CUDA device, between events on its stream; mean over steps of the slowest rank."""
    return quotient(totals.loop.device_step_s, totals.loop.device_steps)


@metric("s", needs=("profile",), group="throughput", bases=("window",), chart=False)
def profiling_seconds(totals: ClusterTotals) -> float | None:
    """Additional time of a profiled iteration for its rank: start, stop and evaluation of the profiler."""
    return None if totals.profile is None else quotient(totals.profile.cost_s, totals.profile.iterations)


@metric("ratio", needs=("tokens",), group="throughput", bases=("window",))
def padding_ratio(totals: ClusterTotals) -> float | None:
    """Share of padding in the processed positions; no value if the loop counted no padding."""
    if not totals.counts.tokens or totals.counts.tokens_processed <= totals.counts.tokens:
        return None
    return 1.0 - totals.counts.tokens / totals.counts.tokens_processed


@metric("TFLOP/s", needs=("iterations", "tokens", "FLOPs"), group="throughput", bases=("window",))
def tflops_per_gpu(totals: ClusterTotals) -> float | None:
    """Model FLOP/s of one device, from the FLOPs per token that the loop or a hook declared."""
    devices = totals.constants.devices
    if totals.constants.flops_per_token is None or not devices:
        return None
    rate = counted_quotient(totals.counts.tokens, totals.loop.time_s)
    return None if rate is None else rate * totals.constants.flops_per_token / devices / 1e12


@metric("ratio", needs=("iterations", "tokens", "FLOPs", "peak"), group="throughput", bases=("window",))
def mfu_ratio(totals: ClusterTotals) -> float | None:
    """Model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): model FLOP/s divided by the job's peak."""
    return _none_above_1(share_of_peak(totals, totals.constants.flops_per_token))


@metric("ratio", needs=("iterations", "tokens", "hardware FLOPs", "peak"), group="throughput", bases=("window",))
def hfu_ratio(totals: ClusterTotals) -> float | None:
    """Hardware FLOPs utilization (PaLM, arXiv 2204.02311, appendix B): like MFU, with the FLOPs of recomputation."""
    return _none_above_1(share_of_peak(totals, totals.constants.hardware_flops_per_token))


def share_of_peak(totals: ClusterTotals, flops_per_token: float | None) -> float | None:
    """Return FLOP/s divided by the job's peak; above 1 if the peak or the FLOPs per token is wrong."""
    rate = counted_quotient(totals.counts.tokens, totals.loop.time_s)
    if rate is None or flops_per_token is None or not totals.constants.peak_flops_per_s:
        return None
    return rate * flops_per_token / totals.constants.peak_flops_per_s


def _part_of_al(totals: ClusterTotals, share: float | None) -> float | None:
    al_s = al_seconds(totals)  # average latency: the mean step time
    return None if al_s is None or share is None else share * al_s


def _none_above_1(share: float | None) -> float | None:
    return share if share is not None and share <= 1.0 else None  # above 1, the peak or the FLOPs per token is wrong
