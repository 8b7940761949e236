"""The NVIDIA GPUs that this process can see, and whether a process uses each of them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pynvml

from effllm.devices._nvml_identity import text_of
from effllm.devices.allocation import HostGpu

#: A GPU with more used memory has a process: a CUDA context needs some hundreds of MiB.  In a container NVML lists no
#: processes of other containers, so the memory is the only evidence.
MAX_FREE_BYTES = 100 * 2**20


def visible_gpus() -> list[HostGpu]:
    """Return the GPUs that NVML lists; a GPU that cannot be read is not free.

    Raises:
        pynvml.NVMLError: NVML does not work here.
    """
    pynvml.nvmlInit()
    try:
        handles = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):
                handles[index] = pynvml.nvmlDeviceGetHandleByIndex(index)
        return [_describe(index, handle) for index, handle in handles.items()]
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _describe(index: int, handle: Any) -> HostGpu:
    number = None
    with suppress(pynvml.NVMLError):
        number = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    key = text_of(pynvml.nvmlDeviceGetUUID(handle))
    return HostGpu(key, number, _is_sliced(handle), _is_free(handle), index)


def _is_sliced(handle: Any) -> bool:
    """Whether MIG is enabled; if the answer is an error, slices are possible."""
    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):  # a GPU or a driver without MIG
        return False
    except pynvml.NVMLError:
        return True


def _is_free(handle: Any) -> bool:
    try:
        if pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            return False
        if pynvml.nvmlDeviceGetUtilizationRates(handle).gpu:
            return False
        return int(_used_bytes(handle)) < MAX_FREE_BYTES
    except pynvml.NVMLError:
        return False


def _used_bytes(handle: Any) -> int:
    """Return the memory in use; drivers before 510 include the memory that they reserve."""
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
