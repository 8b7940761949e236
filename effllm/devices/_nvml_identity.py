"""The GPU or MIG slice of a rank, found by UUID or bus id, never by index; and the energy share of a slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pynvml

from effllm.devices import DeviceUnavailable, Site, choose_for_rank
from effllm.devices._nvml_call import LACKING

#: The smallest slice takes this share of the GPU's memory; with less free memory, no other slice can exist.
_MIN_MEMORY_SHARE = 1 / 8
#: Number of a GPU's compute slices if NVML does not report it; all models have 7, except the A30 with 4.
_USUAL_MAX_SLICES = 7


def choose_uuid(site: Site, uuids: Sequence[str]) -> str:
    """Return the UUID of the device that CUDA_VISIBLE_DEVICES assigns to a rank.

    ``uuids`` are the UUIDs of all GPUs in PCI bus order, CUDA's order under CUDA_DEVICE_ORDER=PCI_BUS_ID.  CUDA's
    default order (fastest first) is the same on a node of equal GPUs.

    Raises:
        DeviceUnavailable: no GPU is visible to this rank.
    """
    visible = site.visible_devices
    entries = list(uuids) if visible is None else [entry.strip() for entry in visible.split(",")]
    source = "this machine" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    return choose_for_rank(list(_uuids_of_entries(entries, uuids)), len(entries), site, source, len(uuids))


def _uuids_of_entries(entries: Sequence[str], uuids: Sequence[str]) -> Iterator[str]:
    for entry in entries:
        if entry.startswith("MIG-"):
            yield entry
        elif entry.isdecimal() and int(entry) < len(uuids):
            yield uuids[int(entry)]
        elif entry.startswith("GPU-") and len(matching := [uuid for uuid in uuids if uuid.startswith(entry)]) == 1:
            yield matching[0]
        else:
            return  # as in CUDA, entries after the first invalid entry are not visible


def text_of(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer  # older releases of pynvml return bytes


def _given_slices(site: Site) -> list[str]:
    """Return the slices that a container was given (NVIDIA_VISIBLE_DEVICES); empty if it was given whole GPUs."""
    given = [name.strip() for name in (site.container_devices or "").split(",")]
    return given if all(name.startswith("MIG-") for name in given) else []


def _uuids_in_bus_order(site: Site) -> list[str]:
    """Return the UUIDs of the visible GPUs: of all, or of those whose slices a container was given."""
    parents = set()
    for name in _given_slices(site):
        with suppress(pynvml.NVMLError):  # a container may not read the GPU of its slice
            parents.add(text_of(pynvml.nvmlDeviceGetUUID(gpu_of_slice(pynvml.nvmlDeviceGetHandleByUUID(name)))))
    gpus = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # GPUs that are broken or hidden by the container are skipped, as in CUDA.
        with suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pci = pynvml.nvmlDeviceGetPciInfo(handle)
            gpus.append(((pci.domain, pci.bus, pci.device), text_of(pynvml.nvmlDeviceGetUUID(handle))))
    return [uuid for _, uuid in sorted(gpus) if uuid in parents or not parents]


def find_handle(site: Site) -> Any:
    """Return the handle of the GPU that torch uses, or else of the rank's device in CUDA_VISIBLE_DEVICES.

    On a GPU in MIG mode, CUDA uses a slice even if no setting names one, so the handle is never that of the whole GPU.
    """
    # Under some CUDA versions torch returns the GPU's UUID for a slice, so a slice is found by CUDA_VISIBLE_DEVICES.
    if (site.cuda_uuid or site.cuda_pci_bus_id) and not (site.visible_devices or "").strip().startswith("MIG-"):
        handle = _find_torch_device(site)
    else:
        uuid = choose_uuid(site, _uuids_in_bus_order(site))
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
            raise DeviceUnavailable(f"CUDA_VISIBLE_DEVICES names {uuid}, and NVML lists no such device here") from error
    return _first_slice(handle, site) if _is_in_mig_mode(handle, site) else handle


def _is_in_mig_mode(handle: Any, site: Site) -> bool:
    """Whether a handle is of a whole GPU in MIG mode, or of a whole GPU whose mode may not be read."""
    try:
        return not _is_slice(handle) and bool(pynvml.nvmlDeviceGetMigMode(handle)[0])
    except pynvml.NVMLError_NoPermission:
        return True
    except pynvml.NVMLError:  # a GPU or a driver without MIG
        return bool(_given_slices(site))


def _is_slice(handle: Any) -> bool:
    answer = pynvml.nvmlDeviceIsMigDeviceHandle(handle)
    return bool(getattr(answer, "value", answer))


def _first_slice(gpu: Any, site: Site) -> Any:
    """Return the slice that CUDA uses: the first, of those that a container was given (NVIDIA_VISIBLE_DEVICES).

    Raises:
        DeviceUnavailable: no slice is visible.
    """
    slices, given = _slices_by_uuid(gpu, _max_slices_and_memory(gpu)[0]), _given_slices(site)
    for name in given if not slices else ():
        with suppress(pynvml.NVMLError):
            slices[name] = pynvml.nvmlDeviceGetHandleByUUID(name)
    uuid = next((uuid for uuid in slices if uuid in given), next(iter(slices), None))
    if uuid is None:
        raise DeviceUnavailable(
            f"{_uuid_or_the_gpu(gpu)} is in MIG mode, or may not be read, and no slice is visible: set "
            "CUDA_VISIBLE_DEVICES=MIG-<uuid> from the list of nvidia-smi -L"
        )
    return slices[uuid]


def _find_torch_device(site: Site) -> Any:
    uuid = site.cuda_uuid
    prefixes = ("",) if uuid.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")  # some versions of torch leave it out
    for name in [prefix + uuid for prefix in prefixes if uuid]:
        with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(name)
    if site.cuda_pci_bus_id:
        return pynvml.nvmlDeviceGetHandleByPciBusId(site.cuda_pci_bus_id)
    raise DeviceUnavailable(f"NVML does not list the GPU {uuid} that torch uses: is it hidden from this container?")


def name_of(handle: Any) -> str:
    """Return the product name; empty if it may not be read, as that of a slice's GPU in a container."""
    with suppress(pynvml.NVMLError):
        return text_of(pynvml.nvmlDeviceGetName(handle))
    return ""


def module_key(handle: Any, host: str) -> str:
    """Return the key that all GPUs of a module share, so that the module's energy is counted once.

    The GPUs of a module have the serial number of their board, but different module ids (GB200 and GB300 trays,
    NVIDIA/k8s-test-infra#727).  Without a serial number the energy is counted once per host, not once per GPU.
    """
    try:
        return f"module:{text_of(pynvml.nvmlDeviceGetSerial(handle))}"
    except pynvml.NVMLError:
        return f"module:{host}"


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
    instance: int | None  # id of its GPU instance, if it may be read


def slice_of(handle: Any) -> Slice | None:
    """Return the slice of a handle, or ``None`` for a whole GPU."""
    try:
        if not _is_slice(handle):
            return None
    except LACKING:
        return None
    gpu = gpu_of_slice(handle)
    own, whole, parts = _energy_share(handle, gpu)
    note = f"{own}/{whole} of {_uuid_or_the_gpu(gpu)}'s energy, by {parts}"
    return Slice(gpu, own / whole, note, _instance_of(handle))


def _uuid_or_the_gpu(gpu: Any) -> str:
    """Return the UUID of a GPU; a container may not be allowed to read that of a slice's GPU."""
    with suppress(pynvml.NVMLError):
        return text_of(pynvml.nvmlDeviceGetUUID(gpu))
    return "the GPU"


def gpu_of_slice(handle: Any) -> Any:
    return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)


def _instance_of(handle: Any) -> int | None:
    with suppress(pynvml.NVMLError):
        return int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    return None


def _energy_share(handle: Any, gpu: Any) -> tuple[int, int, str]:
    """Return a slice's share of its GPU as numerator, denominator, and the name of the counted parts."""
    max_slices, total_bytes = _max_slices_and_memory(gpu)
    own_uuid = text_of(pynvml.nvmlDeviceGetUUID(handle))
    slices = _slices_by_uuid(gpu, max_slices) | {own_uuid: handle}
    sizes = {uuid: _size(mig_slice) for uuid, mig_slice in slices.items()}
    compute_slices = {uuid: count for uuid, (count, _, _) in sizes.items()}
    if not all(compute_slices.values()):
        return 1, len(slices), "number of slices"
    # The compute instances of a GPU instance share its memory.
    taken_bytes = sum({instance: memory_bytes for _, instance, memory_bytes in sizes.values()}.values())
    is_full = total_bytes - taken_bytes < total_bytes * _MIN_MEMORY_SHARE
    whole = sum(compute_slices.values()) if is_full else max(sum(compute_slices.values()), max_slices)
    return compute_slices[own_uuid], whole, "compute slices"


def _max_slices_and_memory(gpu: Any) -> tuple[int, int]:
    """Return the maximal number of slices of a GPU (equal to its number of compute slices), and its memory in bytes.

    If the memory may not be read, it is taken as so large that there is room for other slices.
    """
    max_slices, total_bytes = _USUAL_MAX_SLICES, 2**64
    with suppress(pynvml.NVMLError):
        max_slices = pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)
        total_bytes = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    return max_slices, total_bytes


def _slices_by_uuid(gpu: Any, max_slices: int) -> dict[str, Any]:
    slices = {}
    for index in range(max_slices):
        with suppress(pynvml.NVMLError):  # no slice has this index
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
            slices[text_of(pynvml.nvmlDeviceGetUUID(handle))] = handle
    return slices


def _size(handle: Any) -> tuple[int, int | None, int]:
    """Return the number of compute slices, the GPU instance and the memory of a slice; 0, None and 0 if unknown."""
    try:
        attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    except pynvml.NVMLError:
        return 0, None, 0
    return int(attributes.computeInstanceSliceCount), _instance_of(handle), int(attributes.memorySizeMB) << 20
