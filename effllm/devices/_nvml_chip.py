"""What a GPU is doing: memory, utilization, clocks, temperature, and what slows its clocks down."""

from __future__ import annotations

import functools
from ctypes import c_uint, c_ulonglong
from functools import partial
from typing import Any

import pynvml

from effllm.devices._nvml_call import MOST_64, Quantity, offered, unpacker

#: Clocks event reasons that slow a GPU down; being idle, or told to run at a clock, does not.
_THROTTLES = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power_cap",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "hw_thermal",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power_brake",
}


class Chip:
    """What a GPU is doing; of a slice its own memory, and all else of its GPU.

    Args:
        own: handle of the GPU or the slice.
        gpu: handle of the GPU.
    """

    def __init__(self, own: Any, gpu: Any) -> None:
        info, self._memory = _memory(own)
        self._reserved = unpacker(info, "reserved") if self._memory is not None and hasattr(info, "reserved") else None
        self._utilization = _utilization(own) if own is gpu else None  # NVML has none for a slice
        self._throttles = _throttles(gpu)
        gauges = (
            _clock("sm_clock_hz", gpu, pynvml.NVML_CLOCK_SM),
            _clock("memory_clock_hz", gpu, pynvml.NVML_CLOCK_MEM),
            _temperature(gpu),
        )
        self._gauges = [gauge for gauge in gauges if gauge is not None]
        self.has_memory = self._memory is not None
        self.has_utilization = self._utilization is not None
        self.memory_total_bytes = info.total if 0 < info.total <= MOST_64 else None

    def memory_bytes(self, failures: dict[str, str]) -> float | None:
        """Return the memory in use."""
        return None if self._memory is None else self._memory.read(failures)

    def utilization(self, failures: dict[str, str]) -> float | None:
        """Return the share of time in which anything ran: the mean over the driver's last 1/6 s to 1 s, by model.

        At one sample per second that is close to the mean since the sample before.
        """
        return None if self._utilization is None else self._utilization.read(failures)

    def throttled_by(self, failures: dict[str, str]) -> tuple[str, ...] | None:
        """Return what slows the clocks down."""
        reasons = None if self._throttles is None else self._throttles.read(failures)
        return None if reasons is None else _names(int(reasons))

    def enter_gauges(self, gauges: dict[str, float], failures: dict[str, str]) -> None:
        """Enter clocks and temperature, and what the driver keeps of the memory that was just read for itself."""
        for gauge in self._gauges:
            value = gauge.read(failures)
            if value is not None:
                gauges[gauge.name] = value
        if self._reserved is not None and "memory_bytes" not in failures:
            (reserved_bytes,) = self._reserved()
            if reserved_bytes <= MOST_64:
                gauges["memory_reserved_bytes"] = float(reserved_bytes)


@functools.lru_cache(maxsize=64)
def _names(reasons: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _THROTTLES.items() if reasons & bit)


def _memory(handle: Any) -> tuple[Any, Quantity | None]:
    """Return where NVML tells of memory, and the quantity that has it told."""
    info: Any = pynvml.c_nvmlMemory_v2_t(version=pynvml.nvmlMemory_v2)
    memory = partial(Quantity, "memory_bytes", part="used", most=MOST_64)
    used = offered(partial(memory, "nvmlDeviceGetMemoryInfo_v2", handle, room=info))
    if used is None:  # a driver before 510, which counts what it keeps for itself as used
        info = pynvml.c_nvmlMemory_t()
        used = offered(partial(memory, "nvmlDeviceGetMemoryInfo", handle, room=info))
    return info, used


def _utilization(handle: Any) -> Quantity | None:
    room = pynvml.c_nvmlUtilization_t()
    percent = partial(Quantity, room=room, part="gpu", most=100, divisor=100)
    return offered(partial(percent, "utilization", "nvmlDeviceGetUtilizationRates", handle))


def _clock(name: str, handle: Any, clock: int) -> Quantity | None:
    megahertz = partial(Quantity, room=c_uint(), most=100_000, divisor=1e-6)
    return offered(partial(megahertz, name, "nvmlDeviceGetClockInfo", handle, c_uint(clock)))


def _temperature(handle: Any) -> Quantity | None:
    celsius = partial(Quantity, room=c_uint(), most=1000)
    return offered(
        partial(celsius, "temperature_c", "nvmlDeviceGetTemperature", handle, c_uint(pynvml.NVML_TEMPERATURE_GPU))
    )


def _throttles(handle: Any) -> Quantity | None:
    reasons = partial(Quantity, "throttled_by", room=c_ulonglong())
    return offered(
        partial(reasons, "nvmlDeviceGetCurrentClocksEventReasons", handle),
        partial(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons", handle),  # its name before driver 535
    )
