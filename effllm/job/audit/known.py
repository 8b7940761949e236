"""The known quantities of a job, with which a wrong factor is explained. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from msgspec import Struct

#: Fact of a rank -> name of the quantity.
QUANTITIES: dict[str, str] = {
    "gradient_accumulation_steps": "gradient accumulation steps",
    "data_parallel": "data parallel size",
    "tensor_parallel": "tensor parallel size",
    "pipeline_parallel": "pipeline parallel size",
    "context_parallel": "context parallel size",
    "sequence_parallel": "sequence parallel size",
    "expert_parallel": "expert parallel size",
    "per_device_batch_size": "micro-batch size",
    "micro_batch_size": "micro-batch size",
    "global_batch_size": "global batch size",
    "logging_steps": "logging steps",
}
#: Peaks that frameworks use as a default for every device, in FLOP/s.
DEFAULT_PEAKS: dict[str, float] = {
    "an A100 (312 TFLOP/s)": 312e12,
    "an H100 (989 TFLOP/s)": 989.4e12,
    "an H100 with sparsity (1,979 TFLOP/s)": 1978.9e12,
}
#: A peak is recognized within this share: tables differ in digits (H100: 989, 989.4, 989.5).
PEAK_TOLERANCE = 0.01
MAX_REASONS = 4


class KnownJob(Struct, frozen=True):
    """The constants of a job that the audit uses."""

    quantities: dict[str, int] = {}  # name -> value of at least 2
    devices: int = 1  # GPUs, or ranks without GPUs
    peaks: dict[str, float] = {}  # text -> peak of this GPU in other precisions, in FLOP/s
    peak_flops_per_s: float | None = None  # of the whole job
    flops_per_token: float | None = None
    max_positions: int = 0  # largest number of positions of a rank's iteration, if the framework fixes it; else 0
    precision: str = ""


def quantities_of(facts: Mapping[str, Any], world_size: int, gpus: int, hosts: int) -> dict[str, int]:
    """Return the quantities of a job that a wrong factor may be equal to; a quantity of 1 explains nothing."""
    found: dict[str, Any] = {}
    for fact, name in QUANTITIES.items():  # two facts may have one name
        found[name] = facts.get(fact, found.get(name))
    batch, micro, replicas = (found[QUANTITIES[name]] for name in _BATCH)
    if all(map(_is_count, (batch, micro, replicas))) and not batch % (micro * replicas):
        found["micro-batches of an iteration"] = batch // (micro * replicas)
    found["ranks"], found["GPUs"] = world_size, gpus
    if hosts and not gpus % hosts:
        found["GPUs of a node"] = gpus // hosts
    found["sequence length"] = facts.get("sequence_length")
    return {name: value for name, value in found.items() if value is not None and _is_count(value) and value > 1}


#: Quantities whose products are named: micro-batches of one rank, and ranks with different micro-batches.
_STEPS = ("gradient accumulation steps", "micro-batches of an iteration")
_SPREAD = ("data parallel size", "ranks", "GPUs")
_BATCH = ("global_batch_size", "micro_batch_size", "data_parallel")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def reasons_for(factor: float, tolerance: float, quantities: Mapping[str, int]) -> tuple[int, tuple[str, ...]]:
    """Return the whole number that a factor (or its inverse) is equal to, and the quantities with this value.

    Products of two quantities are named only if no single quantity has the value.  The number is 0 if the factor is not
    a whole number within the tolerance; the number 1 is no factor.
    """
    above = max(factor, 1.0 / factor)
    number = round(above)
    if number < 2 or abs(above - number) > tolerance * number:
        return 0, ()
    single = tuple(name for name, value in quantities.items() if value == number)
    return number, (single or tuple(_products(number, quantities)))[:MAX_REASONS]


def _products(number: int, quantities: Mapping[str, int]) -> Iterator[str]:
    for one, other in product(_STEPS, _SPREAD):
        if quantities.get(one, 0) * quantities.get(other, 0) == number:
            yield f"{one} ({quantities[one]}) x {other} ({quantities[other]})"


def peaks_like(flops_per_s: float, known: KnownJob) -> tuple[str, ...]:
    """Return the names of peaks that are equal to this peak, but not to the peak of the job's device."""
    own = (known.peak_flops_per_s or 0.0) / known.devices
    return tuple(
        name
        for name, peak in {**known.peaks, **DEFAULT_PEAKS}.items()
        if abs(flops_per_s / peak - 1) <= PEAK_TOLERANCE < abs(peak / own - 1)
    )[:MAX_REASONS]
