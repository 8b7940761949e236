"""Which GPU, or slice of one, a rank computes on: by UUID and bus id, never by index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pynvml

from effllm.devices import DeviceUnavailable, Site


def choose_uuid(visible: str | None, local_rank: int, uuids: Sequence[str]) -> str:
    """Return the UUID of the device that CUDA_VISIBLE_DEVICES gives to a local rank.

    ``uuids`` are those of all GPUs in PCI bus order, which is CUDA's own under
    CUDA_DEVICE_ORDER=PCI_BUS_ID; its default, fastest first, is the same order on a node of equal GPUs.

    Raises:
        DeviceUnavailable: no GPU is visible to this rank.
    """
    entries = list(uuids) if visible is None else [entry.strip() for entry in visible.split(",")]
    shown = list(_until_invalid(entries, uuids))
    # A launcher may show each rank its own GPU only; the local rank then counts ranks, not entries.
    position = 0 if len(entries) == 1 else local_rank
    if position < len(shown):
        return shown[position]
    source = "this machine" if visible is None else f"CUDA_VISIBLE_DEVICES={visible!r}"
    number = f"only {len(shown)} usable" if shown else "no usable"
    raise DeviceUnavailable(f"local rank {local_rank} has no GPU: {source} shows {number} of the {len(uuids)} here")


def _until_invalid(entries: Sequence[str], uuids: Sequence[str]) -> Iterator[str]:
    for entry in entries:
        if entry.startswith("MIG-"):
            yield entry
        elif entry.isdecimal() and int(entry) < len(uuids):
            yield uuids[int(entry)]
        elif entry.startswith("GPU-") and len(alike := [uuid for uuid in uuids if uuid.startswith(entry)]) == 1:
            yield alike[0]
        else:
            return  # as CUDA does: what stands after the first invalid entry is not visible


def text_of(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer  # older releases of pynvml give bytes


def _uuids_in_bus_order() -> list[str]:
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # A GPU that the container hides, or that is broken, is not in CUDA's order either.
        with suppress(pynvml.NVMLError):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pci = pynvml.nvmlDeviceGetPciInfo(handle)
            found.append(((pci.domain, pci.bus, pci.device), text_of(pynvml.nvmlDeviceGetUUID(handle))))
    return [uuid for _, uuid in sorted(found)]


def find(site: Site) -> Any:
    """Return the handle of the rank's device: by what torch says, else by what CUDA shows to the rank."""
    # The UUID that torch gives for a slice is its GPU's under some CUDA versions, so a slice goes by its own.
    if (site.cuda_uuid or site.cuda_pci_bus_id) and not (site.visible_devices or "").strip().startswith("MIG-"):
        return _find_as_torch_says(site)
    uuid = choose_uuid(site.visible_devices, site.local_rank, _uuids_in_bus_order())
    return pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _find_as_torch_says(site: Site) -> Any:
    uuid = site.cuda_uuid
    prefixes = ("",) if uuid.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")
    for name in [prefix + uuid for prefix in prefixes if uuid]:
        with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument):
            return pynvml.nvmlDeviceGetHandleByUUID(name)
    if site.cuda_pci_bus_id:
        return pynvml.nvmlDeviceGetHandleByPciBusId(site.cuda_pci_bus_id)
    raise DeviceUnavailable(f"NVML does not know the GPU {uuid} that torch uses: is it hidden from this container?")


def module_of(handle: Any, host: str) -> str:
    """Return what all GPUs of a module share, by which its energy is counted once.

    They have one serial number, the board's, and module ids of their own (GB200 and GB300 trays,
    NVIDIA/k8s-test-infra#727).  Without it: better once per host than once per GPU.
    """
    try:
        return f"module:{text_of(pynvml.nvmlDeviceGetSerial(handle))}"
    except pynvml.NVMLError:
        return f"module:{host}"
