"""The readings of an AMD GPU: a function for each AMD SMI call, with the fields that the call returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from effllm.devices._amd_library import ask, errors_of

#: Names of the fields with the total time for which each limit was active, on MI300 and later.
_RESIDENCIES = {
    "prochot": "prochot_residency_acc",
    "power_cap": "ppt_residency_acc",
    "socket_thermal": "socket_thm_residency_acc",
    "vr_thermal": "vr_thm_residency_acc",
    "hbm_thermal": "hbm_thm_residency_acc",
}


def number(value: Any, bits: Sequence[int] = (16, 32, 64)) -> float | None:
    """Return a reading as a number, or ``None`` if AMD SMI has no value.

    A missing value is "N/A"; up to ROCm 6.0 it is a number with all bits of the driver's field set.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value in [2**width - 1 for width in bits] else float(value)


def _scaled(scale: float, **answers: Any) -> dict[str, float]:
    numbers = {field: number(answer) for field, answer in answers.items()}
    return {field: number * scale for field, number in numbers.items() if number is not None}


def joules_of(answer: dict[str, Any]) -> float | None:
    # The field is called "power" up to ROCm 6.2; ROCm 6.3 has the fields "power" and "energy_accumulator".
    count = number(answer.get("energy_accumulator", answer.get("power")), (64,))
    microjoules = number(answer.get("counter_resolution"))
    return None if count is None or microjoules is None else count * microjoules / 1e6


def energy(smi: Any, handle: Any) -> dict[str, float]:
    joules = joules_of(smi.amdsmi_get_energy_count(handle))
    return {} if joules is None else {"energy_j": joules}


def power(smi: Any, handle: Any) -> dict[str, float]:
    # MI300 and later return "current", earlier GPUs "average"; ROCm 7.0 adds "socket_power", which is one of the two.
    info = smi.amdsmi_get_power_info(handle)
    named = _scaled(1.0, power_w=info.get("current_socket_power"), power_average_w=info.get("average_socket_power"))
    return named or _scaled(1.0, power_w=info.get("socket_power"))


def _memory(smi: Any, handle: Any) -> dict[str, float]:
    # This call returns bytes, amdsmi_get_gpu_vram_usage returns MiB.
    used = number(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM), (64,))
    return {} if used is None else {"memory_bytes": used}


def activity(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_gpu_activity(handle)
    ratios = _scaled(0.01, utilization=answer.get("gfx_activity"), dram_activity_ratio=answer.get("umc_activity"))
    return {field: ratio for field, ratio in ratios.items() if 0 <= ratio <= 1}


def _temperature(smi: Any, handle: Any) -> dict[str, float]:
    # The value is in degrees, contrary to the documentation of 6.x: the library divides the driver's value by 1000.
    # The hottest spot is read, because MI300 has no other sensor.
    sensor, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
    return _scaled(1.0, temperature_c=smi.amdsmi_get_temp_metric(handle, sensor, metric))


def _gfx_clock(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
    return _scaled(1e6, sm_clock_hz=answer.get("clk", answer.get("cur_clk")))  # "cur_clk" up to ROCm 6.1


def max_gfx_clock(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
    highest = _scaled(1e6, sm_clock_max_hz=answer.get("max_clk"))
    return highest if highest.get("sm_clock_max_hz") else {}


def _memory_clock(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM)
    return _scaled(1e6, memory_clock_hz=answer.get("clk", answer.get("cur_clk")))


def power_limit(smi: Any, handle: Any) -> dict[str, float]:
    watts = _watts(smi.amdsmi_get_power_cap_info(handle).get("power_cap"))
    return {} if watts is None else {"power_limit_w": watts}


def default_power_limit(smi: Any, handle: Any) -> dict[str, float]:
    watts = _watts(smi.amdsmi_get_power_cap_info(handle).get("default_power_cap"))
    return {} if watts is None else {"power_limit_default_w": watts}


def _watts(value: Any) -> float | None:
    cap = number(value, (32, 64))
    if not cap:  # the second die of a card reports 0; the first die has the limit of both dies
        return None
    # The unit is W up to ROCm 6.1, then uW.  Limits are above 0.1 W and below 100 kW, so 1e5 separates the units.
    return cap / 1e6 if cap >= 1e5 else cap


Group = Callable[[Any, Any], dict[str, float]]

#: The fields that each call may return.  Energy and power come first: the time of these calls is the sample's time.
GROUPS: dict[Group, tuple[str, ...]] = {
    energy: ("energy_j",),
    power: ("power_w", "power_average_w"),
    _memory: ("memory_bytes",),
    activity: ("utilization", "dram_activity_ratio"),
    _temperature: ("temperature_c",),
    _gfx_clock: ("sm_clock_hz",),
    _memory_clock: ("memory_clock_hz",),
    power_limit: ("power_limit_w",),
}
#: The calls that read one common table of the driver.  Until the driver updates the table, these calls return the same
#: values again.
FROM_TABLE = (energy, power, activity, _gfx_clock, _memory_clock)


def ask_group(smi: Any, group: Group, handle: Any) -> dict[str, float]:
    with contextlib.suppress(*errors_of(smi)):
        return group(smi, handle)
    return {}


def throttle(smi: Any, handle: Any) -> tuple[dict[str, float], bool | None]:
    """Return the total time for which each limit was active; for GPUs before MI300, whether a limit is active now.

    amdsmi_get_violation_status is not used: it sleeps for a tenth of a second between two readings.
    """
    metrics = ask(smi, "amdsmi_get_gpu_metrics_info", handle)
    residencies = {reason: number(metrics.get(field), (64,)) for reason, field in _RESIDENCIES.items()}
    status = metrics.get("indep_throttle_status")  # a bit mask up to ROCm 6.0, a Boolean since then
    known = status if isinstance(status, bool) else None if (bits := number(status, (64,))) is None else bits > 0
    return {reason: time for reason, time in residencies.items() if time is not None}, known
