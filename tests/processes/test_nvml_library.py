"""The NVML library of the tests with the real pynvml; its values are compared with values computed in Python."""

import json
import os
import subprocess
import sys
import time

import pytest
from nvml_library import Gpu, bursts, sine, square, steps

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


def test_integral_of_a_curve_is_the_sum_of_its_values():
    wave = square(100.0, 300.0, 0.05)
    # Two periods: 0.05 s at 300 W and 0.05 s at 100 W are 15 + 5 = 20 J.
    assert wave.integral(0.0, 0.1) == pytest.approx(20.0)
    # From 0.02 to 0.03: 5 ms at 300 W and 5 ms at 100 W are 1.5 + 0.5 = 2 J.
    assert wave.integral(0.02, 0.03) == pytest.approx(2.0)
    for curve in (bursts(100.0, 700.0, 0.31, 0.4, seed=3), steps(100.0, 700.0, 0.31, seed=4)):
        fine = [curve.at(1000.0 + (i + 0.5) / 20_000) for i in range(40_000)]

        assert curve.integral(1000.0, 1002.0) == pytest.approx(sum(fine) / 20_000, rel=1e-3)
        assert curve.integral(1002.0, 1000.0) == pytest.approx(-curve.integral(1000.0, 1002.0))
        assert {100.0 <= value <= 700.0 for value in fine} == {True}


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


def test_held_power_is_the_mean_of_the_last_measured_part():
    # The power is low from 0.545 s and high from 1.09 s. The 25 ms before 1.1 s have 15 ms at 100 W and 10 ms at 300 W:
    # 1.5 + 3 = 4.5 J, a mean of 180 W.
    gpu = Gpu("GPU-a", power=square(100.0, 300.0, 1.09), tick_s=0.1, duty_s=0.025, power_mode="held")

    assert gpu.power.at(1.15) == 300.0
    assert gpu.power_w(1.15) == pytest.approx(180.0)


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
