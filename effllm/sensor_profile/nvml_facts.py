"""NVML's data of a GPU, and the duration of each NVML call, without data that identifies a machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pynvml

from effllm.devices._nvml_identity import text_of
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
_ARCHITECTURE = "NVML_DEVICE_ARCH_"
_ARCHITECTURES = {
    number: name.removeprefix(_ARCHITECTURE).title()
    for name, number in vars(pynvml).items()
    if name.startswith(_ARCHITECTURE)
}


class Facts:
    """NVML's data of one GPU or of a slice."""

    def __init__(self, uuid: str) -> None:
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def traits(self) -> dict[str, str]:
        asked = {
            "architecture": lambda: _architecture(pynvml.nvmlDeviceGetArchitecture(self._handle)),
            "CUDA of the driver": lambda: "{}.{}".format(*divmod(pynvml.nvmlSystemGetCudaDriverVersion() // 10, 100)),
            "NVML": lambda: text_of(pynvml.nvmlSystemGetNVMLVersion()),
            "VBIOS": lambda: text_of(pynvml.nvmlDeviceGetVbiosVersion(self._handle)),
            "default power limit": lambda: f"{pynvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle) / 1e3:g} W",
            "largest SM clock": lambda: f"{pynvml.nvmlDeviceGetMaxClockInfo(self._handle, pynvml.NVML_CLOCK_SM)} MHz",
            "ECC": lambda: _switch(pynvml.nvmlDeviceGetEccMode(self._handle)[0]),
            "persistence": lambda: _switch(pynvml.nvmlDeviceGetPersistenceMode(self._handle)),
            "MIG": lambda: _switch(pynvml.nvmlDeviceGetMigMode(self._handle)[0]),
        }
        return {name: answer for name, ask in asked.items() if (answer := _or_none(ask)) is not None}

    def processes(self) -> int | None:
        """Return the number of compute processes on the GPU; ``None`` if NVML does not report it."""
        found: int | None = _or_none(lambda: len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle)))
        return found

    def fields(self) -> list[FieldAnswer]:
        handle = self._handle
        asked: list[tuple[str, str, Callable[[], Any]]] = [
            (name, scope, partial(self._field, name, scope))
            for name, (_, scopes) in _FIELDS.items()
            for scope in scopes
        ]
        asked += [
            ("energy (own call)", "gpu", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)),
            ("power usage (own call)", "gpu", lambda: pynvml.nvmlDeviceGetPowerUsage(handle)),
            (
                "buffer of power samples",
                "gpu",
                lambda: pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, 0),
            ),
        ]
        return [FieldAnswer(name, scope, _answer(ask)) for name, scope, ask in asked]

    def calls(self, sleep: Callable[[float], None] = time.sleep) -> list[DriverCall]:
        """Return the duration of each call; between two calls there is a pause of ``APART_S``."""
        return [call for name, ask in self._timed() if (call := timed(name, ask, sleep)) is not None]

    def _field(self, name: str, scope: str) -> Any:
        """Return the value of a field, a C union.

        Raises:
            pynvml.NVMLError: the driver does not have the field for this scope.
        """
        (answer,) = pynvml.nvmlDeviceGetFieldValues(self._handle, [(_FIELDS[name][0], _SCOPES[scope])])
        if answer.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(answer.nvmlReturn)
        return answer.value

    def _timed(self) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def timed(name: str, ask: Callable[[], Any], sleep: Callable[[float], None] = time.sleep) -> DriverCall | None:
    spent_s = []
    try:
        ask()
        for _ in range(REPEATS):
            began_s = time.perf_counter()
            ask()
            spent_s.append(time.perf_counter() - began_s)
            sleep(APART_S)
    except pynvml.NVMLError:
        return None
    return DriverCall(name, statistics.median(spent_s), max(spent_s), REPEATS)


def _answer(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except pynvml.NVMLError as error:
        return str(error)
    return "ok"


def _or_none(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _architecture(number: int) -> str:
    return str(_ARCHITECTURES.get(number, f"number {number}"))


def _switch(is_on: int) -> str:
    return "on" if is_on else "off"
