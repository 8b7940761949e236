"""The devices that a rank can sample.  ``EFFICIENTLLM_DEVICE`` names a file in this folder, or is ``auto``.

Each file has one function, ``open_device(site: Site) -> Reader``, which raises `DeviceUnavailable` if the device
cannot be read here.  An optional library is imported only by the file that needs it.
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

from effllm.config.switches import process_environ
from effllm.records.rank import Device, Sample

#: Devices in the order in which ``auto`` tries them -> files of which one exists while the driver is loaded.
_DRIVER_NODES = {"nvml": ("/dev/nvidiactl", "/dev/dxg"), "amd": ("/dev/kfd",)}  # /dev/dxg: WSL2

_T = TypeVar("_T")


class DeviceUnavailable(Exception):
    """The device cannot be read here; the message is one sentence with the reason and the remedy."""

    driver_works = False  # whether the driver answers, so that the machine has such devices


@dataclass(frozen=True)
class Site:
    """The rank whose device is opened."""

    local_rank: int = 0
    trainer_pid: int = 0
    host: str = ""
    cuda_uuid: str = ""  # UUID of torch's current device, if torch has a device
    cuda_pci_bus_id: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, or None if it is not set
    container_devices: str | None = field(
        default_factory=lambda: process_environ().get("NVIDIA_VISIBLE_DEVICES")
    )  # the MIG slices that a container was given
    rocr_visible_devices: str | None = None  # ROCR_VISIBLE_DEVICES; HIP_VISIBLE_DEVICES selects from this list
    hip_visible_devices: str | None = None  # HIP_VISIBLE_DEVICES; on ROCm it overrides CUDA_VISIBLE_DEVICES
    excluded_pids: frozenset[int] = field(default_factory=frozenset)  # effllm's own processes


class Reader(Protocol):
    """An open device."""

    device: Device

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return a sample, and the failed fields with their reasons.

        A quantity that the device does not have is ``None``; it is not a failure.  This method never raises.
        """

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return only energy and power, as cheaply as possible, in a sample marked ``energy_only``.

        This method is optional; for a device without it, `read` is called.
        """

    def close(self) -> None:
        """Release the device; may be called twice."""


def device_names() -> list[str]:
    """Return the names of all device files, without importing them."""
    return sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg and not module.name.startswith("_")
    )


def open_device(name: str, site: Site) -> Reader:
    """Open the device ``name``.  For ``auto``, open a GPU; if no GPU can be read, open the host.

    Raises:
        DeviceUnavailable: the file or its library is missing, or the device cannot be read here.
    """
    if name == "auto":
        try:
            return open_named_or_any_gpu(name, site)
        except DeviceUnavailable as error:
            host = open_device("host", site)
            if error.driver_works or any(map(_has_driver, _DRIVER_NODES)):  # the machine has a GPU
                not_measured = (*host.device.not_measured, f"GPU: {error}")
                host.device = replace(host.device, not_measured=not_measured)
            return host
    if name not in device_names():
        raise DeviceUnavailable(f"there is no device {name!r}; available devices: {', '.join(device_names())}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise DeviceUnavailable(f"device {name!r} needs a package that is not installed: {error}") from error
    reader: Reader = module.open_device(site)
    return reader


def choose_for_rank(visible: Sequence[_T], num_entries: int, site: Site, source: str, num_gpus: int) -> _T:
    """Return the rank's device among the devices that are visible in the rank's environment.

    A launcher may make only one GPU visible to each rank (``num_entries``, with invalid entries, is 1); this GPU is
    used for any local rank.  ``source`` and ``num_gpus`` (of the machine) are for the message.

    Raises:
        DeviceUnavailable: there is no device for this rank.
    """
    position = 0 if num_entries == 1 else site.local_rank
    if position < len(visible):
        return visible[position]
    raise DeviceUnavailable(
        f"local rank {site.local_rank} has no GPU: {source} shows {len(visible)} of {num_gpus} GPUs"
    )


def open_named_or_any_gpu(name: str, site: Site) -> Reader:
    """Open the device ``name``; for ``auto``, a GPU of any vendor, but never the host.

    Raises:
        DeviceUnavailable: see `open_device`; of ``auto``, that of the vendor whose driver is loaded, else of NVIDIA.
    """
    if name != "auto":
        return open_device(name, site)
    errors = {}
    for gpu in _DRIVER_NODES:
        try:
            return open_device(gpu, site)
        except DeviceUnavailable as error:
            errors[gpu] = error
    raise next((error for gpu, error in errors.items() if error.driver_works or _has_driver(gpu)), errors["nvml"])


def _has_driver(gpu: str) -> bool:
    return any(Path(node).exists() for node in _DRIVER_NODES[gpu])
