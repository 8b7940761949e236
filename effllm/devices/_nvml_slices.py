"""MIG: what part of its GPU's energy a slice is answerable for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pynvml

from effllm.devices._nvml_identity import text_of
from effllm.devices._nvml_power import LACKING


@dataclass(frozen=True)
class Slice:
    """A slice in its GPU.

    NVML counts no energy per slice.  That of the GPU is divided among its slices by their compute slices
    (or their multiprocessors, or evenly, where NVML does not tell), so that all shares add up to one: each
    joule of the GPU belongs to exactly one slice, whether a job uses one of them or all.
    """

    parent: Any
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
    parent = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    own, rest = _weigh(handle, parent)
    try:
        instance: int | None = int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    except pynvml.NVMLError:
        instance = None
    share = own[0] / (own[0] + rest)
    uuid = text_of(pynvml.nvmlDeviceGetUUID(parent))
    return Slice(parent, share, f"{own[0]:g}/{own[0] + rest:g} of {uuid}'s energy, by {own[1]}", instance)


def _weigh(handle: Any, parent: Any) -> tuple[tuple[float, str], float]:
    """Return the weight of a slice, with what it is counted in, and the weight of its GPU's other slices."""
    own_uuid = text_of(pynvml.nvmlDeviceGetUUID(handle))
    others = [one for one in _slices(parent) if text_of(pynvml.nvmlDeviceGetUUID(one)) != own_uuid]
    for field, word in (("computeInstanceSliceCount", "compute slices"), ("multiprocessorCount", "multiprocessors")):
        counts = [_attribute(one, field) for one in (handle, *others)]
        if all(counts):
            return (float(counts[0]), word), float(sum(counts[1:]))
    return (1.0, "number of slices"), float(len(others))


def _slices(parent: Any) -> Iterator[Any]:
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            continue  # as many places as there could be slices, not all of them taken


def _attribute(handle: Any, field: str) -> int:
    try:
        return int(getattr(pynvml.nvmlDeviceGetAttributes_v2(handle), field))
    except pynvml.NVMLError:
        return 0
