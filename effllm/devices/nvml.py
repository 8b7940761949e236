"""An NVIDIA GPU, or a MIG slice of one, read through NVML and known by its UUID alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pynvml

from effllm.devices import DeviceUnavailable, Site
from effllm.schema import Device, Sample

_ADVICE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not here: install the NVIDIA driver, "
    "or start the container with the driver capability 'utility'",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it, or choose another device",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded driver differ in version: "
    "reload the driver or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver: grant access to /dev/nvidia*",
}

_LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)

# Initialising NVML on a broken driver can take seconds, so a lost GPU is sought ever more rarely.
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0


class _NotAvailable(Exception):
    """NVML said yes, and gave the value that means "not available"."""


def _known(value: int, bits: int) -> int:
    if value == 2**bits - 1:
        raise _NotAvailable(f"NVML gave {value:#x}, its mark for a value that is not available")
    return value


def _memory_bytes(handle: Any) -> float:
    return float(_known(pynvml.nvmlDeviceGetMemoryInfo(handle).used, 64))


def _utilization(handle: Any) -> float:
    # The mean over the driver's own last period, 1/6 s to 1 s by model: close to the mean since the
    # sample before at one sample per second.
    percent = _known(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, 32)
    if percent > 100:
        raise _NotAvailable(f"NVML gave a utilization of {percent} %")
    return percent / 100


def _power_w(handle: Any) -> float:
    return _known(pynvml.nvmlDeviceGetPowerUsage(handle), 32) / 1e3


def _energy_j(handle: Any) -> float:
    return _known(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), 64) / 1e3


def _memory_total_bytes(handle: Any) -> float:
    return float(_known(pynvml.nvmlDeviceGetMemoryInfo(handle).total, 64))


def _power_limit_w(handle: Any) -> float:
    return _known(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle), 32) / 1e3


Quantity = Callable[[Any], float]

_QUANTITIES: dict[str, Quantity] = {
    "memory_bytes": _memory_bytes,
    "utilization": _utilization,
    "power_w": _power_w,
    "energy_j": _energy_j,
}


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


def _text(answer: str | bytes) -> str:
    return answer.decode() if isinstance(answer, bytes) else answer  # older releases of pynvml give bytes


def _uuids_in_bus_order() -> list[str]:
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        # A GPU that the container hides, or that has fallen off the bus, is not in CUDA's order either.
        with suppress(pynvml.NVMLError_NoPermission, pynvml.NVMLError_GpuIsLost):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            pci = pynvml.nvmlDeviceGetPciInfo(handle)
            found.append(((pci.domain, pci.bus, pci.device), _text(pynvml.nvmlDeviceGetUUID(handle))))
    return [uuid for _, uuid in sorted(found)]


def _find(site: Site) -> Any:
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


def _is_slice(handle: Any) -> bool:
    try:
        answer = pynvml.nvmlDeviceIsMigDeviceHandle(handle)
    except _LACKING:
        return False
    return bool(getattr(answer, "value", answer))


def _has(handle: Any, quantity: Quantity) -> bool:
    try:
        quantity(handle)
    except _LACKING:
        return False
    except (pynvml.NVMLError, _NotAvailable):
        return True  # it has it, and fails just now
    return True


def _or_none(handle: Any, quantity: Quantity) -> float | None:
    try:
        return quantity(handle)
    except (pynvml.NVMLError, _NotAvailable):
        return None


def _not_measured(is_slice: bool, fields: set[str]) -> tuple[str, ...]:
    if is_slice:
        return (
            "utilization: NVML has none for a MIG slice",
            "energy: that of a MIG slice is not told apart from its GPU's yet",
        )
    sentences = {
        "memory_bytes": "memory: NVML does not give this GPU's",
        "utilization": "utilization: NVML does not give this GPU's",
        "power_w": "power: NVML does not give this GPU's",
    }
    missing = [sentence for field, sentence in sentences.items() if field not in fields]
    if not fields & {"power_w", "energy_j"}:
        missing.append("energy: NVML gives neither an energy counter nor the power of this GPU")
    return tuple(missing)


def _describe(handle: Any, is_slice: bool, fields: set[str]) -> Device:
    method = "counter" if "energy_j" in fields else "power" if "power_w" in fields else None
    memory_total_bytes = _or_none(handle, _memory_total_bytes)
    return Device(
        key=_text(pynvml.nvmlDeviceGetUUID(handle)),
        kind="nvml",
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_total_bytes=None if memory_total_bytes is None else int(memory_total_bytes),
        power_limit_w=None if is_slice else _or_none(handle, _power_limit_w),
        energy_method=method,
        power_scope="gpu" if method else None,
        not_measured=_not_measured(is_slice, fields),
    )


class NvmlReader:
    """An open GPU; while it is lost every quantity fails, and NVML is initialised anew now and then."""

    def __init__(self, handle: Any, clock: Callable[[], float]) -> None:
        is_slice = _is_slice(handle)
        offered = {"memory_bytes": _memory_bytes} if is_slice else _QUANTITIES
        self._quantities = {field: read for field, read in offered.items() if _has(handle, read)}
        self.device = _describe(handle, is_slice, set(self._quantities))
        self._handle = handle
        self._clock = clock
        self._retry_at_s = clock()
        self._retry_delay_s = _FIRST_RETRY_S
        self._open = True

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return the values of this moment; a quantity that fails is ``None``, with the reason beside it."""
        before_ns = time.monotonic_ns()
        values, failures = self._read_quantities()
        if failures and not values and self._reopen():
            before_ns = time.monotonic_ns()
            values, failures = self._read_quantities()
        if values:
            self._retry_delay_s = _FIRST_RETRY_S
        sample = Sample(
            time_ns=(before_ns + time.monotonic_ns()) // 2,
            memory_bytes=values.get("memory_bytes"),
            utilization=values.get("utilization"),
            power_w=values.get("power_w"),
            energy_j=values.get("energy_j"),
        )
        return sample, failures

    def close(self) -> None:
        """Let NVML go; may be called twice."""
        if self._open:
            self._open = False
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    def _read_quantities(self) -> tuple[dict[str, float], dict[str, str]]:
        values, failures = {}, {}
        for field, quantity in self._quantities.items():
            try:
                values[field] = quantity(self._handle)
            except (pynvml.NVMLError, _NotAvailable) as error:
                failures[field] = str(error)
        return values, failures

    def _reopen(self) -> bool:
        """Initialise NVML anew where it is time to, since a lost GPU's handle never works again."""
        now_s = self._clock()
        if not self._open or now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(2 * self._retry_delay_s, _LAST_RETRY_S)
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.device.key)
        except pynvml.NVMLError:
            return False  # the failures that led here are told already
        return True


def open_device(site: Site, *, clock: Callable[[], float] = time.monotonic) -> NvmlReader:
    """Open the GPU, or the slice, that this rank computes on.

    Raises:
        DeviceUnavailable: there is no NVML here, or no GPU for this rank.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise DeviceUnavailable(_ADVICE.get(error.value, f"NVML does not start: {error}")) from error
    try:
        return NvmlReader(_find(site), clock)
    except (pynvml.NVMLError, DeviceUnavailable) as error:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        if isinstance(error, DeviceUnavailable):
            raise
        raise DeviceUnavailable(f"NVML finds no readable GPU for local rank {site.local_rank}: {error}") from error
