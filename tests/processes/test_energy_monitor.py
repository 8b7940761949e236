"""RobustGPUMonitor alone: it starts an agent, and its spans and markers have the energy of a known trace."""

import math
import time

import jobs
import pytest
from nvml_library import Gpu, flat, square

SCRIPT = """
import dataclasses, json, os, sys, threading, time
from effllm.instruments import RobustGPUMonitor
from effllm.trainer import session

session.READY_S = 60.0
monitor = RobustGPUMonitor(0.1{arguments})
assert monitor.start_monitoring()
began_s = time.monotonic()
time.sleep(max(0.5, {until_s} - time.monotonic()))
first_s = monitor.add_sync_marker("first")
time.sleep(1.0)
since = monitor.get_metrics_since_timestamp(first_s, wait_s=5.0)
held_s = []
for _ in range(50):
    before_s = time.monotonic()
    monitor.get_metrics_since_timestamp(first_s)
    held_s.append(time.monotonic() - before_s)
threads, modules = threading.active_count(), sorted({{"msgspec", "zmq", "pynvml"}} & set(sys.modules))
total = monitor.stop_monitoring()
found = dict(since=dataclasses.asdict(since), total=dataclasses.asdict(total), summary=monitor.summary())
found |= dict(began_s=began_s, held_s=sorted(held_s), threads=threads, modules=modules)
json.dump(found, open("truth.json", "w"))
"""


@pytest.fixture
def monitored(launch, trace):
    """Return a function that monitors a GPU, by default of 300 W, and returns the output and the job."""

    def monitored(arguments="", until_s=0.0, **gpu):
        trace.write(Gpu("GPU-a", "0:01:00", **{"power": flat(300.0), **gpu}))
        code = SCRIPT.format(arguments=arguments, until_s=until_s)
        job = launch.code(code, environ=trace.environment(), device="nvml", collection_interval=0.1).done()
        return job.output(), job

    return monitored


def test_energy_since_a_marker_is_watts_times_seconds(monitored):
    found, _ = monitored(", baseline_wait_s=1.0")
    since = found["since"]

    assert since["duration_s"] == pytest.approx(1.0, abs=0.2)
    assert since["energy_consumed_wh"] * 3600 == pytest.approx(300.0 * since["duration_s"], rel=0.02)
    assert (since["power_avg_w"], since["power_max_w"], since["power_min_w"]) == pytest.approx((300.0,) * 3, rel=0.02)
    assert (since["temperature_avg_c"], since["utilization_avg_percent"]) == pytest.approx((50.0, 50.0))
    assert since["gpu_name"] == "Traced"
    assert found["total"]["energy_consumed_wh"] * 3600 == pytest.approx(300.0 * found["total"]["duration_s"], rel=0.02)
    assert found["summary"]["baseline_power_w"] == pytest.approx(300.0, rel=0.02)
    assert found["summary"]["energy_above_baseline_wh"] * 3600 < 0.02 * 300.0 * found["total"]["duration_s"]
    assert [one["name"] for one in found["summary"]["markers"]] == ["first"]


@pytest.mark.alone
def test_energy_above_baseline_excludes_the_baseline_power(monitored):
    high_s = time.monotonic() + 12.0
    power = square(100.0, 400.0, high_s)  # 100 W, and 400 W from this time on
    found, _ = monitored(", enable_high_precision=True, baseline_wait_s=5.0", until_s=high_s + 1.0, power=power)
    began_s, duration_s, summary = found["began_s"], found["total"]["duration_s"], found["summary"]
    covered_s = summary["baseline_covered_s"]
    baseline_w = power.mean(began_s - covered_s, began_s)  # 100 W, if the machine is not slow
    truth_j = power.mean(began_s, began_s + duration_s) * duration_s

    assert 3.0 < covered_s <= 5.0
    assert summary["baseline_power_w"] == pytest.approx(baseline_w, rel=0.02)
    assert found["total"]["energy_consumed_wh"] * 3600 == pytest.approx(truth_j, rel=0.02)
    above_j = max(0.0, truth_j - baseline_w * duration_s)
    assert summary["energy_above_baseline_wh"] * 3600 == pytest.approx(above_j, rel=0.02, abs=10.0)
    # A reading every 0.1 s, at most one more for each edge of a span, and those of the calibration, 2 ms or more apart.
    assert duration_s / 0.1 - 5 <= found["total"]["samples_count"] <= duration_s / 0.1 + 8 + 1000


def test_monitor_without_high_precision_has_no_baseline(monitored):
    found, _ = monitored(", enable_high_precision=False, baseline_wait_s=1.0")

    assert found["total"]["energy_consumed_wh"] > 0
    assert math.isnan(found["summary"]["baseline_power_w"])
    assert math.isnan(found["summary"]["energy_above_baseline_wh"])


def test_monitor_starts_no_thread_and_does_not_wait(monitored):
    found, _ = monitored()

    assert (found["threads"], found["modules"]) == (1, [])
    assert found["held_s"][len(found["held_s"]) // 2] < 0.02  # a wait for the sensor takes a tick of 0.1 s


@pytest.mark.parametrize("device", [0, "cuda:0", "cuda"])
def test_device_is_given_by_index_or_name(monitored, device):
    found, job = monitored(f", device={device!r}")

    assert found["since"]["energy_consumed_wh"] > 0
    assert "energy is not measured" not in job.stderr


@pytest.mark.parametrize("device", [3, "cpu"])
def test_no_energy_is_measured_for_a_device_of_another_rank(monitored, device):
    found, job = monitored(f", device={device!r}")

    assert found["since"]["energy_consumed_wh"] != found["since"]["energy_consumed_wh"]
    line = f"energy is not measured: device={device!r} was requested; the agent reads Traced (cuda:0)"
    assert job.stderr.count(line) == 1


def test_index_of_a_device_counts_the_visible_gpus(launch, trace):
    """Local rank 1 of two GPUs measures the second, which torch calls cuda:1."""
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(100.0)), Gpu("GPU-b", "0:02:00", power=flat(300.0)))
    environ = trace.environment() | jobs.rank_environ(0, 1, local_rank=1)
    job = launch.code(SCRIPT.format(arguments=", device=1", until_s=0.0), environ=environ, device="nvml").done()

    assert job.output()["since"]["power_avg_w"] == pytest.approx(300.0, rel=0.02)


def test_warning_names_the_cause_if_the_device_cannot_be_opened(launch, trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    trace.fault("init * error 12")
    job = launch.code(SCRIPT.format(arguments="", until_s=0.0), environ=trace.environment(), device="nvml").done()

    cause = "libnvidia-ml.so.1 is missing: install the NVIDIA driver"
    assert job.stderr.count(f"energy is not measured: {cause}") == 1
