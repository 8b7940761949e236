"""Energy and power of a GPU, read in one batched call; their scope is measured, not assumed."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Sequence
from ctypes import byref, c_int
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import pynvml

from effllm.devices._nvml_call import MAX_VALUE_64, Quantity, first_supported, why_invalid
from effllm.devices.known import hardware
from effllm.records.rank import AVERAGE, COUNTER, GPU, INSTANT, MODULE

_INSTANT_ID, _AVERAGE_ID = pynvml.NVML_FI_DEV_POWER_INSTANT, pynvml.NVML_FI_DEV_POWER_AVERAGE
_OF_GPU, _OF_MODULE = pynvml.NVML_POWER_SCOPE_GPU, pynvml.NVML_POWER_SCOPE_MODULE
_OF_MEMORY = pynvml.NVML_POWER_SCOPE_MEMORY


class NvmlField(NamedTuple):
    """A value of the batched call: energy in millijoules, or a scope's power in milliwatts."""

    name: str
    id: int
    scope: int = _OF_GPU
    bits: int = 32


_ENERGY = NvmlField("energy_j", pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, bits=64)
_POWERS = (NvmlField("power_w", _INSTANT_ID), NvmlField("power_average_w", _AVERAGE_ID))
_MODULE_POWERS = (NvmlField("power_w", _INSTANT_ID, _OF_MODULE), NvmlField("power_average_w", _AVERAGE_ID, _OF_MODULE))
# No known board has instant power of the memory.
_MEMORY_POWER = NvmlField("memory_power_w", _AVERAGE_ID, _OF_MEMORY)

#: Duration and period of the readings in `_scope_of_counter`.  The counter ticks a few times in PROBE_S; the period is
#: short enough to time the ticks to a few percent.
PROBE_S, _PROBE_EVERY_S = 0.5, 0.01


class FieldBatch:
    """Fields of a GPU that are read in one call, and unpacked together from the memory that NVML writes.

    Only failures of the ``required`` fields are reported.  ``share`` is a slice's share of the GPU's energy.
    """

    def __init__(self, handle: Any, fields: Sequence[NvmlField], required: frozenset[str], share: float = 1.0) -> None:
        self._fields = [(field.name, 2**field.bits - 1) for field in fields]  # all bits set mean "no value"
        self._required = required
        self._divisor = 1e3 / share  # NVML's units are mW and mJ
        answers = (pynvml.c_nvmlFieldValue_t * len(fields))()
        for answer, field in zip(answers, fields, strict=True):
            answer.fieldId, answer.scopeId = field.id, field.scope
        self._call = partial(pynvml.nvmlLib.nvmlDeviceGetFieldValues, handle, c_int(len(fields)), byref(answers))
        # An answer ends with the return code and with the value, which is a C union.
        code_form = f"{pynvml.c_nvmlFieldValue_t.nvmlReturn.offset}xI"
        form = "=" + "".join(code_form + ("Q" if field.bits == 64 else "I4x") for field in fields)
        self._unpack = partial(struct.Struct(form).unpack_from, answers)

    def read_fields(self, failures: dict[str, str]) -> tuple[dict[str, float], int]:
        """Return the values in base units and their time; reasons for failures are added to ``failures``."""
        before_ns = time.monotonic_ns()
        code = self._call()
        time_ns = (before_ns + time.monotonic_ns()) // 2
        if code:
            failures.update(dict.fromkeys(self._required, str(pynvml.NVMLError(code))))
            return {}, time_ns
        divisor, numbers = self._divisor, self._unpack()  # return code and value of each field
        values = {
            name: raw / divisor
            for (name, no_value), code, raw in zip(self._fields, numbers[::2], numbers[1::2], strict=True)
            if code == 0 and raw != no_value
        }
        if len(values) < len(self._fields):
            for (name, _), code, raw in zip(self._fields, numbers[::2], numbers[1::2], strict=True):
                if name in self._required and name not in values:
                    failures[name] = str(pynvml.NVMLError(code)) if code else why_invalid(raw)
        return values, time_ns


class NvmlPower:
    """The energy and power of a GPU, of its whole module if the counter measures this, or of a slice.

    By the product's ``name`` the hardware table has the kind of power that nvmlDeviceGetPowerUsage returns.  ``share``
    is a slice's share of the GPU's energy.
    """

    def __init__(self, handle: Any, name: str, is_slice: bool = False, share: float = 1.0) -> None:
        has = partial(_is_readable, handle)
        of_gpu, of_module = filter(has, _POWERS), filter(has, _MODULE_POWERS)
        chosen = _choose_fields(handle, of_gpu, of_module, is_slice=is_slice, has_counter=has(_ENERGY))
        self.scope, self.note = chosen.scope, chosen.note
        essential = (*chosen.counter, *chosen.powers[:1])
        required = frozenset(field.name for field in essential)
        everything = (*chosen.counter, *chosen.powers, *chosen.module_power, *filter(has, (_MEMORY_POWER,)))
        self._essential = FieldBatch(handle, essential, required, share) if essential else None
        self._everything = FieldBatch(handle, everything, required, share) if essential else None
        # Energy or power that has no field is read by a call of its own.
        singles = [] if chosen.counter or chosen.note else [_energy_quantity(handle, share)]
        singles += [] if chosen.powers else [_power_quantity(handle, name, share)]
        self._singles = [quantity for quantity in singles if quantity is not None]
        self.names = required.union(quantity.name for quantity in self._singles)  # values whose absence is a failure
        self.method = next((method for method, name in _METHODS if name in self.names), None)  # of the energy

    def read_power(self, failures: dict[str, str], *, energy_only: bool = False) -> tuple[dict[str, float], int]:
        """Return the values in base units and their time; reasons for failures are added to ``failures``."""
        batch = self._essential if energy_only else self._everything
        values, time_ns = batch.read_fields(failures) if batch is not None else ({}, 0)
        for single in self._singles:
            before_ns = time.monotonic_ns()
            single.read_into(values, failures)
            if not time_ns or single.name == "energy_j":
                time_ns = (before_ns + time.monotonic_ns()) // 2
        return values, time_ns or time.monotonic_ns()


_METHODS = ((COUNTER, "energy_j"), (INSTANT, "power_w"), (AVERAGE, "power_average_w"))


class _ChosenFields(NamedTuple):
    """The chosen scope, with its fields of energy and power."""

    scope: str
    counter: tuple[NvmlField, ...]
    powers: tuple[NvmlField, ...]
    module_power: tuple[NvmlField, ...] = ()  # with the scope GPU: the power of the module, if the GPU reports it
    note: str = ""


def _choose_fields(
    handle: Any, of_gpu: Iterable[NvmlField], of_module: Iterable[NvmlField], *, is_slice: bool, has_counter: bool
) -> _ChosenFields:
    """Choose the scope: that of the counter, but the GPU for a slice."""
    powers, module_powers = tuple(of_gpu), tuple(of_module)
    counter_scope = GPU
    if has_counter and powers and module_powers:
        counter_scope = _scope_of_counter(handle, powers[0], module_powers[0])
    scope = GPU if is_slice and powers else counter_scope
    note = ""
    if has_counter and scope != counter_scope:
        note = f"power is integrated, because the energy counter measures the {counter_scope}"
    counter = (_ENERGY,) if has_counter and not note else ()
    if scope == MODULE:
        return _ChosenFields(MODULE, counter, module_powers, note=note)
    module_power = tuple(field._replace(name="module_power_w") for field in module_powers[:1])
    return _ChosenFields(GPU, counter, powers, module_power, note)


def _is_readable(handle: Any, field: NvmlField) -> bool:
    """Whether a field can be read; after any failure an older call is used for the whole run."""
    scopes = (field.scope,) if field.scope == _OF_GPU else (field.scope, _OF_GPU)
    # Some boards without this sensor return 0; an older driver may ignore the scope and return the GPU's power, which
    # may change between the two readings of one call, so they are compared twice.
    for _ in scopes:
        try:
            answer, *of_gpu = pynvml.nvmlDeviceGetFieldValues(handle, [(field.id, scope) for scope in scopes])
        except pynvml.NVMLError:
            return False
        is_own = not of_gpu or answer.value.uiVal not in (0, of_gpu[0].value.uiVal)
        if answer.nvmlReturn != pynvml.NVML_SUCCESS or not is_own:
            return False
    return True


def _scope_of_counter(handle: Any, of_gpu: NvmlField, of_module: NvmlField) -> str:
    """Return the scope whose power is nearer to the counter's rate: the GPU, or the whole module (Grace-Hopper)."""
    fields = (_ENERGY, of_gpu._replace(name="gpu"), of_module._replace(name="module"))
    batch = FieldBatch(handle, fields, frozenset())
    readings = []  # time, energy, power of the GPU, power of the module
    end_s = time.monotonic() + PROBE_S
    while time.monotonic() < end_s:
        values, time_ns = batch.read_fields({})
        if len(values) == len(fields):
            readings.append((time_ns, values["energy_j"], values["gpu"], values["module"]))
        time.sleep(_PROBE_EVERY_S)
    ticks = [(first[0] + second[0], second[1]) for first, second in pairwise(readings) if second[1] != first[1]]
    if len(ticks) < 2:
        return GPU
    (first_ns, first_j), (last_ns, last_j) = ticks[0], ticks[-1]
    rate_w = (last_j - first_j) / (last_ns - first_ns) * 2e9  # a tick's time is a sum of two readings' times
    gpu_w, module_w = (sum(reading[column] for reading in readings) / len(readings) for column in (2, 3))
    return MODULE if abs(rate_w - module_w) < abs(rate_w - gpu_w) else GPU


def _energy_quantity(handle: Any, share: float) -> Quantity | None:
    function = "nvmlDeviceGetTotalEnergyConsumption"
    return first_supported(Quantity("energy_j", function, handle, maximum=MAX_VALUE_64, divisor=1e3 / share))


def _power_quantity(handle: Any, name: str, share: float) -> Quantity | None:
    meaning = "power_average_w" if _is_power_usage_mean(handle, name) else "power_w"
    return first_supported(Quantity(meaning, "nvmlDeviceGetPowerUsage", handle, divisor=1e3 / share))


def _is_power_usage_mean(handle: Any, name: str) -> bool:
    """Whether nvmlDeviceGetPowerUsage is a mean over 1 s; up to Turing, and on GA100, it is the instant power."""
    row = hardware.find_by_driver_name(name)
    if row is not None and row.sensor.power_usage is not None:
        return row.sensor.power_usage == "1-s mean"
    try:
        return bool(pynvml.nvmlDeviceGetCudaComputeCapability(handle) > (8, 0))
    except pynvml.NVMLError:
        return False
