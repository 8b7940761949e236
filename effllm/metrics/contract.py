"""The metrics of the contract, in the order of the console block: EfficientLLM, arXiv 2505.13840, section 5.1."""

from __future__ import annotations

from effllm.metrics.table import GIB, counted_quotient, energy_quotient, measured_quotient, metric, quotient
from effllm.records.job import ClusterTotals


@metric("GiB", console="AMU (GB): {:.2f}", error=lambda job: measured_quotient(job.devices.memory_error_bytes, GIB))
def amu_gb(totals: ClusterTotals) -> float | None:
    """Average memory utilization: memory in use, averaged over time and then over devices (Eq. 1)."""
    return measured_quotient(totals.devices.memory_mean_bytes, GIB)


@metric("ratio", console="PCU (Ratio): {:.3f}", error=lambda totals: totals.devices.utilization_error)
def pcu_ratio(totals: ClusterTotals) -> float | None:
    """Peak compute utilization: share of time in which the device was busy; a mean, despite the name (Eq. 2)."""
    return totals.devices.utilization_mean


@metric("s/iteration", console="AL (Seconds): {:.4f}")
def al_seconds(totals: ClusterTotals) -> float | None:
    """Average latency: step time with computation and communication, mean over steps of the slowest rank (Eq. 3)."""
    return quotient(totals.loop.slowest_step_s, totals.loop.slowest_iterations)


@metric("tokens/parameter/s", console="TT (Tokens/Param/Sec): {:.2e}")
def tt_tokens_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Token throughput of the whole job divided by its parameters (Eq. 4)."""
    return _per_parameter(totals.counts.tokens, totals)


@metric("samples/parameter/s", console="ST (Samples/Param/Sec): {:.2e}")
def st_samples_per_param_per_sec(totals: ClusterTotals) -> float | None:
    """Sample throughput of the whole job divided by its parameters (Eq. 5)."""
    return _per_parameter(totals.counts.samples, totals)


@metric("W", console="AEC (Watts): {:.2f}")
def aec_watts(totals: ClusterTotals) -> float | None:
    """Average energy consumption: mean power of the whole job; a power, despite the name (Eq. 8)."""
    return energy_quotient(totals, totals.energy.joules, totals.energy.time_s)


@metric("tokens/s", console="IT (Tokens/Sec): {:.2f}")
def it_tokens_per_sec(totals: ClusterTotals) -> float | None:
    """Inference throughput: generated tokens per second of generation, not divided by parameters (Eq. 6)."""
    return inference_throughput(totals.counts.generated_tokens, totals.loop.generation_s)


def inference_throughput(generated_tokens: float, time_s: float) -> float | None:
    """Return IT in tokens/s (Eq. 6); ``None`` if nothing was generated or no time passed."""
    return counted_quotient(generated_tokens, time_s)


def model_compression_ratio(
    original_bytes: float, compressed_bytes: float, original_score: float, compressed_score: float
) -> float:
    """Return MCR (Eq. 9): original size / compressed size x compressed score / original score.

    Raises:
        ValueError: a size or the original score is not above 0.
    """
    if not (original_bytes > 0 and compressed_bytes > 0 and original_score > 0):
        raise ValueError("sizes and the original score must be above 0")
    return (original_bytes / compressed_bytes) * (compressed_score / original_score)


def _per_parameter(count: int, totals: ClusterTotals) -> float | None:
    rate = counted_quotient(count, totals.loop.time_s)
    return None if rate is None or not totals.constants.parameters else rate / totals.constants.parameters
