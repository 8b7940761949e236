"""What a metric needs, and whether that is to be had: asked of its formula, which gives no value without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from effllm.metrics import METRICS
from effllm.records.counters import FIELDS
from effllm.records.job import ClusterTotals, Overhead
from effllm.records.rank import Profile

_COUNTS: dict[str, Any] = {**dict.fromkeys(FIELDS, 1), "tokens_processed": 2}
_WHOLE = ClusterTotals(
    parameters=1, iterations=1, time_s=1.0, slowest_step_s=1.0, slowest_iterations=1, wait_s=0.0,
    generation_s=1.0,
    memory_mean_bytes=1.0, memory_min_bytes=1.0, memory_max_bytes=1.0, memory_peak_bytes=1.0,
    utilization_mean=1.0, utilization_min=1.0, utilization_max=1.0,
    energy_j=1.0, energy_time_s=1.0, energy_tokens=1, energy_samples=1, energy_iterations=1,
    energy_complete=True, energy_measured_j=1.0, energy_gpus_j=1.0, energy_error_j=0.1, energy_gain_error_j=0.1,
    gpus=1, world_size=1, peak_flops_per_s=1.0, flops_per_token=1.0, hardware_flops_per_token=1.0,
    power_limit_w=1.0, power_peak_w=1.0, power_histogram_s={0: 1.0}, throttled_s=0.0, throttle_covered_s=1.0,
    temperature_max_c=1.0, sm_clock_hz=1.0, sm_activity=1.0, tensor_activity=1.0, dram_activity=1.0,
    profile=Profile(1, 1.0), device_steps=1, device_step_s=1.0,
    baseline_w=1.0, carbon_g_per_kwh=1.0, price_per_kwh=1.0, price_per_gpu_hour=1.0,
    stalled_s=0.0, clock_error_s=1.0, straggling_s=1.0, straggling_j=1.0, elapsed_s=1.0, rank_seconds=1.0,
    class_s=dict.fromkeys(("kept", "redone", "restart_gap", "startup", "checkpoint", "unknown"), 1.0),
    class_j={"redone": 1.0, "straggling": 1.0, "hang": 1.0},
    overhead=Overhead(1.0, 1.0, 1.0, 1, 1), **_COUNTS,
)  # fmt: skip

GAUGES: dict[str, dict[str, Any]] = {
    "power": {"power_peak_w": None, "power_histogram_s": {}},
    "power limit": {"power_limit_w": None},
    "throttling": {"throttled_s": None, "throttle_covered_s": 0.0},
    "temperature": {"temperature_max_c": None},
    "clocks": {"sm_clock_hz": None},
    "activity": {"sm_activity": None, "tensor_activity": None, "dram_activity": None},
}

#: What a metric may need -> how the totals look without it.
NEEDS: dict[str, dict[str, Any]] = {
    "gpu": {"gpus": 0, "energy_gpus_j": None, "device_steps": 0}
    | {name: no for blank in GAUGES.values() for name, no in blank.items()},
    "memory": {f"memory_{kind}_bytes": None for kind in ("mean", "min", "max", "peak")},
    "utilization": {f"utilization_{kind}": None for kind in ("mean", "min", "max")},
    "energy": {f"energy_{kind}": None for kind in ("j", "gpus_j", "measured_j", "error_j", "gain_error_j")}
    | {"energy_complete": False, "straggling_j": None, "class_j": {}},
    **GAUGES,
    "iterations": {"time_s": 0.0, "slowest_iterations": 0, "iterations": 0, "energy_time_s": 0.0},
    "tokens": {"tokens": 0, "energy_tokens": 0},
    "samples": {"samples": 0, "energy_samples": 0},
    "parameters": {"parameters": None},
    "FLOPs": {"flops_per_token": None},
    "hardware FLOPs": {"hardware_flops_per_token": None},
    "peak": {"peak_flops_per_s": None},
    "generated tokens": {"generated_tokens": 0, "generation_s": 0.0},
    "profile": {"profile": None},
    "steps on CUDA": {"device_steps": 0},
    "baseline": {"baseline_w": None},
    "carbon intensity": {"carbon_g_per_kwh": None},
    "price": {"price_per_kwh": None},
    "rent": {"price_per_gpu_hour": None},
    "where it stands": {"stalled_s": None},
    "own time": {"straggling_s": None},
    "elapsed time": {"elapsed_s": 0.0, "rank_seconds": 0.0},
    "own cost": {"overhead": None},
    "clocks of ranks": {"clock_error_s": None},
}

#: Read from the device, beside its gauges.
READ = ("gpu", "memory", "utilization", "energy")

#: Told by the training loop, not measured by us.
TOLD = (
    "iterations",
    "tokens",
    "samples",
    "parameters",
    "FLOPs",
    "hardware FLOPs",
    "generated tokens",
    "steps on CUDA",
    "where it stands",
    "own time",
)

#: Told by effllm's own processes, of any job.
OWN = ("elapsed time", "own cost", "clocks of ranks")

#: Told by the settings: the variable, and what to set it to.
SET: dict[str, tuple[str, str]] = {
    "profile": ("PROFILE_EVERY", "how many iterations lie between two that are profiled, 200 say"),
    "baseline": ("BASELINE_SECONDS", "the seconds before the first iteration in which idle power is measured"),
    "carbon intensity": ("CARBON_INTENSITY", "that of your electricity, in g CO2e per kWh"),
    "price": ("PRICE_PER_KWH", "that of your electricity"),
    "rent": ("PRICE_PER_GPU_HOUR", "that of your GPUs"),
}


class InputSource(Struct, frozen=True):
    """Where a quantity comes from here, or why it does not, and what to do."""

    by: str = ""
    why_not: str = ""


class Measurable(Struct, frozen=True):
    """Whether a metric can be measured here."""

    metric: str
    tag: str
    unit: str
    measured: bool
    needs: list[str]
    by: list[str]
    why_not: list[str]


def needs_of(name: str) -> list[str]:
    """Return what a metric cannot do without.

    >>> needs_of("tt_tokens_per_param_per_sec")
    ['iterations', 'tokens', 'parameters']
    """
    formula = METRICS[name].formula
    return [need for need, blank in NEEDS.items() if formula(msgspec.structs.replace(_WHOLE, **blank)) is None]


def measurable(name: str, sources: Mapping[str, InputSource]) -> Measurable:
    """Say whether a metric can be measured, by what, or why not; ``sources`` has one for each of `NEEDS`."""
    entry, needs = METRICS[name], needs_of(name)
    lacking = [need for need in needs if sources[need].why_not]
    if "gpu" in lacking:
        lacking = ["gpu"]  # whatever else a GPU would have to give
    why_not = list(dict.fromkeys(sources[need].why_not for need in lacking))
    by = [sources[need].by for need in needs if sources[need].by]
    return Measurable(name, entry.tag(entry.bases[0]), entry.unit, not why_not, needs, by, why_not)
