"""A fake amdsmi whose GPUs follow a script; names, units and types are the same as in the real package.

The script is the JSON file in AMDSMI_SCRIPT, with three keys: ``release``, the ROCm release (6.2 to 7.0) that is
imitated; ``gpus``, the values that differ from GPU below; ``faults``. Every call reads the script again, but
``release`` is read only once. All times use the monotonic clock, so every process can compute the true values; a test
in the same process may replace ``now``.
"""

import ctypes
import json
import math
import os
import time
from enum import IntEnum
from pathlib import Path

GPU = {
    "bdf": "0000:c1:00.0",
    "serial": 0x1234567890ABCDEF,  # None: the GPU has no serial number
    "name": "AMD Instinct MI300X",
    "device_id": 0x74A1,
    "hip_id": 0,
    "memory_total": 192 * 2**30,
    "memory_used": 48 * 2**30,
    "power": [400.0, 0.0, 10.0],  # mean, amplitude and period of a sine
    "power_kind": "current",  # "average" on GPUs up to MI200 and on Radeon GPUs
    "gfx_activity": 75,
    "umc_activity": 40,
    "junction": 65,
    "gfx_clock": 2100,
    "memory_clock": 1300,
    "power_cap_w": 750,
    "rate": 1.0,  # measured energy divided by true energy
    "tick_s": 0.0,  # period of the energy counter's updates
    "residencies": {},  # limit -> share of the time in which it throttles the GPU
    "throttled": None,  # throttle status of GPUs before MI300; it has no reason
    "second_die": False,
    "max_bandwidth": {},  # position of another GPU -> bandwidth of the link to this GPU
    "lacking": [],  # calls
    "no_value": [],  # fields
}

now = time.monotonic


def _script():
    return json.loads(Path(os.environ["AMDSMI_SCRIPT"]).read_text())


RELEASE = tuple(_script().get("release", [7, 0]))
if fault := _script().get("import_error"):
    print("libamd_smi.so: cannot open shared object file: No such file or directory")
    raise {"KeyError": KeyError, "AttributeError": AttributeError, "OSError": OSError}[fault]("libamd_smi.so")

_STATUS = {
    2: "AMDSMI_STATUS_NOT_SUPPORTED - Feature not supported",
    8: "AMDSMI_STATUS_TIMEOUT - Timeout in API call",
    9: "AMDSMI_STATUS_RETRY - Retry operation",
    10: "AMDSMI_STATUS_NO_PERM - Permission Denied",
    12: "AMDSMI_STATUS_IO - I/O Error",
    18: "AMDSMI_STATUS_INIT_ERROR - Initialization error",
    31: "AMDSMI_STATUS_NOT_FOUND - Device Not found",
    32: "AMDSMI_STATUS_NOT_INIT - Device not initialized",
    34: "AMDSMI_STATUS_DRIVER_NOT_LOADED - Driver not loaded",
}


class AmdSmiException(Exception):
    pass


class AmdSmiLibraryException(AmdSmiException):
    def __init__(self, err_code):
        super().__init__(err_code)
        self.err_code = err_code
        self.err_info = _STATUS.get(err_code, "AMDSMI_STATUS_UNKNOWN_ERROR - An unknown error occurred")

    def __str__(self):
        return f"Error code:\n\t{self.err_code} | {self.err_info}"


class AmdSmiRetryException(AmdSmiLibraryException):
    def __init__(self):
        super().__init__(9)


class AmdSmiTimeoutException(AmdSmiLibraryException):
    def __init__(self):
        super().__init__(8)


class AmdSmiParameterException(AmdSmiException):
    def __init__(self, receivedValue, expectedType, msg=None):
        super().__init__(msg)
        self.err_code = None
        self.err_msg = f"Invalid parameter:\nActual type: {type(receivedValue)}\nExpected type: {expectedType}"

    def __str__(self):
        return self.err_msg


class AmdSmiInitFlags(IntEnum):
    INIT_AMD_GPUS = 2


class AmdSmiMemoryType(IntEnum):
    VRAM = 0


class AmdSmiTemperatureType(IntEnum):
    EDGE = 0
    JUNCTION = 1
    VRAM = 2


class AmdSmiTemperatureMetric(IntEnum):
    CURRENT = 0


class AmdSmiClkType(IntEnum):
    SYS = 0
    GFX = 0
    MEM = 4


class amdsmi_processor_handle(ctypes.c_void_p):
    pass


_state = {"references": 0, "era": 0, "lost": set()}


def _raise(code):
    if code == 9:
        raise AmdSmiRetryException
    if code == 8:
        raise AmdSmiTimeoutException
    raise AmdSmiLibraryException(code)


def _check_faults(call, position=None):
    for fault in _script().get("faults", []):
        if fault["call"] in (call, "*") and fault.get("gpu") in (position, None):
            if fault["call"] == "*" and position is not None:
                _state["lost"].add(position)  # the GPU is lost until the next amdsmi_init
            _raise(fault["error"])


def _gpu(handle, call):
    """Return the values of a GPU; raise the faults of this call."""
    if not isinstance(handle, amdsmi_processor_handle):
        raise AmdSmiParameterException(handle, amdsmi_processor_handle)
    if not _state["references"]:
        _raise(32)
    era, position = divmod((handle.value or 0) // 16, 1000)
    gpus = _script()["gpus"]
    if era != _state["era"] or position >= len(gpus):
        _raise(31)
    _check_faults(call, position)
    if position in _state["lost"]:
        _raise(12)
    gpu = GPU | gpus[position]
    if call in gpu["lacking"]:
        _raise(2)
    return gpu


def power_w(gpu, t):
    mean, amplitude, period = gpu["power"]
    return mean + amplitude * math.sin(2 * math.pi * t / period)


def energy_j(gpu, t0, t1):
    mean, amplitude, period = gpu["power"]
    turn = 2 * math.pi / period
    # A product of sines, because the difference of two cosines loses digits over a short time.
    return mean * (t1 - t0) + 2 * amplitude / turn * math.sin(turn * (t0 + t1) / 2) * math.sin(turn * (t1 - t0) / 2)


def _or_none(gpu, field, value, bits):
    """Return a value, or the mark of a missing value in this release."""
    mark = 2**bits - 1
    if field in gpu["no_value"] or value is None:
        value = mark
    return "N/A" if value == mark else value


def _counter(gpu, t):
    if gpu["second_die"]:
        return 0
    if gpu["tick_s"]:
        t = t // gpu["tick_s"] * gpu["tick_s"]
    # The hardware counts in units of 2^-16 J = 15.2588 uJ; the library documents 15.3 uJ.
    return 2**40 + int(gpu["rate"] * energy_j(gpu, 0.0, t) * 2**16)


def amdsmi_init(flag=AmdSmiInitFlags.INIT_AMD_GPUS):
    if not isinstance(flag, AmdSmiInitFlags):
        raise AmdSmiParameterException(flag, AmdSmiInitFlags)
    _check_faults("amdsmi_init")
    if not _state["references"]:
        _state["era"] += 1
        _state["lost"] = set()
    _state["references"] += 1


def amdsmi_shut_down():
    if not _state["references"]:
        _raise(32)
    _state["references"] -= 1


def amdsmi_get_processor_handles():
    if not _state["references"]:
        _raise(32)
    _check_faults("amdsmi_get_processor_handles")
    return [amdsmi_processor_handle(16 * (1000 * _state["era"] + i)) for i in range(len(_script()["gpus"]))]


def amdsmi_get_lib_version():
    year = {"year": 24} if RELEASE < (6, 4) else {}
    return {**year, "major": RELEASE[0] + 18, "minor": RELEASE[1], "release": 0, "build": "fake"}


def amdsmi_get_gpu_device_bdf(processor_handle):
    return _gpu(processor_handle, "amdsmi_get_gpu_device_bdf")["bdf"]


def amdsmi_get_gpu_device_uuid(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_gpu_device_uuid")
    serial = f"{gpu['serial'] or 0:016x}"
    return f"{serial[:2]}ff{gpu['device_id']:04x}-0000-1000-80{serial[2:4]}-{serial[4:]}"


def amdsmi_get_gpu_asic_info(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_gpu_asic_info")
    serial = "N/A" if gpu["serial"] is None else f"0x{gpu['serial']:016X}"
    return {"market_name": gpu["name"] or "N/A", "device_id": hex(gpu["device_id"]), "asic_serial": serial}


def amdsmi_get_energy_count(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_energy_count")
    t = now()
    count = 2**64 - 1 if "energy_accumulator" in gpu["no_value"] else _counter(gpu, t)
    old = {"power": count} if RELEASE < (6, 4) else {}
    new = {"energy_accumulator": count} if RELEASE >= (6, 3) else {}
    resolution = ctypes.c_float(15.3).value
    return {**old, **new, "counter_resolution": resolution, "timestamp": int(t * 1e9)}


def amdsmi_get_power_info(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_power_info")
    watts = 0 if gpu["second_die"] else round(power_w(gpu, now()))
    current = _or_none(gpu, "current_socket_power", watts if gpu["power_kind"] == "current" else None, 16)
    average = _or_none(gpu, "average_socket_power", watts if gpu["power_kind"] == "average" else None, 16)
    limit = 0 if gpu["second_die"] else gpu["power_cap_w"] * 10**6
    answer = {"average_socket_power": average, "gfx_voltage": 800, "power_limit": limit}
    answer["current_socket_power"] = current
    if RELEASE >= (7, 0):
        answer["socket_power"] = average if current == "N/A" else current
    return answer


def amdsmi_get_power_cap_info(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_power_cap_info")
    cap = 0 if gpu["second_die"] else gpu["power_cap_w"] * 10**6
    return {"power_cap": cap, "default_power_cap": cap, "dpm_cap": 0, "min_power_cap": 0, "max_power_cap": cap}


def amdsmi_get_gpu_activity(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_gpu_activity")
    fields = {name: _or_none(gpu, name, gpu[name], 16) for name in ("gfx_activity", "umc_activity")}
    return {**fields, "mm_activity": _or_none(gpu, "mm_activity", None, 16)}


def amdsmi_get_gpu_memory_usage(processor_handle, mem_type):
    if not isinstance(mem_type, AmdSmiMemoryType):
        raise AmdSmiParameterException(mem_type, AmdSmiMemoryType)
    gpu = _gpu(processor_handle, "amdsmi_get_gpu_memory_usage")
    return 2**64 - 1 if "memory_used" in gpu["no_value"] else gpu["memory_used"]


def amdsmi_get_gpu_memory_total(processor_handle, mem_type):
    if not isinstance(mem_type, AmdSmiMemoryType):
        raise AmdSmiParameterException(mem_type, AmdSmiMemoryType)
    return _gpu(processor_handle, "amdsmi_get_gpu_memory_total")["memory_total"]


def amdsmi_get_temp_metric(processor_handle, sensor_type, metric):
    if not isinstance(sensor_type, AmdSmiTemperatureType):
        raise AmdSmiParameterException(sensor_type, AmdSmiTemperatureType)
    if not isinstance(metric, AmdSmiTemperatureMetric):
        raise AmdSmiParameterException(metric, AmdSmiTemperatureMetric)
    gpu = _gpu(processor_handle, "amdsmi_get_temp_metric")
    if sensor_type != AmdSmiTemperatureType.JUNCTION or gpu["junction"] is None:
        _raise(2)
    return gpu["junction"]


def amdsmi_get_clock_info(processor_handle, clock_type):
    if not isinstance(clock_type, AmdSmiClkType):
        raise AmdSmiParameterException(clock_type, AmdSmiClkType)
    gpu = _gpu(processor_handle, "amdsmi_get_clock_info")
    name = "gfx_clock" if clock_type == AmdSmiClkType.GFX else "memory_clock"
    clock = 0xFFFF if name in gpu["no_value"] else gpu[name]
    return {"clk" if RELEASE >= (6, 2) else "cur_clk": clock, "min_clk": 500, "max_clk": clock}


def amdsmi_get_gpu_metrics_info(processor_handle):
    gpu = _gpu(processor_handle, "amdsmi_get_gpu_metrics_info")
    t = now()
    answer = {"energy_accumulator": _counter(gpu, t), "system_clock_counter": int(t * 1e9)}
    if RELEASE >= (6, 3):
        for limit in ("prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm"):
            share = gpu["residencies"].get(limit, 0.0) if gpu["residencies"] else None
            field = f"{limit}_residency_acc"
            answer[field] = _or_none(gpu, field, None if share is None else int(share * t * 1000), 64)
    throttled = _or_none(gpu, "indep_throttle_status", gpu["throttled"] and 1 << 16, 64)
    if gpu["throttled"] is False:
        throttled = 0
    answer["indep_throttle_status"] = throttled if throttled == "N/A" else bool(throttled)
    return answer


def amdsmi_get_gpu_driver_info(processor_handle):
    _gpu(processor_handle, "amdsmi_get_gpu_driver_info")
    return {"driver_name": "amdgpu", "driver_version": "6.10.5"}


def amdsmi_get_minmax_bandwidth_between_processors(processor_handle_src, processor_handle_dst):
    gpu = _gpu(processor_handle_src, "amdsmi_get_minmax_bandwidth_between_processors")
    position = (processor_handle_dst.value // 16) % 1000
    if not gpu["max_bandwidth"]:
        _raise(2)
    return {"min_bandwidth": 50_000, "max_bandwidth": gpu["max_bandwidth"].get(str(position), 50_000)}


if RELEASE >= (6, 3):

    def amdsmi_get_gpu_kfd_info(processor_handle):
        gpu = _gpu(processor_handle, "amdsmi_get_gpu_kfd_info")
        return {"kfd_id": 1, "node_id": 2 + gpu["hip_id"], "current_partition_id": 0}


if RELEASE >= (6, 4):

    def amdsmi_get_gpu_enumeration_info(processor_handle):
        gpu = _gpu(processor_handle, "amdsmi_get_gpu_enumeration_info")
        return {"drm_render": 128, "drm_card": 0, "hsa_id": 0, "hip_id": gpu["hip_id"], "hip_uuid": ""}
