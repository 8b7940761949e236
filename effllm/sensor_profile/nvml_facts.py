"""NVML's data of a GPU, and the duration of each NVML call, without data that identifies a machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pynvml

from effllm.sensor_profile.record import DriverCall, FieldAnswer

REPEATS = 50
APART_S = 0.002

_SCOPES = {
    "gpu": pynvml.NVML_POWER_SCOPE_GPU,
    "module": pynvml.NVML_POWER_SCOPE_MODULE,
    "memory": pynvml.NVML_POWER_SCOPE_MEMORY,
}
_FIELDS = {
    "total energy": (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, ("gpu",)),
    "instant power": (pynvml.NVML_FI_DEV_POWER_INSTANT, tuple(_SCOPES)),
    "average power": (pynvml.NVML_FI_DEV_POWER_AVERAGE, tuple(_SCOPES)),
}


class Facts:
    """NVML's data of one GPU or of a slice."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def num_processes(self) -> int | None:
        """Return the number of compute processes on the GPU; ``None`` if NVML does not report it."""
        count: int | None = _or_none(lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)))
        return count

    def field_answers(self) -> list[FieldAnswer]:
        return [
            FieldAnswer(name, scope, self._field_answer(number, scope))
            for name, (number, scopes) in _FIELDS.items()
            for scope in scopes
        ]

    def call_durations(self, sleep: Callable[[float], None] = time.sleep) -> list[DriverCall]:
        """Return the duration of each call; between two calls there is a pause of ``APART_S``."""
        return [call for name, ask in self._named_calls() if (call := timed_call(name, ask, sleep)) is not None]

    def _field_answer(self, number: int, scope: str) -> str:
        """Return "ok" if the driver has a field for a scope, else the error."""
        try:
            (answer,) = pynvml.nvmlDeviceGetFieldValues(self._handle, [(number, _SCOPES[scope])])
        except pynvml.NVMLError as error:
            return str(error)
        return "ok" if answer.nvmlReturn == pynvml.NVML_SUCCESS else str(pynvml.NVMLError(answer.nvmlReturn))

    def _named_calls(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        handle = self._handle
        batch = [(number, _SCOPES["gpu"]) for number, _ in _FIELDS.values()]
        yield "energy", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        yield "power", lambda: pynvml.nvmlDeviceGetPowerUsage(handle)
        yield "fields: energy, both powers", lambda: pynvml.nvmlDeviceGetFieldValues(handle, batch)
        yield "memory", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle)
        yield "utilization", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle)
        yield "SM clock", lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        yield "temperature", lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        yield "clocks event reasons", lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        if _or_none(lambda: pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice):
            sample = pynvml.nvmlGpmSampleAlloc()
            yield "GPM sample", lambda: pynvml.nvmlGpmSampleGet(handle, sample)
            pynvml.nvmlGpmSampleFree(sample)


def timed_call(name: str, ask: Callable[[], Any], sleep: Callable[[float], None] = time.sleep) -> DriverCall | None:
    """Return the median and the longest duration of a call; ``None`` if NVML has an error."""
    durations_s = []
    try:
        ask()
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            ask()
            durations_s.append(time.perf_counter() - began_s)
            sleep(APART_S)
    except pynvml.NVMLError:
        return None
    return DriverCall(name, statistics.median(durations_s), max(durations_s), REPEATS)


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except pynvml.NVMLError:
        return None
