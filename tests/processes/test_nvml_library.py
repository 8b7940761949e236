"""The NVML library of the tests with the real pynvml; its values are compared with values computed in Python."""

import json
import os
import subprocess
import sys
import time

import pytest
from nvml_library import GIB, Gpu, bursts, flat, sine, square, steps

from effllm.devices import Site
from effllm.records.rank import Sample

SQUARE = square(100.0, 300.0, 0.05)

PRELUDE = """
import json, os, time, pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)

def fault(*lines):
    path = os.environ["NVML_TRACE"] + ".faults"
    open(path + ".draft", "w").write("".join(line + chr(10) for line in lines))
    os.replace(path + ".draft", path)

def at(t, call, *arguments):  # the call, as the curves were at t
    fault(f"* * freeze {t!r}")
    return call(*arguments)

def result(call, *arguments):
    try:
        return call(*arguments)
    except pynvml.NVMLError as error:
        return f"error {error.value}"

def fields(*ids):
    read = pynvml.nvmlDeviceGetFieldValues(handle, list(ids))
    values = [field.value.ullVal if field.valueType == 3 else field.value.uiVal for field in read]
    return [f"error {field.nvmlReturn}" if field.nvmlReturn else value for field, value in zip(read, values)]
"""


def ask(trace, code):
    """Run ``code`` in a process with the devices of the trace; return the variable ``answer`` of the code."""
    script = f"{PRELUDE}\n{code}\nprint(json.dumps(answer))"
    environ = os.environ | trace.environment()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_integrals_of_a_square_wave_are_correct():
    # Two periods of 0.05 s: 0.05 s at 300 W and 0.05 s at 100 W are 15 + 5 = 20 J.
    assert SQUARE.integral(0.0, 0.1) == pytest.approx(20.0)
    # From 0.02 to 0.03: 5 ms at 300 W and 5 ms at 100 W are 1.5 + 0.5 = 2 J.
    assert SQUARE.integral(0.02, 0.03) == pytest.approx(2.0)


@pytest.mark.parametrize("curve", [flat(250.0), SQUARE, sine(100.0, 300.0, 0.07)], ids=str)
def test_energy_counter_is_the_integral_of_power(trace, curve):
    trace.write(Gpu("GPU-a", "0:01:00", power=curve))
    code = """
handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-a")
answer = []
for _ in range(50):
    before = time.monotonic_ns()
    energy = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    answer.append((before, energy, time.monotonic_ns()))
    time.sleep(0.002)
"""
    readings = ask(trace, code)

    for before_ns, millijoules, after_ns in readings:
        lowest, highest = (trace.gpus[0].energy_j(0, ns / 1e9) for ns in (before_ns, after_ns))
        assert lowest - 0.002 <= millijoules / 1e3 <= highest + 0.002


def test_counter_changes_only_at_ticks(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), tick_s=0.5))

    millijoules = ask(
        trace,
        "answer = pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID('GPU-a'))",
    )

    assert millijoules % 150_000 in (0, 149_999)  # 300 W for 0.5 s are 150 J, truncated to a millijoule


def test_counter_starts_at_zero_after_a_reset(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0)))
    trace.fault("0 energy reset 0.5")
    code = """
before = time.monotonic()
answer = [before, pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)), time.monotonic()]
"""

    before_s, millijoules, after_s = ask(trace, code)

    assert 300 * (before_s - 0.5) - 0.01 <= millijoules / 1e3 <= 300 * (after_s - 0.5) + 0.01


def test_power_field_and_power_call_return_the_same_value(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(312.0)))
    code = """
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
fields = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT, 1])
answer = [pynvml.nvmlDeviceGetPowerUsage(handle), fields[0].value.uiVal, fields[0].nvmlReturn, fields[1].nvmlReturn]
"""

    assert ask(trace, code) == [312_000, 312_000, 0, 3]


def test_devices_are_found_by_index_uuid_and_bus(trace):
    trace.write(Gpu("GPU-a", "00000000:C1:00.0"), Gpu("GPU-b", "00000001:3B:00.0"))
    code = """
by_bus = pynvml.nvmlDeviceGetHandleByPciBusId("0001:3b:00.0")
by_uuid = pynvml.nvmlDeviceGetHandleByUUID("GPU-b")
answer = [
    pynvml.nvmlDeviceGetCount(),
    pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(1)),
    pynvml.nvmlDeviceGetUUID(by_bus),
    pynvml.nvmlDeviceGetIndex(by_uuid),
    pynvml.nvmlDeviceGetPciInfo(by_uuid).busId,
]
"""

    assert ask(trace, code) == [2, "GPU-b", "GPU-b", 1, "00000001:3B:00.0"]


def test_slice_belongs_to_its_gpu_and_is_not_counted_as_a_device(trace):
    trace.write(Gpu("GPU-a", "0:01:00"), Gpu("MIG-a", parent=0))
    code = """
parent = pynvml.nvmlDeviceGetHandleByIndex(0)
part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, 0)
answer = [
    pynvml.nvmlDeviceGetCount(),
    pynvml.nvmlDeviceGetUUID(part),
    pynvml.nvmlDeviceIsMigDeviceHandle(part).value,
    pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)),
]
"""

    assert ask(trace, code) == [1, "MIG-a", 1, "GPU-a"]


def test_lost_device_is_not_found_until_nvml_is_initialized_again(trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    faults = f"{trace.path}.faults"
    code = f"""
handle = pynvml.nvmlDeviceGetHandleByUUID("GPU-a")
def code():
    try:
        pynvml.nvmlDeviceGetPowerUsage(handle)
    except pynvml.NVMLError as error:
        return error.value
    return 0
answer = [code()]
open({faults!r}, "w").write("0 * lost\\n")
answer.append(code())
open({faults!r}, "w").close()
answer.append(code())
pynvml.nvmlShutdown()
answer.append(code())
pynvml.nvmlInit()
answer.append(code())
"""

    assert ask(trace, code) == [0, 15, 15, 1, 0]


SENSOR = {"tick_s": 0.1, "tick_phase_s": 0.037, "duty_s": 0.025}  # like an H100's curve
WAVE = square(100.0, 700.0, 0.37, 0.6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"power": bursts(100.0, 700.0, 0.31, 0.4, seed=3)},
        {"power": steps(100.0, 700.0, 0.043, seed=4)},
        {"power": steps(100.0, 700.0, 0.043), "tick_s": 0.1},
        {"tick_s": 0.1, "tick_phase_s": 0.061},
        {"tick_s": 0.1, "tick_jitter_s": 0.03, "power_mode": "held"},
        {"gain": 0.945, "lag_s": 0.25, "power_usage": "average"},
        SENSOR,
        SENSOR | {"power_mode": "held", "lag_s": 0.1},
        SENSOR | {"power_mode": "held", "tick_jitter_s": 0.02, "power": steps(100.0, 700.0, 0.043)},
        SENSOR | {"power_mode": "held", "average_s": 0.3, "power_usage": "average", "gain": 1.05},
        {"energy_scope": "module", "module_power": sine(300.0, 900.0, 0.7)} | SENSOR,
    ],
    ids=lambda settings: "-".join(settings) or "exact",
)
def test_values_of_sensors_equal_those_computed_in_python(trace, settings):
    [gpu] = trace.write(Gpu("GPU-a", "0:01:00", **({"power": WAVE} | settings)))
    now_s = time.monotonic()
    moments = [now_s - 50 + 0.7391 * i for i in range(60)] + [-1.234, -0.037]  # the last two moments are before time 0
    code = f"""
def read():
    counter, usage = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), pynvml.nvmlDeviceGetPowerUsage(handle)
    return [counter, usage, *fields(83, 186, 185)]
answer = [at(t, read) for t in {moments}]
"""

    for t, shown in zip(moments, ask(trace, code), strict=True):
        joules, instant_w, average_w = gpu.counter_j(t), gpu.power_w(t), gpu.power_w(t, "average")
        usage_w = average_w if gpu.power_usage == "average" else instant_w
        assert shown == [int(1e3 * value) for value in (joules, usage_w, joules, instant_w, average_w)]


def test_integral_of_bursts_and_jumps_equals_the_sum_of_values():
    for curve in (bursts(100.0, 700.0, 0.31, 0.4, seed=3), steps(100.0, 700.0, 0.31, seed=4)):
        fine = [curve.at(1000.0 + (i + 0.5) / 20_000) for i in range(40_000)]

        assert curve.integral(1000.0, 1002.0) == pytest.approx(sum(fine) / 20_000, rel=1e-3)
        assert curve.integral(1002.0, 1000.0) == pytest.approx(-curve.integral(1000.0, 1002.0))
        assert {100.0 <= value <= 700.0 for value in fine} == {True}


def test_one_burst_occurs_in_each_period_at_a_random_time():
    curve = bursts(0.0, 1.0, 1.0, 0.25)

    assert [curve.integral(n, n + 1.0) for n in range(1000, 1020)] == pytest.approx([0.25] * 20)
    assert len({round(curve.integral(n, n + 0.5), 3) for n in range(1000, 1020)}) > 5


def test_sensor_with_a_duty_of_25_percent_can_miss_all_high_power():
    # Each tick of 100 ms has 50 ms at 700 W and then 50 ms at 100 W. The mean power of a tick is 400 W, but the mean
    # power of its last 25 ms is 100 W.
    fooled = Gpu("GPU-a", power=square(100.0, 700.0, 0.1), tick_s=0.1, duty_s=0.025).traced()
    t = time.monotonic()

    assert fooled.energy_j(t - 10, t) == pytest.approx(4000.0, abs=30.0)
    assert fooled.counter_j(t) - fooled.counter_j(t - 10) == pytest.approx(1000.0, abs=11.0)


def test_held_power_is_the_mean_of_the_last_measured_part():
    # The power is low from 0.545 s and high from 1.09 s. The 25 ms before 1.1 s have 15 ms at 100 W and 10 ms at 300 W:
    # 1.5 + 3 = 4.5 J, a mean of 180 W.
    gpu = Gpu("GPU-a", power=square(100.0, 300.0, 1.09), tick_s=0.1, duty_s=0.025, power_mode="held")

    assert gpu.power.at(1.15) == 300.0
    assert gpu.power_w(1.15) == pytest.approx(180.0)


def test_ticks_with_jitter_come_in_order_and_near_their_times():
    gpu = Gpu("GPU-a", tick_s=0.1, tick_jitter_s=0.04)
    moments = [gpu.tick_moment_s(tick) for tick in range(10_000, 10_500)]

    assert moments == sorted(moments)
    assert max(abs(moment - 0.1 * tick) for tick, moment in enumerate(moments, 10_000)) <= 0.04
    assert {gpu.last_tick(moment + 1e-9) for moment in moments} == set(range(10_000, 10_500))


def test_two_processes_read_the_same_counter_value(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=WAVE, **SENSOR))
    code = f"answer = at({time.monotonic()}, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)"

    assert ask(trace, code) == ask(trace, code) > 0


def test_power_has_scopes(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), module_power=flat(500.0), memory_power=flat(80.0)))

    code = "answer = fields((186, 0), (186, 1), (186, 2), (185, 2), (185, 3), (186, 4), 138)"
    assert ask(trace, code) == [300_000, 500_000, "error 3", 80_000, "error 3", "error 2", "error 3"]


def test_board_without_a_module_returns_no_module_power(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), unsupported=("power.average",)))

    assert ask(trace, "answer = fields((186, 1), (185, 2), (185, 0), (186, 0))") == ["error 3"] * 3 + [300_000]


def test_each_field_value_is_returned_with_its_wall_clock_time(trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    code = """
before = time.time()
fault("0 power.instant delay 0.01")
first, second = pynvml.nvmlDeviceGetFieldValues(handle, [83, 186])
answer = [before, first.timestamp / 1e6, second.timestamp / 1e6, time.time()]
"""

    before_s, first_s, second_s, after_s = ask(trace, code)

    assert before_s - 0.001 <= first_s <= second_s - 0.01 <= after_s


def test_trace_file_defines_clocks_throttling_and_errors(trace):
    trace.write(
        Gpu(
            "GPU-a", "0:01:00", sm_clock_mhz=flat(1755.0), memory_clock_mhz=flat(2619.0), temperature_c=flat(61.0),
            throttle=0x4, ecc_corrected=7, ecc_uncorrected=2,
        )
    )  # fmt: skip
    code = """
clock, errors = pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetTotalEccErrors
answer = [clock(handle, 0), clock(handle, 1), clock(handle, 2), result(clock, handle, 3)]
answer += [pynvml.nvmlDeviceGetClock(handle, 1, 0), result(pynvml.nvmlDeviceGetClock, handle, 1, 3)]
answer += [pynvml.nvmlDeviceGetTemperature(handle, 0), pynvml.nvmlDeviceGetTemperatureV(handle, 0)]
answer += [pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)]
answer += [pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)]
answer += [errors(handle, 0, 0), errors(handle, 1, 0)]
"""

    assert ask(trace, code) == [1755, 1755, 2619, "error 3", 1755, "error 3", 61, 61, 4, 4, 7, 2]


def test_missing_features_of_a_board_return_not_supported(trace):
    trace.write(Gpu("GPU-a", sm_clock_mhz=None, memory_clock_mhz=None, temperature_c=None, unsupported=("ecc",)))
    code = """
answer = [
    result(pynvml.nvmlDeviceGetClockInfo, handle, 1),
    result(pynvml.nvmlDeviceGetClockInfo, handle, 2),
    result(pynvml.nvmlDeviceGetTemperature, handle, 0),
    result(pynvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
    result(pynvml.nvmlDeviceGetSerial, handle),
    result(pynvml.nvmlDeviceGetModuleId, handle),
    result(pynvml.nvmlDeviceGetBoardId, handle),
    result(pynvml.nvmlGpmSampleGet, handle, pynvml.nvmlGpmSampleAlloc()),
]
"""

    assert set(ask(trace, code)) == {"error 3"}


def test_memory_call_without_a_version_counts_reserved_memory_as_used(trace):
    trace.write(Gpu("GPU-a", memory=flat(10 * GIB), memory_total=80 * GIB, memory_reserved=GIB))
    code = """
first, second = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
sizes = first.used, first.free, second.used, second.reserved, second.free
answer = [[size >> 30 for size in sizes], result(pynvml.nvmlDeviceGetMemoryInfo, handle, 1)]
"""

    assert ask(trace, code) == [[11, 69, 10, 1, 69], "error 25"]


def test_trace_file_defines_the_identity_of_a_device(trace):
    about = {"name": "NVIDIA H100 80GB HBM3", "serial": "1650522003", "module_id": 3, "architecture": 9}
    trace.write(Gpu("GPU-a", "00000000:5E:00.0", power_limit_default_w=650.0, **about), driver="570.86.15")
    code = """
names = "Name", "Serial", "ModuleId", "Architecture", "Brand", "BoardId", "ComputeRunningProcesses"
limits = "EnforcedPowerLimit", "PowerManagementLimit", "PowerManagementDefaultLimit"
answer = [getattr(pynvml, f"nvmlDeviceGet{name}")(handle) for name in names + limits]
answer += [*fields(189, 190), pynvml.nvmlSystemGetDriverVersion()]
"""
    limits = [700_000, 700_000, 650_000, 650_000, 700_000]

    assert ask(trace, code) == [*about.values(), 14, 0x5E00, [], *limits, "570.86.15"]


GPM = {"gpm": 1, "sm_activity": square(0.2, 0.8, 0.5), "tensor_activity": flat(0.3), "dram_activity": flat(0.45)}

GPM_CODE = """
def sample(t, get=pynvml.nvmlGpmSampleGet, *arguments):
    return at(t, get, handle, *arguments, pynvml.nvmlGpmSampleAlloc())

def metrics(first, last, *ids):
    asked = pynvml.c_nvmlGpmMetricsGet_t(version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(ids))
    asked.sample1, asked.sample2 = first, last
    for metric, id in zip(asked.metrics, ids):
        metric.metricId = id
    pynvml.nvmlGpmMetricsGet(asked)
    return [f"error {metric.nvmlReturn}" if metric.nvmlReturn else metric.value for metric in asked.metrics[:len(ids)]]
"""


def test_gpm_returns_means_between_two_samples(trace):
    trace.write(Gpu("GPU-a", "0:01:00", **GPM))
    code = f"""{GPM_CODE}
answer = [pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice]
answer += metrics(sample(1000.0), sample(1000.75), 2, 3, 5, 10, 20, 60)
"""

    # From 0 to 0.75 s there are 0.5 s at 80 % and 0.25 s at 20 %: a mean of 60 %.
    assert ask(trace, code) == [
        1,
        pytest.approx(60.0),
        "error 3",
        pytest.approx(30),
        pytest.approx(45),
        *["error 3"] * 2,
    ]


def test_gpm_rejects_close_samples_and_samples_of_two_devices(trace):
    trace.write(Gpu("GPU-a", "0:01:00", **GPM), Gpu("GPU-b", "0:02:00", **GPM))
    code = f"""{GPM_CODE}
other = pynvml.nvmlGpmSampleGet(pynvml.nvmlDeviceGetHandleByIndex(1), pynvml.nvmlGpmSampleAlloc())
answer = [*metrics(sample(1000.0), sample(1000.09), 2, 61), result(metrics, sample(1000.0), other, 2)]
"""

    assert ask(trace, code) == ["error 21", "error 3", "error 2"]


def test_gpm_values_of_a_slice_are_those_of_its_gpu_instance(trace):
    trace.write(
        Gpu("GPU-a", "0:01:00", **GPM),
        Gpu("MIG-a", parent=0, instance=1, sm_activity=flat(0.1)),
        Gpu("MIG-b", parent=0, instance=5, sm_activity=flat(0.9)),
    )
    code = f"""{GPM_CODE}
first, last = (sample(t, pynvml.nvmlGpmMigSampleGet, 5) for t in (1000.0, 1001.0))
answer = [*metrics(first, last, 2, 5), result(sample, 1.0, pynvml.nvmlGpmMigSampleGet, 3)]
"""

    assert ask(trace, code) == [pytest.approx(90.0), "error 3", "error 6"]


def test_slice_reports_its_share_of_the_gpu(trace):
    trace.write(
        Gpu("GPU-a", "0:01:00"),
        Gpu("MIG-a", parent=0, instance=2, slices=3, memory_total=40 * GIB),
        Gpu("MIG-b", parent=0, instance=5, compute_instance=1, slices=2, compute_slices=1, multiprocessors=18),
    )
    code = """
def parts(part):
    about = pynvml.nvmlDeviceGetAttributes_v2(part)
    counts = about.gpuInstanceSliceCount, about.computeInstanceSliceCount, about.multiprocessorCount, about.memorySizeMB
    return [pynvml.nvmlDeviceGetGpuInstanceId(part), pynvml.nvmlDeviceGetComputeInstanceId(part), *counts]
handles = [result(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i) for i in range(3)]
answer = [pynvml.nvmlDeviceGetMaxMigDeviceCount(handle), parts(handles[0]), parts(handles[1]), handles[2]]
answer += [result(call, handle) for call in (pynvml.nvmlDeviceGetAttributes_v2, pynvml.nvmlDeviceGetGpuInstanceId)]
answer += [result(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles[0])]
"""
    first, second = [2, 0, 3, 3, 48, 40_960], [5, 1, 2, 1, 18, 81_920]

    assert ask(trace, code) == [7, first, second, "error 6", "error 3", "error 3", "error 3"]


EVENTS_CODE = """
events = pynvml.nvmlEventSetCreate()
pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)

def wait(milliseconds=0):
    began = time.monotonic()
    event = result(pynvml.nvmlEventSetWait_v2, events, milliseconds)
    waited = time.monotonic() - began
    if isinstance(event, str):
        return [event, waited]
    return [event.eventType, event.eventData, pynvml.nvmlDeviceGetUUID(event.device), waited]
"""


def test_event_is_delivered_once_to_registered_listeners(trace):
    trace.write(Gpu("GPU-a", "0:01:00"), Gpu("GPU-b", "0:02:00"))
    code = f"""{EVENTS_CODE}
answer = [pynvml.nvmlDeviceGetSupportedEventTypes(handle), wait()[0]]
fault("1 xid event 31", f"0 xid event 48 {{time.monotonic() - 60}}", "0 xid event 79")
answer += [wait()[:3], wait()[0]]
fault("0 xid event 79", "0 energy error 3")
answer += [wait()[0]]
fault()
wait()
fault("0 xid event 79")
answer += [wait()[:3], result(pynvml.nvmlDeviceRegisterEvents, handle, 16, events)]
pynvml.nvmlEventSetFree(events)
"""
    event, none = [8, 79, "GPU-a"], "error 10"

    assert ask(trace, code) == [8, none, event, none, none, event, "error 3"]


def test_wait_for_an_event_ends_at_the_event_or_the_timeout(trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    code = f"""{EVENTS_CODE}
answer = [wait(0)[-1], *wait(50), time.monotonic() + 0.05]
fault(f"0 xid event 79 {{answer[-1]}}")
answer += [*wait(30_000), time.monotonic()]
"""

    at_once_s, timeout, waited_s, event_s, kind, number, uuid, until_event_s, after_s = ask(trace, code)

    assert (timeout, kind, number, uuid) == ("error 10", 8, 79, "GPU-a")
    assert at_once_s < 0.05 <= waited_s
    assert until_event_s < 10.0
    assert event_s <= after_s


def test_frozen_counter_continues_at_its_true_value(trace):
    [gpu] = trace.write(Gpu("GPU-a", "0:01:00", power=WAVE))
    code = """
read = pynvml.nvmlDeviceGetTotalEnergyConsumption
began = time.monotonic()
fault(f"0 energy freeze {began} {began} {began + 0.1}")
answer = [began, read(handle), read(handle)]
time.sleep(0.1)
answer += [time.monotonic(), read(handle)]
"""

    began_s, first, second, ended_s, last = ask(trace, code)

    assert first == second == int(1e3 * gpu.counter_j(began_s))
    assert last >= int(1e3 * gpu.counter_j(ended_s))


@pytest.mark.parametrize(("verb", "offset_j"), [("back 500", -500), ("jump 500", 500)])
def test_fault_offset_is_added_to_the_counter(trace, verb, offset_j):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0)))
    code = f"""
read, now = pynvml.nvmlDeviceGetTotalEnergyConsumption, time.monotonic()
answer = []
for window in ("", now - 1, f"{{now - 2}} {{now - 1}}", now + 60):
    fault("0 energy freeze 1000", f"0 energy {verb} {{window}}")
    answer.append(read(handle))
"""

    assert ask(trace, code) == [300_000_000 + 1000 * offset for offset in (offset_j, offset_j, 0, 0)]


def test_fault_hang_occurs_once_and_faults_delay_and_spin_repeat(trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    code = """
def lasts(*lines):
    fault(*lines)
    times = []
    for _ in range(2):
        began = time.monotonic(), time.thread_time()
        pynvml.nvmlDeviceGetPowerUsage(handle)
        times.append([time.monotonic() - began[0], time.thread_time() - began[1]])
    return times
answer = [lasts(f"0 power {verb} 0.1") for verb in ("hang", "delay", "spin")]
answer += [lasts("0 energy hang 0.1"), lasts("0 power hang 0.1 0 1")]
"""

    hang, delay, spin, other, over = ask(trace, code)

    assert [wall_s >= 0.1 for wall_s, _ in hang] == [True, False]
    assert [wall_s >= 0.1 and busy_s < 0.05 for wall_s, busy_s in delay] == [True, True]
    assert [busy_s > 0.01 for _, busy_s in spin] == [True, True]
    assert max(wall_s for wall_s, _ in other + over) < 0.1


@pytest.mark.parametrize(
    ("word", "failing"),
    [
        ("memory", ["MemoryInfo"]),
        ("utilization", ["UtilizationRates"]),
        ("power", ["PowerUsage", 185, 186]),
        ("power.usage", ["PowerUsage"]),
        ("power.average", [185]),
        ("energy", ["TotalEnergyConsumption", 83]),
        ("energy.field", [83]),
        ("limit", ["EnforcedPowerLimit", "PowerManagementLimit", "PowerManagementDefaultLimit"]),
        ("throttle", ["CurrentClocksEventReasons", "CurrentClocksThrottleReasons"]),
        ("processes", ["ComputeRunningProcesses"]),
        ("about", ["Architecture", "Brand", "BoardId"]),
        ("gpm", []),
    ],
)
def test_fault_affects_all_calls_that_begin_with_its_name(trace, word, failing):
    trace.write(Gpu("GPU-a", "0:01:00"))
    code = f"""
names = "MemoryInfo UtilizationRates PowerUsage TotalEnergyConsumption EnforcedPowerLimit PowerManagementLimit "
names += "PowerManagementDefaultLimit CurrentClocksEventReasons CurrentClocksThrottleReasons "
names += "ComputeRunningProcesses Architecture Brand BoardId"
fault("0 {word} error 999")
answer = [name for name in names.split() if result(getattr(pynvml, "nvmlDeviceGet" + name), handle) == "error 999"]
answer += [id for id, value in zip((83, 185, 186), fields(83, 185, 186)) if value == "error 999"]
"""

    assert sorted(ask(trace, code), key=str) == sorted(failing, key=str)


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("clocks.sm", "nvmlDeviceGetClockInfo, handle, 1"),
        ("clocks", "nvmlDeviceGetClock, handle, 2, 0"),
        ("temperature", "nvmlDeviceGetTemperature, handle, 0"),
        ("ecc.uncorrected", "nvmlDeviceGetTotalEccErrors, handle, 1, 0"),
        ("fields", "nvmlDeviceGetFieldValues, handle, [186]"),
        ("gpm.support", "nvmlGpmQueryDeviceSupport, handle"),
        ("gpm.sample", "nvmlGpmSampleGet, handle, pynvml.nvmlGpmSampleAlloc()"),
        ("events", "nvmlEventSetWait_v2, events, 0"),
        ("mig", "nvmlDeviceGetMigMode, handle"),
    ],
)
def test_fault_can_be_set_for_every_group_of_calls(trace, word, call):
    trace.write(Gpu("GPU-a", "0:01:00", gpm=1))
    code = f"""{EVENTS_CODE}
fault("0 {word} error 999")
answer = [result(pynvml.{call})]
fault()
answer += [result(pynvml.{call}) == "error 999"]
"""

    assert ask(trace, code) == ["error 999", False]


def test_slices_are_lost_together_with_their_gpu(trace):
    trace.write(Gpu("GPU-a", "0:01:00"), Gpu("MIG-a", parent=0), Gpu("GPU-b", "0:02:00"))
    code = """
handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in ("MIG-a", "GPU-a", "GPU-b")]
fault("0 * lost")
answer = [result(pynvml.nvmlDeviceGetUUID, one) for one in handles]
"""

    assert ask(trace, code) == ["error 15", "error 15", "GPU-b"]


def test_calls_are_counted_by_function_and_process(trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    trace.count_calls()
    code = "fields(83, 186); pynvml.nvmlDeviceGetPowerUsage(handle); fields(83); answer = os.getpid()"

    pids = [ask(trace, code), ask(trace, code)]

    once = {
        "nvmlInitWithFlags": 1,
        "nvmlDeviceGetHandleByIndex_v2": 1,
        "nvmlDeviceGetFieldValues": 2,
        "nvmlDeviceGetPowerUsage": 1,
    }
    assert trace.call_count(pids[0]) == once
    assert trace.call_count() == {function: 2 * count for function, count in once.items()}
    trace.count_calls()
    assert not trace.call_count()


def test_call_without_faults_takes_microseconds(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=steps(100.0, 700.0, 0.05), **SENSOR))
    trace.fault("1 * error 999")
    code = """
times = []
for _ in range(2000):
    began = time.perf_counter()
    pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    times.append(time.perf_counter() - began)
answer = sorted(times)[1000]
"""

    assert ask(trace, code) < 100e-6


def test_remote_reader_returns_the_results_of_its_reader(trace):
    [gpu] = trace.write(Gpu("GPU-a", "0:01:00"))

    with trace.reader(Site(cuda_uuid=gpu.uuid)) as reader:
        sample, failures = reader.read()
        with pytest.raises(AttributeError, match="no_such_method"):
            reader.call("no_such_method")

    assert isinstance(sample, Sample)
    assert (reader.device.key, failures) == ("GPU-a", {})
