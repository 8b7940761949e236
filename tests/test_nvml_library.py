"""The tests' own NVML library, seen through the real pynvml, against its truth in Python."""

import json
import os
import subprocess
import sys

import pytest
from nvml_library import Gpu, flat, sine, square

SQUARE = square(100.0, 300.0, 0.05)


def ask(trace, code):
    """Run ``code`` in a process that has the traced devices, and return the ``answer`` that it assigns."""
    script = f"import json, time, pynvml\npynvml.nvmlInit()\n{code}\nprint(json.dumps(answer))"
    environ = os.environ | trace.environment()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_square_wave_spends_half_its_time_high():
    # Two periods of 0.05 s: 0.05 s at 300 W and 0.05 s at 100 W are 15 + 5 = 20 J.
    assert SQUARE.integral(0.0, 0.1) == pytest.approx(20.0)
    # From 0.02 to 0.03: 5 ms at 300 W and 5 ms at 100 W are 1.5 + 0.5 = 2 J.
    assert SQUARE.integral(0.02, 0.03) == pytest.approx(2.0)


@pytest.mark.parametrize("curve", [flat(250.0), SQUARE, sine(100.0, 300.0, 0.07)], ids=str)
def test_the_energy_counter_is_the_integral_of_the_power(trace, curve):
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


def test_the_counter_moves_in_ticks(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), tick_s=0.5))

    millijoules = ask(
        trace,
        "answer = pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID('GPU-a'))",
    )

    assert millijoules % 150_000 in (0, 149_999)  # 300 W for 0.5 s, but for the rounding of one millijoule


def test_a_counter_that_is_reset_starts_from_zero(trace):
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0)))
    trace.fault("0 energy reset 0.5")
    code = """
before = time.monotonic()
answer = [before, pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0)), time.monotonic()]
"""

    before_s, millijoules, after_s = ask(trace, code)

    assert 300 * (before_s - 0.5) - 0.01 <= millijoules / 1e3 <= 300 * (after_s - 0.5) + 0.01


def test_power_by_field_is_power_by_call(trace):
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


def test_a_slice_belongs_to_its_gpu_and_is_not_counted(trace):
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


def test_a_lost_device_stays_lost_until_nvml_starts_anew(trace):
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
