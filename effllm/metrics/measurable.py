"""Whether each metric can be measured on a machine, from the sources of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from msgspec import Struct

from effllm.metrics import METRICS

#: Inputs from the device.
READ = ("gpu", "memory", "utilization", "energy", "power", "power limit", "throttling", "temperature", "clocks",
        "activity")  # fmt: skip

#: Inputs from the training loop.
FROM_LOOP = ("iterations", "tokens", "samples", "parameters", "FLOPs", "hardware FLOPs", "generated tokens",
             "steps on CUDA", "stalls", "own time")  # fmt: skip

#: Inputs from effllm's processes, available in every job.
OWN = ("elapsed time", "own cost")

#: Inputs from settings: input -> (variable, meaning of its value).
FROM_SETTINGS: dict[str, tuple[str, str]] = {
    "profile": ("PROFILE_EVERY", "N, for example 200, to profile every Nth iteration"),
    "baseline": ("BASELINE_SECONDS", "seconds of idle power before the first iteration"),
    "carbon intensity": ("CARBON_INTENSITY", "the carbon intensity of your electricity, in g CO2e per kWh"),
    "price": ("PRICE_PER_KWH", "the price of your electricity"),
    "rent": ("PRICE_PER_GPU_HOUR", "the price of your GPUs"),
}


class InputSource(Struct, frozen=True):
    """The source of an input of metrics on this machine, or the reason and the remedy if it is missing."""

    by: str = ""  # the source as text; "" if it is not shown
    why_not: str = ""  # "" if there is a source


class Measurable(Struct, frozen=True):
    """Whether a metric can be measured on this machine, with its sources or the reasons."""

    metric: str
    tag: str
    unit: str
    measured: bool
    needs: list[str]
    by: list[str]
    why_not: list[str]


class DependentTag(NamedTuple):
    """A tag whose value depends on an input."""

    need: str  # the input
    base: str  # the totals from which the value is computed: run, window or job
    needs_energy: bool  # whether the value also depends on energy


@cache
def dependent_tags(inputs: frozenset[str]) -> dict[str, DependentTag]:
    """Return the tags of all metrics with any of the inputs, each with one such input: the first by its name."""
    tags = {}
    for entry in METRICS.values():
        needed = inputs.intersection(entry.needs)
        for base in dict.fromkeys((*entry.bases, *entry.summary_bases)) if needed else ():
            tags[entry.tag(base)] = DependentTag(min(needed), base, "energy" in entry.needs)
    return tags


def measurable(name: str, sources: Mapping[str, InputSource]) -> Measurable:
    """Return whether a metric can be measured, and the sources or the reasons; each input must be in ``sources``."""
    entry = METRICS[name]
    without_source = [need for need in entry.needs if sources[need].why_not]
    if "gpu" in without_source:
        without_source = ["gpu"]  # the other missing inputs are from the GPU
    why_not = list(dict.fromkeys(sources[need].why_not for need in without_source))
    by = [sources[need].by for need in entry.needs if sources[need].by]
    return Measurable(name, entry.tag(entry.bases[0]), entry.unit, not why_not, list(entry.needs), by, why_not)
