"""MIG: a slice's share of its GPU's energy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from effllm.devices._nvml_call import LACKING
from effllm.devices._nvml_identity import text_of

#: A GPU with less free memory than this share has no space for another slice: the smallest takes an eighth.
_SMALLEST = 1 / 8
#: Compute slices of a GPU where NVML does not report them: all have as many but the A30, which has 4.
_USUAL = 7


@dataclass(frozen=True)
class Slice:
    """A slice in its GPU.

    NVML counts no energy per slice.  That of the GPU is divided among its slices by their compute slices (or
    evenly, where NVML does not report them), so that no joule belongs to two.  A container is shown its own slices
    only: where there may be others, the GPU has as many compute slices as it can have.
    """

    gpu: Any
    share: float
    note: str
    instance: int | None


def slice_of(handle: Any) -> Slice | None:
    """Return the slice that a handle is of, or ``None`` for a whole GPU."""
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
    """Return the weight of a slice, that of its whole GPU, and their unit."""
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
    """Return the number of slices that a GPU can have, also that of its compute slices, and its bytes of memory."""
    most, total_bytes = _USUAL, 2**64
    with suppress(pynvml.NVMLError):
        most = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
        total_bytes = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    return most, total_bytes


def _slices(gpu: Any, most: int) -> dict[str, Any]:
    found = {}
    for index in range(most):
        with suppress(pynvml.NVMLError):  # as many places as there could be slices, not all of them taken
            one = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            found[text_of(pynvml.nvmlDeviceGetUUID(one))] = one
    return found


def _shape(handle: Any) -> tuple[int, int | None, int]:
    """Return the compute slices of a slice, its GPU instance, and the bytes of that; zeros where NVML has none."""
    try:
        attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    except pynvml.NVMLError:
        return 0, None, 0
    return int(attributes.computeInstanceSliceCount), _instance_of(handle), int(attributes.memorySizeMB) << 20
