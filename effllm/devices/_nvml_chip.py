"""Memory, utilization, clocks, temperature, power limit, throttling and events (Xid, ECC) of a GPU."""

from __future__ import annotations

import ctypes
import functools
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import Any

import pynvml

from effllm.devices._nvml_call import MAX_VALUE_64, Quantity, first_supported
from effllm.records.rank import Event

#: A critical error often ends the training, so Xids are read often.  The power limit and memory errors rarely change.
XID_EVERY_S, ERRORS_EVERY_S = 1.0, 10.0
_MAX_XIDS_AT_ONCE = 16

MAX_CLOCK_MHZ = 100_000
#: Clocks event reasons of a throttled GPU, but not the reasons "idle" and "clock set by the user".
_THROTTLES = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
    0x200: "board_limit",  # older releases of pynvml have no names for these two
    0x400: "reliability",
}
_PROFILE_PREFIX = "NVML_POWER_PROFILE_"
#: Names of the workload power profiles by number.
_PROFILE_NAMES = {
    number: name.removeprefix(_PROFILE_PREFIX)
    for name, number in vars(pynvml).items()
    if name.startswith(_PROFILE_PREFIX) and name != f"{_PROFILE_PREFIX}MAX" and "_OPERATION_" not in name
}
MAX_LETTERS = 255


class Chip:
    """The readings of a GPU; for a slice, the memory of the slice (``own``) and the other readings of its GPU."""

    def __init__(self, own: Any, gpu: Any) -> None:
        memory = _memory_quantity(own)
        busy = Quantity("utilization", "nvmlDeviceGetUtilizationRates", own, part="gpu", maximum=100, divisor=100)
        utilization = first_supported(busy) if own is gpu else None  # NVML reports no utilization of slices
        self._memory_and_utilization = [quantity for quantity in (memory, utilization) if quantity is not None]
        reasons, celsius = partial(Quantity, "throttled_by"), partial(Quantity, "temperature_c", maximum=1000)
        gauges = (
            first_supported(
                reasons("nvmlDeviceGetCurrentClocksEventReasons", gpu),
                reasons("nvmlDeviceGetCurrentClocksThrottleReasons", gpu),  # the function's name before driver 535
            ),
            _clock_quantity("sm_clock_hz", "nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_SM),
            _clock_quantity("memory_clock_hz", "nvmlDeviceGetClockInfo", gpu, pynvml.NVML_CLOCK_MEM),
            first_supported(celsius("nvmlDeviceGetTemperature", gpu, pynvml.NVML_TEMPERATURE_GPU)),
        )
        self._gauges = [quantity for quantity in gauges if quantity is not None]
        self.has_memory, self.memory_includes_reserve = memory is not None, memory is not None and memory.extra is None
        self.has_utilization = utilization is not None
        self.memory_total_bytes = _read_total_bytes(memory)

    def read_memory_and_utilization(self, values: dict[str, float], failures: dict[str, str]) -> None:
        """Add both by their names in `Sample`, or the reasons for failures.

        ``utilization`` is the share of time with a running kernel, averaged by the driver over 1/6 s to 1 s,
        depending on the model.  With one sample per second, utilization is close to the mean since the last sample.
        """
        for quantity in self._memory_and_utilization:
            quantity.read_into(values, failures)

    def read_gauges(self, values: dict[str, float], failures: dict[str, str]) -> None:
        """Add the clocks event reasons (``throttled_by``), the clocks and the temperature."""
        for quantity in self._gauges:
            quantity.read_into(values, failures)


@functools.lru_cache(maxsize=64)
def throttle_reasons(mask: float) -> tuple[str, ...]:
    return tuple(name for bit, name in _THROTTLES.items() if int(mask) & bit)


def _memory_quantity(handle: Any) -> Quantity | None:
    """Return the quantity of the memory in use, where possible with the memory that the driver reserves."""
    memory = partial(Quantity, "memory_bytes", part="used", maximum=MAX_VALUE_64)
    return first_supported(
        memory("nvmlDeviceGetMemoryInfo", handle, pynvml.nvmlMemory_v2, extra=("memory_reserved_bytes", "reserved")),
        # Drivers before 510 count the memory that they reserve as used.
        memory("nvmlDeviceGetMemoryInfo", handle),
    )


def _read_total_bytes(memory: Quantity | None) -> int | None:
    with suppress(pynvml.NVMLError):
        total_bytes: int = memory.ask().total if memory is not None else 0
        return total_bytes if 0 < total_bytes <= MAX_VALUE_64 else None
    return None


def max_clock_hz(gpu: Any) -> float | None:
    """Return the maximum SM clock, or ``None`` if NVML does not report it."""
    return _read_value(_clock_quantity("hz", "nvmlDeviceGetMaxClockInfo", gpu, pynvml.NVML_CLOCK_SM)) or None


def default_limit_w(gpu: Any) -> float | None:
    """Return the default power limit, or ``None`` if NVML does not report it."""
    limit = Quantity("w", "nvmlDeviceGetPowerManagementDefaultLimit", gpu, divisor=1e3)
    return _read_value(first_supported(limit)) or None


def power_profiles(gpu: Any) -> str | None:
    """Return the enforced workload power profiles, such as "MAX_Q, TRAINING"; ``None`` if NVML does not report them."""
    # AttributeError: an nvidia-ml-py without this structure.
    with suppress(pynvml.NVMLError, AttributeError):
        profiles = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
        pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(gpu, ctypes.byref(profiles))
        words = profiles.enforcedProfilesMask.mask
        enforced = [bit for bit in range(32 * len(words)) if words[bit // 32] >> bit % 32 & 1]
        return ", ".join(_PROFILE_NAMES.get(bit, str(bit)) for bit in enforced)[:MAX_LETTERS] or "none"
    return None


def _clock_quantity(name: str, function: str, handle: Any, clock: int) -> Quantity | None:
    return first_supported(Quantity(name, function, handle, clock, maximum=MAX_CLOCK_MHZ, divisor=1e-6))


class EventPoller:
    """Polls the events of a GPU."""

    def __init__(self, handle: Any, now_s: float) -> None:
        self._handle = handle
        self._events: Any = None  # NVML's set of events, from which critical errors are read
        limit = Quantity("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", handle, divisor=1e3)
        kind, since = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        errors = Quantity("ecc", "nvmlDeviceGetTotalEccErrors", handle, kind, since, maximum=MAX_VALUE_64)
        self._limit, self._errors = first_supported(limit), first_supported(errors)
        self.limit_w, self._num_errors = _read_value(self._limit), _read_value(self._errors)
        self._next_xids_s, self._next_errors_s = now_s, now_s + ERRORS_EVERY_S
        self.open()

    def open(self) -> None:
        """Register for critical errors, if NVML supports this."""
        self.has_xids = False  #: whether NVML reports critical errors; a container may not register for them
        with suppress(pynvml.NVMLError):
            self._events = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(self._handle, pynvml.nvmlEventTypeXidCriticalError, self._events)
            self.has_xids = True

    def poll(self, now_s: float, is_there: bool) -> tuple[Event, ...]:
        """Return the events since the last poll; nothing is read before it is due.

        ``is_there``: whether the GPU answers; of a lost GPU, the last Xids are read at once, and nothing else.
        """
        if now_s < self._next_xids_s and is_there:
            return ()
        self._next_xids_s = now_s + XID_EVERY_S
        events = self._read_xids()
        if now_s >= self._next_errors_s and is_there:
            self._next_errors_s = now_s + ERRORS_EVERY_S
            self.limit_w = _read_value(self._limit) or self.limit_w
            events += self._new_memory_errors()
        return tuple(events)

    def close(self) -> None:
        if self._events is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._events)
            self._events = None

    def _read_xids(self) -> list[Event]:
        numbers: Counter[int] = Counter()
        with suppress(pynvml.NVMLError):  # a timeout means that there are no more events
            while self._events is not None and numbers.total() < _MAX_XIDS_AT_ONCE:
                numbers[pynvml.nvmlEventSetWait_v2(self._events, 0).eventData] += 1
        return [Event(time.time(), "xid", _xid_text(number, times), count=times) for number, times in numbers.items()]

    def _new_memory_errors(self) -> list[Event]:
        before, errors = self._num_errors, _read_value(self._errors)
        if errors is None:
            return []
        self._num_errors = errors  # NVML's count restarts at zero when the driver is loaded again
        new = int(errors - before) if before is not None else 0
        return [Event(time.time(), "ecc", f"{new} uncorrected memory errors", count=new)] if new > 0 else []


def _xid_text(number: int, times: int) -> str:
    times_text = f", {times} times" if times > 1 else ""
    return f"Xid {number}{times_text}: a critical error of the GPU, see the driver's log"


def _read_value(quantity: Quantity | None) -> float | None:
    values: dict[str, float] = {}
    if quantity is not None:
        quantity.read_into(values, {})
    return next(iter(values.values()), None)
