"""The devices that a rank can sample.  A name in ``EFFICIENTLLM_DEVICE`` is a file in this folder.

Each file has one function, ``open_device(site: Site) -> Reader``.  It raises `DeviceUnavailable` with one sentence
if the device cannot be read here.  An optional library is imported only by the file that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from msgspec.structs import replace

from effllm.records.rank import Device, Sample

#: The GPUs that ``auto`` tries, in this order, each with the file that exists while its driver is loaded.
_GPUS = {"nvml": Path("/dev/nvidiactl"), "amd": Path("/dev/kfd")}


_T = TypeVar("_T")


class DeviceUnavailable(Exception):
    """The device cannot be read here; the message is one sentence with the reason and the remedy."""


@dataclass(frozen=True)
class Site:
    """The rank that a device file samples for."""

    local_rank: int = 0
    trainer_pid: int = 0
    host: str = ""
    cuda_uuid: str = ""  # torch's current device, if the trainer has one
    cuda_pci_bus_id: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, None where unset
    rocr_visible_devices: str | None = None  # ROCR_VISIBLE_DEVICES; the next list counts within its devices
    hip_visible_devices: str | None = None  # HIP_VISIBLE_DEVICES; on ROCm it overrides CUDA_VISIBLE_DEVICES
    power_scope: str = "auto"  # the scope to use if a device has more than one
    excluded_pids: frozenset[int] = field(default_factory=frozenset)  # effllm's own processes


class Reader(Protocol):
    """An open device."""

    device: Device

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return a sample, and the failed reads: the reason by the field's name.

        A quantity that the device does not have is ``None`` and not a failure.  Never raises.
        """

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return only energy and power, as cheaply as possible, in a sample marked ``energy_only``.

        Optional: without this method `read` is used.
        """

    def close(self) -> None:
        """Release the device; may be called twice."""


def device_names() -> list[str]:
    """Return the names of all device files, without importing them."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg and not module.name.startswith("_")
    )


def open_device(name: str, site: Site) -> Reader:
    """Open the device ``name``; ``auto`` is a GPU if one can be read, else the host.

    Raises:
        DeviceUnavailable: no such file, its library is missing, or the device cannot be read here.
    """
    if name == "auto":
        try:
            return open_gpu(name, site)
        except DeviceUnavailable as error:
            host = open_device("host", site)
            if any(node.exists() for node in _GPUS.values()):
                missing = (*host.device.not_measured, f"GPU: {error}")
                host.device = replace(host.device, not_measured=missing)
            return host
    if name not in device_names():
        raise DeviceUnavailable(f"there is no device {name!r}; there are: {', '.join(device_names())}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise DeviceUnavailable(f"device {name!r} needs a package that is not installed: {error}") from error
    reader: Reader = module.open_device(site)
    return reader


def shown_to_rank(shown: Sequence[_T], num_entries: int, site: Site, source: str, num_here: int) -> _T:
    """Return the device of a rank among the devices visible in its environment.

    A launcher may show each rank only its own GPU (``num_entries`` is 1): the local rank then counts ranks, not GPUs.

    Raises:
        DeviceUnavailable: there is no device for this rank.
    """
    position = 0 if num_entries == 1 else site.local_rank
    if position < len(shown):
        return shown[position]
    number = f"only {len(shown)} usable" if shown else "no usable"
    raise DeviceUnavailable(f"local rank {site.local_rank} has no GPU: {source} shows {number} of the {num_here} here")


def open_gpu(name: str, site: Site) -> Reader:
    """Open the device ``name``, where ``auto`` is a GPU of any vendor and never the host.

    Raises:
        DeviceUnavailable: as `open_device`; for ``auto``, with the reason of the vendor whose driver is loaded.
    """
    if name != "auto":
        return open_device(name, site)
    errors = {}
    for gpu in _GPUS:
        try:
            return open_device(gpu, site)
        except DeviceUnavailable as error:
            errors[gpu] = error
    raise next((errors[gpu] for gpu, node in _GPUS.items() if node.exists()), errors["nvml"])
