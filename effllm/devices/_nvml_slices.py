"""MIG: a slice's share of its GPU's energy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from effllm.devices._nvml_call import LACKING
from effllm.devices._nvml_identity import text_of

#: The smallest slice takes this share of the GPU's memory; with less free memory, no other slice can exist.
_SMALLEST = 1 / 8
#: Number of a GPU's compute slices if NVML does not report it; all models have 7, except the A30 with 4.
_USUAL = 7


@dataclass(frozen=True)
class Slice:
    """A MIG slice, with its share of the GPU's energy.

    NVML reports no energy per slice.  The GPU's energy is divided among its slices in proportion to their compute
    slices (or evenly, if NVML does not report compute slices), so that each joule is counted once.  A container lists
    only its own slices: if the GPU has memory for other slices, the divisor is its maximal number of compute slices.
    """

    gpu: Any
    share: float
    note: str
    instance: int | None


def slice_of(handle: Any) -> Slice | None:
    """Return the slice of a handle, or ``None`` for a whole GPU."""
    try:
        answer = pynvml.nvmlDeviceIsMigDeviceHandle(handle)
    except LACKING:
        return None
    if not getattr(answer, "value", answer):
        return None
    gpu = gpu_of(handle)
    own, whole, word = _weigh(handle, gpu)
    note = f"{own}/{whole} of {text_of(pynvml.nvmlDeviceGetUUID(gpu))}'s energy, by {word}"
    return Slice(gpu, own / whole, note, _instance_of(handle))


def gpu_of(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def _instance_of(handle: Any) -> int | None:
    try:
        return int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    except pynvml.NVMLError:
        return None


def _weigh(handle: Any, gpu: Any) -> tuple[int, int, str]:
    """Return a slice's share of its GPU as numerator, denominator, and the name of the counted parts."""
    most, total_bytes = _capacity(gpu)
    own = text_of(pynvml.nvmlDeviceGetUUID(handle))
    slices = _slices(gpu, most) | {own: handle}
    shapes = {uuid: _shape(one) for uuid, one in slices.items()}
    counts = {uuid: count for uuid, (count, _, _) in shapes.items()}
    if not all(counts.values()):
        return 1, len(slices), "number of slices"
    # The compute instances of a GPU instance share its memory.
    taken_bytes = sum({instance: size for _, instance, size in shapes.values()}.values())
    is_full = total_bytes - taken_bytes < total_bytes * _SMALLEST
    whole = sum(counts.values()) if is_full else max(sum(counts.values()), most)
    return counts[own], whole, "compute slices"


def _capacity(gpu: Any) -> tuple[int, int]:
    """Return the maximal number of slices of a GPU (equal to its number of compute slices), and its memory in bytes."""
    most, total_bytes = _USUAL, 2**64
    with suppress(pynvml.NVMLError):
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
        total_bytes = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    return most, total_bytes


def _slices(gpu: Any, most: int) -> dict[str, Any]:
    found = {}
    for index in range(most):
        with suppress(pynvml.NVMLError):  # no slice has this index
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            found[text_of(pynvml.nvmlDeviceGetUUID(one))] = one
    return found


def _shape(handle: Any) -> tuple[int, int | None, int]:
    """Return the number of compute slices, the GPU instance and the memory of a slice; 0, None and 0 if unknown."""
    try:
        attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    except pynvml.NVMLError:
        return 0, None, 0
    return int(attributes.computeInstanceSliceCount), _instance_of(handle), int(attributes.memorySizeMB) << 20
