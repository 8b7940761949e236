"""The readings of an AMD GPU: a function for each AMD SMI call, with the fields that the call returns."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from effllm.devices import DeviceUnavailable

# amdsmi_status_t, equal in all releases.
_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION, _DRIVER_NOT_LOADED = 2, 3, 10, 34
LACKING = (_NOT_SUPPORTED, _NOT_YET_IMPLEMENTED, _NO_PERMISSION)

_DEVICE_NODES = Path("/dev")
_NO_ACCESS = "this user may not open the AMD GPUs: grant access to /dev/kfd and /dev/dri (groups render and video)"

#: Names of the fields with the total time for which each limit was active, on MI300 and later.
_RESIDENCIES = {
    "prochot": "prochot_residency_acc",
    "power_cap": "ppt_residency_acc",
    "socket_thermal": "socket_thm_residency_acc",
    "vr_thermal": "vr_thm_residency_acc",
    "hbm_thermal": "hbm_thm_residency_acc",
}


def import_library() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # amdsmi prints a message if its C library is missing
            import amdsmi
    except ImportError as error:
        raise DeviceUnavailable(
            "the Python package amdsmi is not installed: install the version of your ROCm release, "
            "from /opt/rocm/share/amd_smi, or effllm[amd]"
        ) from error
    except (AttributeError, KeyError, OSError) as error:
        # AttributeError and KeyError: libamd_smi.so is missing, or belongs to another release.
        raise DeviceUnavailable(
            f"the Python package amdsmi cannot use libamd_smi.so ({type(error).__name__}: {error}): "
            "install ROCm's amd-smi-lib of the same release"
        ) from error
    return amdsmi


def why_no_gpu(error: Exception | None) -> str:
    """Return one sentence with the reason why no GPU can be read, and the remedy."""
    code = getattr(error, "err_code", None)
    nodes = [_DEVICE_NODES / "kfd", *sorted((_DEVICE_NODES / "dri").glob("renderD*"))]
    present = [node for node in nodes if node.exists()]
    if code == _NO_PERMISSION or (present and not all(os.access(node, os.R_OK | os.W_OK) for node in present[:2])):
        return _NO_ACCESS
    if code == _DRIVER_NOT_LOADED:
        return "the amdgpu driver is not loaded: load it, or choose another device"
    if error is None:
        return "AMD SMI lists no GPU: give the container /dev/kfd and /dev/dri, or choose another device"
    return f"AMD SMI does not start: {text_of_error(error)}"


def check_units(smi: Any, handle: Any) -> None:
    """Raise DeviceUnavailable for releases before ROCm 6.2, which have other units."""
    if "cur_clk" in try_call(smi, "amdsmi_get_clock_info", handle, smi.AmdSmiClkType.GFX):
        raise DeviceUnavailable("this AMD SMI has other units: install that of ROCm 6.2 or later")


def errors_of(smi: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions that a call may raise.

    The library has one exception of its own.  Other exceptions are raised if this release lacks the function, or if the
    Python wrapper receives an unexpected answer.
    """
    return (smi.AmdSmiException, AttributeError, KeyError, OSError, TypeError, ValueError)


def text_of_error(error: Exception) -> str:
    return " ".join(str(getattr(error, "err_info", "") or error).split()) or type(error).__name__


def try_call(smi: Any, call: str, *arguments: Any) -> Any:
    """Return the answer of a call that some releases or GPUs lack; an empty answer if the call fails."""
    with contextlib.suppress(*errors_of(smi)):
        return getattr(smi, call)(*arguments)
    return {}


def driver_of(smi: Any, handle: Any) -> str:
    info, version = try_call(smi, "amdsmi_get_gpu_driver_info", handle), try_call(smi, "amdsmi_get_lib_version")
    driver = " ".join(part for name in ("driver_name", "driver_version") if (part := info.get(name, "N/A")) != "N/A")
    numbers = [str(version[part]) for part in ("year", "major", "minor", "release") if part in version]
    return ", ".join(part for part in (driver, numbers and f"AMD SMI {'.'.join(numbers)}") if part)


def number(value: Any, bits: Sequence[int] = (16, 32, 64)) -> float | None:
    """Return a reading as a number, or ``None`` if AMD SMI has no value: "N/A", or all bits of the driver's field."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value in [2**width - 1 for width in bits] else float(value)


def _scaled_numbers(scale: float, **answers: Any) -> dict[str, float]:
    numbers = {field: number(answer) for field, answer in answers.items()}
    return {field: value * scale for field, value in numbers.items() if value is not None}


def joules_of(answer: dict[str, Any]) -> float | None:
    # The field is called "power" up to ROCm 6.2; ROCm 6.3 has the fields "power" and "energy_accumulator".
    count = number(answer.get("energy_accumulator", answer.get("power")), (64,))
    microjoules = number(answer.get("counter_resolution"))
    return None if count is None or microjoules is None else count * microjoules / 1e6


def read_energy(smi: Any, handle: Any) -> dict[str, float]:
    joules = joules_of(smi.amdsmi_get_energy_count(handle))
    return {} if joules is None else {"energy_j": joules}


def read_power(smi: Any, handle: Any) -> dict[str, float]:
    # MI300 and later return "current", earlier GPUs "average"; ROCm 7.0 adds "socket_power", which is one of the two.
    info = smi.amdsmi_get_power_info(handle)
    current, average = info.get("current_socket_power"), info.get("average_socket_power")
    powers = _scaled_numbers(1.0, power_w=current, power_average_w=average)
    return powers or _scaled_numbers(1.0, power_w=info.get("socket_power"))


def _read_memory(smi: Any, handle: Any) -> dict[str, float]:
    # This call returns bytes, amdsmi_get_gpu_vram_usage returns MiB.
    used = number(smi.amdsmi_get_gpu_memory_usage(handle, smi.AmdSmiMemoryType.VRAM), (64,))
    return {} if used is None else {"memory_bytes": used}


def read_activity(smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_gpu_activity(handle)
    busy, dram = answer.get("gfx_activity"), answer.get("umc_activity")
    ratios = _scaled_numbers(0.01, utilization=busy, dram_activity_ratio=dram)
    return {field: ratio for field, ratio in ratios.items() if 0 <= ratio <= 1}


def _read_temperature(smi: Any, handle: Any) -> dict[str, float]:
    # The value is in degrees, contrary to the documentation of 6.x: the library divides the driver's value by 1000.
    # The hottest spot is read, because MI300 has no other sensor.
    sensor, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
    return _scaled_numbers(1.0, temperature_c=smi.amdsmi_get_temp_metric(handle, sensor, metric))


def _read_clock(domain: str, part: str, field: str, smi: Any, handle: Any) -> dict[str, float]:
    answer = smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, domain))
    return _scaled_numbers(1e6, **{field: answer.get(part)})


_read_gfx_clock = partial(_read_clock, "GFX", "clk", "sm_clock_hz")
_read_memory_clock = partial(_read_clock, "MEM", "clk", "memory_clock_hz")
read_max_gfx_clock = partial(_read_clock, "GFX", "max_clk", "sm_clock_max_hz")


def _read_limit(part: str, field: str, smi: Any, handle: Any) -> dict[str, float]:
    # The second die of a card reports 0; the first die has the limit of both dies.
    microwatts = number(smi.amdsmi_get_power_cap_info(handle).get(part), (32, 64))
    return {field: microwatts / 1e6} if microwatts else {}


read_power_limit = partial(_read_limit, "power_cap", "power_limit_w")
read_default_power_limit = partial(_read_limit, "default_power_cap", "power_limit_default_w")

Group = Callable[[Any, Any], dict[str, float]]  # one of the functions above: library, handle -> values of fields

#: The fields that each call may return.  Energy and power come first: the time of these calls is the sample's time.
GROUPS: dict[Group, tuple[str, ...]] = {
    read_energy: ("energy_j",),
    read_power: ("power_w", "power_average_w"),
    _read_memory: ("memory_bytes",),
    read_activity: ("utilization", "dram_activity_ratio"),
    _read_temperature: ("temperature_c",),
    _read_gfx_clock: ("sm_clock_hz",),
    _read_memory_clock: ("memory_clock_hz",),
    read_power_limit: ("power_limit_w",),
}


def read_or_empty(smi: Any, group: Group, handle: Any) -> dict[str, float]:
    """Return the fields of one of the functions above; none if its call fails."""
    with contextlib.suppress(*errors_of(smi)):
        return group(smi, handle)
    return {}


def read_throttling(smi: Any, handle: Any) -> tuple[dict[str, float], bool | None]:
    """Return the total time for which each limit was active; for GPUs before MI300, whether a limit is active now.

    amdsmi_get_violation_status is not used: it sleeps for a tenth of a second between two readings.
    """
    metrics = try_call(smi, "amdsmi_get_gpu_metrics_info", handle)
    residencies = {reason: number(metrics.get(field), (64,)) for reason, field in _RESIDENCIES.items()}
    status = metrics.get("indep_throttle_status")
    times = {reason: time for reason, time in residencies.items() if time is not None}
    return times, status if isinstance(status, bool) else None
