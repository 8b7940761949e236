"""Checks that MFU and HFU are possible, by themselves and by the tensor activity of the GPUs. No I/O.

The tensor cores cannot have done fewer FLOPs than the model needs.  Their utilization is tensor activity times SM
clock over the clock of the peak (OFU, arXiv 2605.20799); it predicts MFU within two percentage points in the paper's
matrix products.  Not measured on a GPU by this project.
"""

from __future__ import annotations

from collections.abc import Iterator

from effllm import metrics
from effllm.job.audit.known import KnownJob
from effllm.job.window_energy import ROUNDING
from effllm.records.job import ClusterTotals

#: SM clock at which the vendor's dense peak holds, by peak of a GPU in FLOP/s: the peak over SMs x FLOPs per SM and
#: clock (A100: 108 x 2,048; H100 SXM and H200: 132 x 4,096).
PEAK_CLOCK_HZ = {312e12: 1.41e9, 989.4e12: 1.83e9}
PEAK_ROUNDING = 1e-3
#: Precisions in which a tensor core at full activity reaches this peak; FP8 does twice as many FLOPs.
PRECISIONS = ("bf16", "fp16")
#: MFU may exceed the tensor cores' utilization by this share and by these points: activity and clock are sampled at
#: other times than the iterations are measured (5 % to 10 %), and the paper's error is two points.
SHARE, POINTS = 0.15, 0.02


def impossible_shares(totals: ClusterTotals, peak_source: str) -> Iterator[tuple[str, str]]:
    """Yield a kind of event and a sentence for MFU and HFU above 1."""
    constants = totals.constants
    for name, flops in (("MFU", constants.flops_per_token), ("HFU", constants.hardware_flops_per_token)):
        share = metrics.throughput.share_of_peak(totals, flops)
        if share is not None and share > 1 + ROUNDING:
            yield (
                "mfu",
                f"{name} would be {share:.3g}, which is impossible, so it is not shown: the {flops:.3g} FLOPs per "
                f"token, the tokens or the peak ({peak_source}) are wrong",
            )


def above_tensor_activity(totals: ClusterTotals, known: KnownJob) -> str:
    """Return a sentence if MFU exceeds the utilization of the tensor cores; empty otherwise, or if it is unknown."""
    mfu, found = metrics.throughput.mfu_ratio(totals), tensor_utilization(totals, known)
    if mfu is None or found is None or mfu <= found * (1 + SHARE) + POINTS:
        return ""
    used = f"MFU is {100 * mfu:.1f} %, but tensor activity x SM clock is {100 * found:.1f} %"
    factor = f" by a factor of at least {mfu / (found * (1 + SHARE)):.3g}" if found > 0 else ""
    return f"{used}: the FLOPs per token, the tokens or the peak are wrong{factor}"


def tensor_utilization(totals: ClusterTotals, known: KnownJob) -> float | None:
    """Return tensor activity times SM clock over the clock of the peak; ``None`` if a factor is unknown."""
    devices, constants = totals.devices, totals.constants
    if devices.tensor_activity is None or devices.sm_clock_hz is None or known.precision not in PRECISIONS:
        return None
    peak = (constants.peak_flops_per_s or 0.0) / (constants.gpus or 1)
    clock_hz = next((hz for one, hz in PEAK_CLOCK_HZ.items() if abs(peak / one - 1) < PEAK_ROUNDING), None)
    return None if clock_hz is None else devices.tensor_activity * devices.sm_clock_hz / clock_hz
