"""Energy and power of a GPU, in one batched call; which scope they are of is found out, not assumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from effllm import hardware
from effllm.schema import AVERAGE, COUNTER, GPU, INSTANT, MODULE

LACKING = (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NoPermission)
LACKING_CODES = frozenset({
    pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
})  # fmt: skip

#: How long the counter is compared with the powers of GPU and module, to tell which of them it counts.
PROBE_S = 0.5


class NotAvailable(Exception):
    """NVML said yes, and gave the value that means "not available"."""


def known(value: int, bits: int) -> int:
    """Return a value that is not NVML's mark for one that is not available.

    Raises:
        NotAvailable: it is.
    """
    if value == 2**bits - 1:
        raise NotAvailable(f"NVML gave {value:#x}, its mark for a value that is not available")
    return value


@dataclass(frozen=True)
class Field:
    """One value of the batched call."""

    name: str
    id: int
    scope: int
    bits: int

    def value(self, answer: Any) -> float:
        """Return the value in base units.

        Raises:
            pynvml.NVMLError, NotAvailable: NVML has none.
        """
        if answer.nvmlReturn != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(answer.nvmlReturn)
        raw = answer.value.uiVal if self.bits == 32 else answer.value.ullVal
        return known(raw, self.bits) / 1e3  # mW, mJ


ENERGY = Field("energy_j", pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, 0, 64)
_FIELDS = (
    ENERGY,
    Field("power_w", pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_GPU, 32),
    Field("power_average_w", pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_POWER_SCOPE_GPU, 32),
    Field("memory_power_w", pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_POWER_SCOPE_MEMORY, 32),
    Field("module_power_w", pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_POWER_SCOPE_MODULE, 32),
)


class Power:
    """What a GPU says about its energy and power.

    Args:
        handle: the GPU's.
        name: its product name, which says what nvmlDeviceGetPowerUsage means on it.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self._fields = tuple(field for field in _FIELDS if self._has(field))
        self._batch = [(field.id, field.scope) for field in self._fields]
        have = {field.name for field in self._fields}
        self._single: dict[str, Any] = {}
        if "energy_j" not in have and _answers(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle):
            self._single["energy_j"] = (pynvml.nvmlDeviceGetTotalEnergyConsumption, 64)
        if not have & {"power_w", "power_average_w"} and _answers(pynvml.nvmlDeviceGetPowerUsage, handle):
            self._single[_meaning_of_power_usage(name)] = (pynvml.nvmlDeviceGetPowerUsage, 32)
        self.names = have | self._single.keys()
        self.scope = GPU
        self.method = next(
            (
                method
                for method, name in ((COUNTER, "energy_j"), (INSTANT, "power_w"), (AVERAGE, "power_average_w"))
                if name in self.names
            ),
            None,
        )

    def read(self, failures: dict[str, str]) -> tuple[dict[str, float], int]:
        """Return what is known now in base units, and when it was so; what fails is told."""
        values: dict[str, float] = {}
        before_ns = time.monotonic_ns()
        answers: Sequence[Any] = ()
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(self.handle, self._batch) if self._batch else ()
        except pynvml.NVMLError as error:
            failures.update((field.name, str(error)) for field in self._fields)
        time_ns = (before_ns + time.monotonic_ns()) // 2
        for field, answer in zip(self._fields, answers, strict=False):
            try:
                values[field.name] = field.value(answer)
            except (pynvml.NVMLError, NotAvailable) as error:
                failures[field.name] = str(error)
        for name, (read, bits) in self._single.items():
            try:
                before_ns = time.monotonic_ns()
                values[name] = known(read(self.handle), bits) / 1e3
                if name == "energy_j":
                    time_ns = (before_ns + time.monotonic_ns()) // 2
            except (pynvml.NVMLError, NotAvailable) as error:
                failures[name] = str(error)
        return values, time_ns

    def probe_scope(self) -> None:
        """Find out whether the counter is the GPU's or its whole module's (Grace-Hopper), by comparing rates."""
        if self.method != COUNTER or "module_power_w" not in self.names:
            return
        ignored: dict[str, str] = {}
        first, first_ns = self.read(ignored)
        if "module_power_w" not in first:
            return
        time.sleep(PROBE_S)
        last, last_ns = self.read(ignored)
        if "energy_j" not in first or "energy_j" not in last or "power_w" not in last:
            return
        rate_w = (last["energy_j"] - first["energy_j"]) / (last_ns - first_ns) * 1e9
        module_w, own_w = last.get("module_power_w", 0.0), last["power_w"]
        if abs(rate_w - module_w) < abs(rate_w - own_w):
            self.scope = MODULE

    def _has(self, field: Field) -> bool:
        try:
            (answer,) = pynvml.nvmlDeviceGetFieldValues(self.handle, [(field.id, field.scope)])
        except LACKING:
            return False
        except pynvml.NVMLError:
            return field is ENERGY or field.name == "power_w"  # it may have it, and fails just now
        if answer.nvmlReturn == pynvml.NVML_SUCCESS and field.scope != pynvml.NVML_POWER_SCOPE_GPU:
            return bool(answer.value.uiVal)  # boards without such a sensor were seen to say 0
        return answer.nvmlReturn not in LACKING_CODES


def _answers(read: Any, handle: Any) -> bool:
    try:
        read(handle)
    except LACKING:
        return False
    except pynvml.NVMLError:
        return True
    return True


def _meaning_of_power_usage(name: str) -> str:
    """Return what nvmlDeviceGetPowerUsage is: the power of the moment up to Turing and on GA100, else a mean of 1 s."""
    row = hardware.find(name)
    is_mean = row is not None and row.sensor is not None and row.sensor.power_usage == "1-s mean"
    return "power_average_w" if is_mean else "power_w"
