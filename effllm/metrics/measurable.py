"""The inputs of each metric. An input is found by removal: without the input, the formula has no value."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from effllm.metrics import METRICS
from effllm.records.counters import FIELDS
from effllm.records.job import (
    ClusterTotals,
    Counts,
    DeviceTotals,
    GoodputTotals,
    HealthTotals,
    JobConstants,
    JobEnergy,
    LoopTimes,
    Overhead,
)
from effllm.records.rank import Profile

_COUNTS = Counts(iterations=1, **{**dict.fromkeys(FIELDS, 1), "tokens_processed": 2})
#: Totals on which every metric has a value.
_COMPLETE = ClusterTotals(
    counts=_COUNTS,
    loop=LoopTimes(1.0, 1.0, 1, wait_s=0.0, generation_s=1.0, device_steps=1, device_step_s=1.0),
    energy=JobEnergy(
        1.0, inside_j2=0.01, gain_j=0.1, time_s=1.0, counts=_COUNTS, is_complete=True, measured_j=1.0, gpus_j=1.0
    ),
    devices=DeviceTotals(
        memory_mean_bytes=1.0, memory_min_bytes=1.0, memory_max_bytes=1.0, memory_peak_bytes=1.0,
        utilization_mean=1.0, utilization_min=1.0, utilization_max=1.0,
        power_peak_w=1.0, power_histogram_s={0: 1.0}, throttled_s=0.0, throttle_covered_s=1.0,
        temperature_max_c=1.0, sm_clock_hz=1.0, sm_activity=1.0, tensor_activity=1.0, dram_activity=1.0,
    ),
    health=HealthTotals(straggling_s=1.0, straggling_j=1.0, stalled_s=0.0),
    goodput=GoodputTotals(
        1.0,
        dict.fromkeys(("kept", "redone", "restart_gap", "startup", "checkpoint", "unknown"), 1.0),
        {"redone": 1.0, "straggling": 1.0, "uneven_ranks": 1.0, "hang": 1.0},
        1.0,
    ),
    constants=JobConstants(
        parameters=1, gpus=1, world_size=1, peak_flops_per_s=1.0, flops_per_token=1.0, hardware_flops_per_token=1.0,
        power_limit_w=1.0, baseline_w=1.0, carbon_g_per_kwh=1.0, price_per_kwh=1.0, price_per_gpu_hour=1.0,
    ),
    profile=Profile(1, 1.0),
    overhead=Overhead(1.0, 1.0, 1.0, 1, 1),
)  # fmt: skip

#: Fields of `ClusterTotals` or of its groups, with their values if an input is missing.
MissingFields = dict[str, Any]
GAUGES: dict[str, MissingFields] = {
    "power": {"devices": {"power_peak_w": None, "power_histogram_s": {}}},
    "power limit": {"constants": {"power_limit_w": None}},
    "throttling": {"devices": {"throttled_s": None, "throttle_covered_s": 0.0}},
    "temperature": {"devices": {"temperature_max_c": None}},
    "clocks": {"devices": {"sm_clock_hz": None}},
    "activity": {"devices": {"sm_activity": None, "tensor_activity": None, "dram_activity": None}},
}

#: Input of a metric -> totals without the input.
TOTALS_WITHOUT: dict[str, MissingFields] = {
    "gpu": {
        "constants": {"gpus": 0, "power_limit_w": None},
        "energy": {"gpus_j": None},
        "loop": {"device_steps": 0},
        "devices": {name: no for lack in GAUGES.values() for name, no in lack.get("devices", {}).items()},
    },
    "memory": {"devices": {f"memory_{kind}_bytes": None for kind in ("mean", "min", "max", "peak")}},
    "utilization": {"devices": {f"utilization_{kind}": None for kind in ("mean", "min", "max")}},
    "energy": {"energy": JobEnergy(), "health": {"straggling_j": None}, "goodput": {"class_j": {}}},
    **GAUGES,
    "iterations": {
        "loop": {"time_s": 0.0, "slowest_iterations": 0},
        "counts": {"iterations": 0},
        "energy": {"time_s": 0.0},
    },
    "tokens": {"counts": {"tokens": 0}, "energy": {"counts": replace(_COUNTS, tokens=0)}},
    "samples": {"counts": {"samples": 0}, "energy": {"counts": replace(_COUNTS, samples=0)}},
    "parameters": {"constants": {"parameters": None}},
    "FLOPs": {"constants": {"flops_per_token": None}},
    "hardware FLOPs": {"constants": {"hardware_flops_per_token": None}},
    "peak": {"constants": {"peak_flops_per_s": None}},
    "generated tokens": {"counts": {"generated_tokens": 0}, "loop": {"generation_s": 0.0}},
    "profile": {"profile": None},
    "steps on CUDA": {"loop": {"device_steps": 0}},
    "baseline": {"constants": {"baseline_w": None}},
    "carbon intensity": {"constants": {"carbon_g_per_kwh": None}},
    "price": {"constants": {"price_per_kwh": None}},
    "rent": {"constants": {"price_per_gpu_hour": None}},
    "stalls": {"health": {"stalled_s": None}},
    "own time": {"health": {"straggling_s": None}},
    "elapsed time": {"goodput": {"elapsed_s": 0.0, "rank_seconds": 0.0}},
    "own cost": {"overhead": None},
}

#: Inputs from the device, in addition to `GAUGES`.
READ = ("gpu", "memory", "utilization", "energy")

#: Inputs from the training loop.
FROM_LOOP = ("iterations", "tokens", "samples", "parameters", "FLOPs", "hardware FLOPs", "generated tokens",
             "steps on CUDA", "stalls", "own time")  # fmt: skip

#: Inputs from effllm's processes, available in every job.
OWN = ("elapsed time", "own cost", "clocks of ranks")

#: Inputs from settings: input -> (variable, meaning of its value).
FROM_SETTINGS: dict[str, tuple[str, str]] = {
    "profile": ("PROFILE_EVERY", "N, for example 200, to profile every Nth iteration"),
    "baseline": ("BASELINE_SECONDS", "seconds of idle power before the first iteration"),
    "carbon intensity": ("CARBON_INTENSITY", "the carbon intensity of your electricity, in g CO2e per kWh"),
    "price": ("PRICE_PER_KWH", "the price of your electricity"),
    "rent": ("PRICE_PER_GPU_HOUR", "the price of your GPUs"),
}


class InputSource(Struct, frozen=True):
    """The source of a quantity on this machine, or the reason and the remedy for a missing quantity."""

    by: str = ""
    why_not: str = ""


class Measurable(Struct, frozen=True):
    """Whether a metric can be measured on this machine, with its sources or the reasons."""

    metric: str
    tag: str
    unit: str
    measured: bool
    needs: list[str]
    by: list[str]
    why_not: list[str]


def inputs_of(name: str) -> list[str]:
    """Return the inputs of a metric.

    >>> inputs_of("tt_tokens_per_param_per_sec")
    ['iterations', 'tokens', 'parameters']
    """
    formula = METRICS[name].formula
    return [need for need, lack in TOTALS_WITHOUT.items() if formula(_totals_without(lack)) is None]


class DependentTag(NamedTuple):
    """A tag whose value depends on an input."""

    need: str
    base: str
    needs_energy: bool  # whether the value also depends on energy


@cache
def dependent_tags(inputs: frozenset[str]) -> dict[str, DependentTag]:
    """Return the tags of all metrics with any of the inputs, each with one such input: the first by its name."""
    tags = {}
    for entry in METRICS.values():
        needs = set(inputs_of(entry.name))
        for base in dict.fromkeys((*entry.bases, *entry.summary_bases)) if needs & inputs else ():
            tags[entry.tag(base)] = DependentTag(min(needs & inputs), base, "energy" in needs)
    return tags


def _totals_without(lack: MissingFields) -> ClusterTotals:
    changed = {
        group: replace(getattr(_COMPLETE, group), **missing) if isinstance(missing, dict) else missing
        for group, missing in lack.items()
    }
    return replace(_COMPLETE, **changed)


def measurable(name: str, sources: Mapping[str, InputSource]) -> Measurable:
    """Return whether a metric can be measured, and the sources or the reasons; each input must be in ``sources``."""
    entry, needs = METRICS[name], inputs_of(name)
    without_source = [need for need in needs if sources[need].why_not]
    if "gpu" in without_source:
        without_source = ["gpu"]  # the other missing inputs are from the GPU
    why_not = list(dict.fromkeys(sources[need].why_not for need in without_source))
    by = [sources[need].by for need in needs if sources[need].by]
    return Measurable(name, entry.tag(entry.bases[0]), entry.unit, not why_not, needs, by, why_not)
