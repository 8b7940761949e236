"""benchmarks/gpu.py runs without complete hardware, and its figures agree with known true values."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvml_library import Gpu, Trace, bursts, flat
from sensed_gpu import NS, SensedGpu

from benchmarks import gpu, gpu_driver, gpu_training
from benchmarks.figure import Figure
from benchmarks.gpu_waves import waves
from benchmarks.gpu_windows import OURS, Window, judged, two_levels
from effllm.records.rank import Device
from effllm.sensor_profile import profile
from effllm.sensor_profile.record import LoadEdge

pytestmark = [pytest.mark.long, pytest.mark.alone]

REPOSITORY = Path(__file__).parents[2]
UUID = "GPU-7d1f9c3b-1111-2222-3333-444444444444"
H100 = "NVIDIA H100 80GB HBM3"


def bench(*arguments, **variables):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "COLUMNS": "100", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


# --- the command ---


def test_missing_gpu_is_reported_in_one_line(tmp_path):
    done = bench("--keep", "--folder", str(tmp_path / "results"), LD_LIBRARY_PATH=str(tmp_path))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("benchmarks.gpu: there is no GPU here that could be measured: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_benchmark_without_cuda_lists_the_figures_it_cannot_measure(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", H100, flat(80.0), tick_s=0.1, power_mode="held"), driver="570.86.15")
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError")
    variables = {**trace.environment(), "PYTHONPATH": str(tmp_path / "site")}

    done = bench("--quick", "--keep", "--folder", str(tmp_path / "results"), **variables)

    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in kept["figures"]}
    assert path.name.endswith("-gpu-nvidia-h100-80gb-hbm3.json")
    assert (kept["machine"]["gpu"], kept["machine"]["driver"]) == (H100, "570.86.15")
    assert kept["machine"]["torch"] == "none that can compute on this GPU"
    assert figures["tick of the energy counter"]["value"] == pytest.approx(100.0, rel=0.01)
    assert {
        "full reading, at rest",
        "call: energy",
        "call: utilization",
        "agent: share of a core at default settings",
    } <= set(figures)
    assert [line.partition(":")[0] for line in kept["left_out"]] == [
        "lag, windows and the loaded GPU",
        "losses and times of a training",
        "matrix products",
        "calls under load",
        "CUDA graphs and profiled steps",
        "CUDA calls beside readings",
        "windows' energy against the load's",
        "training with metrics on against off",
        "counter against power under square waves",
        "peaks of memory against effllm fit",
    ]
    assert all(line in " ".join(done.stdout.split()) for line in kept["left_out"])
    assert UUID not in path.read_text() + done.stdout


class Board:
    """A reader of which only the description is used."""

    device = Device(key="GPU-1", kind="nvml", name=H100, driver="570")


def test_part_that_fails_or_hangs_loses_no_figures(tmp_path):
    parts = gpu._Bench(Board(), "", quick=True, until_s=time.monotonic() + 1.0)
    figure = Figure("a figure", 1.0, "ms")
    parts.run(gpu._Step("fails", lambda: 1 / 0, 0.1, 0.1))
    parts.run(gpu._Step("works", lambda: parts.figures.append(figure), 0.1, 0.1))
    parts.run(gpu._Step("without sensors", lambda: None, 0.1, 0.1, needs_profile=True))
    parts.run(gpu._Step("hangs", lambda: time.sleep(60), 0.1, 0.1))
    parts.run(gpu._Step("has no time", lambda: None, 10.0, 5.0))

    kept = json.loads(gpu._keep(parts, tmp_path).read_text())
    assert [one["name"] for one in kept["figures"]] == ["a figure"] and kept["profile"] is None
    assert [line.split()[:2] for line in kept["left_out"]] == [
        ["fails:", "ZeroDivisionError:"], ["without", "sensors:"], ["hangs:", "_TimeIsUp:"], ["has", "no"],
    ]  # fmt: skip


def test_training_loop_has_the_same_losses_with_metrics_and_without(monkeypatch):
    monkeypatch.setenv("EFFICIENTLLM_DEVICE", "simulated")
    on, off = (gpu_training.train("plain", 20, is_measured=is_on) for is_on in (True, False))

    assert on.loop["losses"] == off.loop["losses"] and len(on.loop["losses"]) == 30
    assert on.summary["tokens"] == on.summary["iterations"] * on.loop["tokens_per_step"]
    assert on.metric("tokens_per_second") > 0 and off.summary == {}


def test_failed_training_loop_is_reported_with_the_end_of_its_error_output():
    with pytest.raises(RuntimeError, match=r"the loop ended with 1: .*captured"):
        gpu_training.train("captured", 1, is_measured=False, settings={"CUDA_VISIBLE_DEVICES": ""})


def test_mfu_is_compared_with_activity_times_clock():
    readings = [{"tensor_activity_ratio": 0.8, "sm_clock_hz": 1.6e9}, {"sm_clock_hz": 1.5e9}] * 3

    rate, ratio = gpu_driver._product_figures("bf16", 7e14, 1e15, 1.6e9, readings)
    (alone,) = gpu_driver._product_figures("bf16", 7e14, 1e15, None, readings)

    assert (rate.value, ratio.value) == pytest.approx((700.0, 0.7 / 0.8))
    assert ratio.detail["readings_with_activity"] == 3 and alone == rate


# --- the counter beside power ---


@pytest.mark.parametrize("traits", [{}, {"lag_s": 0.04}, {"counts": 1.06}])
def test_energy_from_dense_power_readings_agrees_with_the_counter(traits):
    sensed = SensedGpu(tick_s=0.1, **traits)
    found = profile(sensed, lambda: sensed, 30.0, clock=sensed.clock)

    figures = {figure.name: figure for figure in waves(sensed, SameGpu(sensed), found, 12, sensed.clock)}

    dense = [figure for name, figure in figures.items() if "read every" in name]
    assert [name.partition(":")[0] for name in figures if "read every" in name] == [
        "square wave of 0.2 s",
        "square wave of 2 s",
        "square wave of 10 s",
    ]
    assert [figure.value for figure in dense] == pytest.approx([1 / traits.get("counts", 1.0)] * 3, rel=0.01)


class SameGpu:
    """A load that can be restarted."""

    def __init__(self, gpu):
        self._gpu = gpu

    def start(self, stretches_s):
        self._gpu._edges = []
        self._gpu.start(stretches_s)

    def take_edges(self):
        return self._gpu.take_edges()


# --- windows ---


def test_idle_and_load_power_are_fitted_to_all_windows():
    # The power is 100 W without load and 600 W with load. Each window has 1 s without load, and 0, 1 or 3 s with load.
    assert two_levels([1.0, 2.0, 4.0], [0.0, 1.0, 3.0], [100.0, 700.0, 1900.0]) == pytest.approx((100.0, 500.0))


def test_no_power_levels_are_fitted_if_all_windows_have_equal_load():
    assert two_levels([1.0, 2.0], [0.5, 1.0], [350.0, 700.0]) is None


def test_error_of_a_window_is_relative_to_two_fitted_power_levels():
    edges = [LoadEdge(second * NS, second % 2 == 1) for second in range(1, 12)]  # load in 1..2, 3..4, ...
    exact = [Window(1.5, start * NS, start * NS + 3 * NS // 2, on_s * 500.0 + 150.0, 1.0) for start, on_s in
             [(1, 1.0), (2, 0.5), (3, 1.0), (4, 0.5), (5, 1.0), (6, 0.5)]]  # fmt: skip
    off = [Window(one.length_s, one.start_ns, one.end_ns, one.joules * (1 + 0.02 * (-1) ** (number // 2)), 1.0)
           for number, one in enumerate(exact[:4])]  # fmt: skip

    [right], [wrong] = judged(OURS, exact, edges), judged(OURS, off, edges)

    assert right.value == pytest.approx(0.0, abs=1e-9)
    assert wrong.value == pytest.approx(2.0, abs=1e-6)  # the errors of the windows are +2 % and -2 %
    assert (right.detail["in_stated_interval"], wrong.detail["in_stated_interval"]) == (1.0, 0.0)


def test_energy_of_windows_through_nvml_is_within_the_stated_error(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    power = bursts(90.0, 620.0, 0.73, 0.5, 3)
    trace.write(Gpu(UUID, "00000000:01:00.0", H100, power, tick_s=0.1, lag_s=0.03, power_mode="held"))
    program = """
import sys
sys.path.insert(0, "tests")
from dataclasses import asdict
import json, known_load
from benchmarks.gpu_windows import windows
from effllm.records.rank import Sensor
sensor = Sensor(tick_s=0.1, tick_error_s=1e-4, lag_s=0.03, lag_error_s=0.005)
figures = windows(sys.argv[1], known_load.of_trace(), sensor, {1.0: 6, 0.2: 10})
print(json.dumps({figure.name: asdict(figure) for figure in figures}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, UUID],
        cwd=REPOSITORY,
        env={**os.environ, **trace.environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    ours, bare = (
        {name: one["value"] for name, one in figures.items() if name.startswith(tool)} for tool in (OURS, "counter")
    )
    assert [one["detail"]["windows"] for one in figures.values()] == [6, 10, 6, 10]
    assert ours[f"{OURS}: mean error of a window of 1 s, at most"] < 2.0
    assert all(own < other for own, other in zip(ours.values(), bare.values(), strict=True))
