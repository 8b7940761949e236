"""An NVIDIA GPU, or a MIG slice of one, read through NVML and known by its UUID alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pynvml

from effllm.devices import DeviceUnavailable, Site
from effllm.devices._nvml_gpm import Gpm, open_gpm
from effllm.devices._nvml_identity import choose_uuid, find, text_of
from effllm.devices._nvml_power import LACKING, NotAvailable, Power, known
from effllm.devices._nvml_slices import Slice, slice_of
from effllm.schema import COUNTER, GPU, INSTANT, MODULE, Device, Sample

__all__ = ["NvmlReader", "choose_uuid", "open_device"]

_ADVICE = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 is not here: install the NVIDIA driver, "
    "or start the container with the driver capability 'utility'",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded: load it, or choose another device",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA library and the loaded driver differ in version: "
    "reload the driver or reboot",
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not open the NVIDIA driver: grant access to /dev/nvidia*",
}

# Initialising NVML on a broken driver can take seconds, so a lost GPU is sought ever more rarely.
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0

#: What changes seldom is asked seldom.
_SELDOM_S = 10.0

#: Clocks event reasons that slow a GPU down; being idle, or told to run at a clock, does not.
_THROTTLES = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
}

#: Powers that stand beside the one that energy is made of.
_POWER_GAUGES = ("memory_power_w", "module_power_w", "power_average_w")

Quantity = Callable[[Any], float]


def _utilization(handle: Any) -> float:
    # The mean over the driver's own last period, 1/6 s to 1 s by model: close to the mean since the
    # sample before at one sample per second.
    percent = known(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, 32)
    if percent > 100:
        raise NotAvailable(f"NVML gave a utilization of {percent} %")
    return percent / 100


def _memory(handle: Any) -> Any:
    # The first version counts what the driver keeps for itself as used.
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _power_limit_w(handle: Any) -> float:
    return known(pynvml.nvmlDeviceGetEnforcedPowerLimit(handle), 32) / 1e3


def _ecc_errors(handle: Any) -> float:
    kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return float(pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, since))


def _throttles(handle: Any) -> float:
    return float(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))


#: Gauges of the chip, each in base units.
_CHIP: dict[str, Quantity] = {
    "sm_clock_hz": lambda handle: known(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM), 32) * 1e6,
    "memory_clock_hz": lambda handle: known(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM), 32) * 1e6,
    "temperature_c": lambda handle: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
}


def _offers(handle: Any, quantity: Callable[[Any], Any]) -> bool:
    try:
        quantity(handle)
    except LACKING:
        return False
    except (pynvml.NVMLError, NotAvailable):
        return True  # it has it, and fails just now
    return True


def _or_none(quantity: Callable[[], float]) -> float | None:
    try:
        return quantity()
    except (pynvml.NVMLError, NotAvailable):
        return None


class _Xid:
    """Critical errors of a GPU, as NVML announces them."""

    def __init__(self, handle: Any) -> None:
        self._set: Any = None
        with suppress(pynvml.NVMLError):
            self._set = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, self._set)

    def read(self) -> list[tuple[str, str]]:
        events: list[tuple[str, str]] = []
        with suppress(pynvml.NVMLError):  # a time-out: nothing more has happened
            while self._set is not None and len(events) < 16:
                data = pynvml.nvmlEventSetWait_v2(self._set, 0)
                events.append(("xid", f"Xid {data.eventData}: a critical error of the GPU, see the driver's log"))
        return events

    def close(self) -> None:
        if self._set is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._set)
            self._set = None


class NvmlReader:
    """An open GPU; while it is lost every quantity fails, and NVML is initialised anew now and then."""

    def __init__(self, handle: Any, site: Site, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._retry_at_s = clock()
        self._retry_delay_s = _FIRST_RETRY_S
        self._open = True
        self._bind(handle)
        self._memory = _offers(handle, _memory)
        self._utilization = self._slice is None and _offers(handle, _utilization)
        self._chip = {name: read for name, read in _CHIP.items() if _offers(self._chip_handle, read)}
        self._throttle = _offers(self._chip_handle, _throttles)
        self._limit_w = _or_none(lambda: _power_limit_w(self._chip_handle))
        self._ecc_errors = _or_none(lambda: _ecc_errors(self._chip_handle))
        self._seldom_at_s = clock()
        self._power.probe_scope()
        if site.power_scope == GPU and self._power.scope == MODULE and "power_w" in self._power.names:
            self._power.scope, self._power.method = GPU, INSTANT
        self.device = self._describe(site)

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return the values of this moment; a quantity that fails is ``None``, with the reason beside it."""
        sample, failures = self._read_all()
        if failures and sample.memory_bytes is sample.power_w is sample.energy_j is None and self._reopen():
            sample, failures = self._read_all()
        if sample.memory_bytes is not None or sample.energy_j is not None:
            self._retry_delay_s = _FIRST_RETRY_S
        return sample, failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return energy and power alone, in one call, for the edges of windows."""
        values, failures, time_ns = self._read_power()
        return self._sample(time_ns, values, {}, energy_only=True), failures

    def close(self) -> None:
        """Let NVML go; may be called twice."""
        if self._open:
            self._open = False
            self._unbind()
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()

    # --- opening ---

    def _bind(self, handle: Any) -> None:
        self._handle = handle
        self._slice: Slice | None = slice_of(handle)
        self._chip_handle = self._slice.parent if self._slice else handle
        self._share = self._slice.share if self._slice else 1.0
        self._power = Power(self._chip_handle, text_of(pynvml.nvmlDeviceGetName(self._chip_handle)))
        self._gpm: Gpm | None = open_gpm(self._chip_handle, self._slice.instance if self._slice else None)
        self._xid = _Xid(self._chip_handle)

    def _unbind(self) -> None:
        if self._gpm:
            self._gpm.close()
        self._xid.close()

    def _describe(self, site: Site) -> Device:
        power, key = self._power, text_of(pynvml.nvmlDeviceGetUUID(self._handle))
        total_bytes = _or_none(lambda: float(known(_memory(self._handle).total, 64)))
        return Device(
            key=key,
            kind="nvml",
            name=text_of(pynvml.nvmlDeviceGetName(self._handle)),
            memory_total_bytes=None if total_bytes is None else int(total_bytes),
            power_limit_w=None if self._limit_w is None else self._limit_w * self._share,
            energy_method=power.method,
            power_scope=power.scope if power.method else None,
            not_measured=self._not_measured(),
            energy_key=self._module_key(site) if power.scope == MODULE else "",
            energy_note=self._slice.note if self._slice else "",
            driver=text_of(pynvml.nvmlSystemGetDriverVersion()),
        )

    def _module_key(self, site: Site) -> str:
        """Return what all GPUs of a module share, by which its energy is counted once."""
        for ask in (pynvml.nvmlDeviceGetSerial, pynvml.nvmlDeviceGetModuleId):
            with suppress(pynvml.NVMLError):
                answer = ask(self._chip_handle)
                return f"module:{site.host}:{text_of(answer) if isinstance(answer, str | bytes) else answer}"
        return f"module:{site.host}"  # better once per host than once per GPU

    def _not_measured(self) -> tuple[str, ...]:
        sentences = []
        if not self._memory:
            sentences.append("memory: NVML does not give this GPU's")
        if self._slice:
            sentences.append("utilization: NVML has none for a MIG slice")
        elif not self._utilization:
            sentences.append("utilization: NVML does not give this GPU's")
        if not self._power.names & {"power_w", "power_average_w"}:
            sentences.append("power: NVML does not give this GPU's")
        if self._power.method is None:
            sentences.append("energy: NVML gives neither an energy counter nor the power of this GPU")
        return tuple(sentences)

    # --- reading ---

    def _read_power(self) -> tuple[dict[str, float], dict[str, str], int]:
        failures: dict[str, str] = {}
        values, time_ns = self._power.read(failures)
        if self._power.scope == MODULE and "module_power_w" in values:
            values["power_w"] = values["module_power_w"]  # the power of what the counter counts
        for name in _POWER_GAUGES if "power_w" in self._power.names else ():
            failures.pop(name, None)  # nothing is made of it but a gauge
        return values, failures, time_ns

    def _read_all(self) -> tuple[Sample, dict[str, str]]:
        values, failures, time_ns = self._read_power()
        gauges: dict[str, float] = {name: values[name] for name in _POWER_GAUGES[:2] if name in values}
        if self._memory:
            self._try("memory_bytes", lambda: self._read_memory(values, gauges), failures)
        if self._utilization:
            self._try("utilization", lambda: values.__setitem__("utilization", _utilization(self._handle)), failures)
        self._try("gauges", lambda: self._read_chip(gauges), failures)
        throttled_by = None
        if self._throttle and (bits := _or_none(lambda: _throttles(self._chip_handle))) is not None:
            throttled_by = tuple(reason for bit, reason in _THROTTLES.items() if int(bits) & bit)
        if not values:
            failures.pop("gauges", None)  # the GPU is gone, and that is told already
        sample = self._sample(time_ns, values, gauges, throttled_by=throttled_by, events=self._read_seldom())
        return sample, failures

    def _sample(
        self,
        time_ns: int,
        values: dict[str, float],
        gauges: dict[str, float],
        *,
        throttled_by: tuple[str, ...] | None = None,
        events: tuple[tuple[str, str], ...] = (),
        energy_only: bool = False,
    ) -> Sample:
        share = self._share
        power_w, average_w, energy_j = (values.get(name) for name in ("power_w", "power_average_w", "energy_j"))
        return Sample(
            time_ns=time_ns,
            memory_bytes=values.get("memory_bytes"),
            utilization=values.get("utilization"),
            power_w=None if power_w is None else power_w * share,
            energy_j=None if energy_j is None or self._power.method != COUNTER else energy_j * share,
            power_average_w=None if average_w is None else average_w * share,
            gauges=gauges,
            throttled_by=throttled_by,
            events=events,
            energy_only=energy_only,
        )

    def _try(self, name: str, read: Callable[[], None], failures: dict[str, str]) -> None:
        try:
            read()
        except (pynvml.NVMLError, NotAvailable) as error:
            failures[name] = str(error)

    def _read_memory(self, values: dict[str, float], gauges: dict[str, float]) -> None:
        memory = _memory(self._handle)
        values["memory_bytes"] = float(known(memory.used, 64))
        if hasattr(memory, "reserved"):
            gauges["memory_reserved_bytes"] = float(memory.reserved)

    def _read_chip(self, gauges: dict[str, float]) -> None:
        if self._limit_w is not None:
            gauges["power_limit_w"] = self._limit_w * self._share
        for name, read in self._chip.items():
            gauges[name] = read(self._chip_handle)
        if self._gpm:
            gauges.update(self._gpm.read())

    def _read_seldom(self) -> tuple[tuple[str, str], ...]:
        """Return what has happened to the GPU, and look whether its limit has been changed."""
        now_s = self._clock()
        if now_s < self._seldom_at_s:
            return ()
        self._seldom_at_s = now_s + _SELDOM_S
        events = self._xid.read()
        if self._limit_w is not None:
            limit_w = _or_none(lambda: _power_limit_w(self._chip_handle))
            if limit_w is not None and limit_w != self._limit_w:
                events.append(("power_limit", f"the power limit went from {self._limit_w:g} W to {limit_w:g} W"))
                self._limit_w = limit_w
        if self._ecc_errors is not None:
            errors = _or_none(lambda: _ecc_errors(self._chip_handle))
            if errors is not None and errors > self._ecc_errors:
                events.append(("ecc", f"{errors - self._ecc_errors:.0f} uncorrected memory errors"))
            self._ecc_errors = self._ecc_errors if errors is None else errors
        return tuple(events)

    # --- a lost GPU ---

    def _reopen(self) -> bool:
        """Initialise NVML anew where it is time to, since a lost GPU's handle never works again."""
        now_s = self._clock()
        if not self._open or now_s < self._retry_at_s:
            return False
        self._retry_at_s = now_s + self._retry_delay_s
        self._retry_delay_s = min(2 * self._retry_delay_s, _LAST_RETRY_S)
        self._unbind()
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        power = self._power
        try:
            pynvml.nvmlInit()
            self._bind(pynvml.nvmlDeviceGetHandleByUUID(self.device.key))
        except pynvml.NVMLError:
            return False  # the failures that led here are told already
        # What it can is what it could: a driver that is just coming back denies much.
        power.handle, self._power = self._chip_handle, power
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
        return NvmlReader(find(site), site, clock)
    except (pynvml.NVMLError, DeviceUnavailable) as error:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
        if isinstance(error, DeviceUnavailable):
            raise
        raise DeviceUnavailable(f"NVML finds no readable GPU for local rank {site.local_rank}: {error}") from error
