"""What a rank can sample.  A name in ``EFFICIENTLLM_DEVICE`` is a file in this folder.

Each file has one function, ``open_device(site: Site) -> Reader``, which raises `DeviceUnavailable`
with one sentence where the device cannot be read here.  An optional library is imported only by the
file that needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass, field
from typing import Protocol

from effllm.schema import Device, Sample


class DeviceUnavailable(Exception):
    """The device cannot be read here; the message is one sentence that says why and what to do."""


@dataclass(frozen=True)
class Site:
    """What a device file may know about the rank that it samples for."""

    local_rank: int = 0
    trainer_pid: int = 0
    host: str = ""
    cuda_uuid: str = ""  # torch's current device, where the trainer has one
    cuda_pci_bus_id: str = ""
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES, None where unset
    rocr_visible_devices: str | None = None  # ROCR_VISIBLE_DEVICES, within which the next one counts
    hip_visible_devices: str | None = None  # HIP_VISIBLE_DEVICES, which outranks CUDA_VISIBLE_DEVICES on ROCm
    power_scope: str = "auto"  # which scope is wanted, where a device has more than one
    excluded_pids: frozenset[int] = field(default_factory=frozenset)  # our own processes


class Reader(Protocol):
    """An open device."""

    device: Device

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return a sample, and for each quantity that failed to read this time, its field's name and the reason.

        A quantity that the device does not have is ``None`` and no failure.  Never raises.
        """

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return energy and power alone, as cheaply as can be, in a sample marked ``energy_only``.

        A device to which all costs the same may leave this method out.
        """

    def close(self) -> None:
        """Release the device; may be called twice."""


def device_names() -> list[str]:
    """Return the names of all device files, without importing them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def open_device(name: str, site: Site) -> Reader:
    """Open the device ``name``; ``auto`` is nvml where the driver is, else host.

    Raises:
        DeviceUnavailable: no such file, its library is missing, or the device cannot be read here.
    """
    if name == "auto":
        try:
            return open_device("nvml", site)
        except DeviceUnavailable:
            return open_device("host", site)
    if name not in device_names():
        raise DeviceUnavailable(f"there is no device {name!r}; there are: {', '.join(device_names())}")
    try:
        module = importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise DeviceUnavailable(f"device {name!r} needs a package that is not installed: {error}") from error
    reader: Reader = module.open_device(site)
    return reader
