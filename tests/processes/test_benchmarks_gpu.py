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

from benchmarks import gpu
from benchmarks.figure import Figure
from benchmarks.gpu_waves import waves
from benchmarks.gpu_windows import OURS, Window, judged
from effllm.records.rank import Device
from effllm.sensor_profile import profile
from effllm.sensor_profile.record import LoadEdge

pytestmark = [pytest.mark.long, pytest.mark.alone]

REPOSITORY = Path(__file__).parents[2]
UUID = "GPU-7d1f9c3b-1111-2222-3333-444444444444"
H100 = "NVIDIA H100 80GB HBM3"


def python(*arguments, **variables):
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env={**os.environ, "COLUMNS": "100", **variables},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def test_missing_gpu_is_reported_in_one_line(tmp_path):
    done = python(
        "-m", "benchmarks.gpu", "--keep", "--folder", str(tmp_path / "results"), LD_LIBRARY_PATH=str(tmp_path)
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("benchmarks.gpu: there is no GPU here that could be measured: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "kept").exists()


def test_benchmark_without_cuda_lists_the_figures_it_cannot_measure(library, tmp_path):
    trace = Trace(library, tmp_path / "trace")
    trace.write(Gpu(UUID, "00000000:01:00.0", H100, flat(80.0), tick_s=0.1, power_mode="held"), driver="570.86.15")
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("raise ImportError")
    variables = {**trace.environment(), "PYTHONPATH": str(tmp_path / "site")}

    done = python("-m", "benchmarks.gpu", "--quick", "--keep", "--folder", str(tmp_path / "results"), **variables)

    assert done.returncode == 0, done.stderr
    [path] = (tmp_path / "results").iterdir()
    kept = json.loads(path.read_text())
    figures = {figure["name"]: figure for figure in kept["figures"]}
    assert path.name.endswith("-gpu-nvidia-h100-80gb-hbm3.json")
    assert (kept["machine"]["gpu"], kept["machine"]["driver"]) == (H100, "570.86.15")
    assert kept["machine"]["torch"] == "none that can compute on this GPU"
    assert figures["tick of the energy counter"]["value"] == pytest.approx(100.0, rel=0.01)
    assert figures.keys() >= {"full reading, at rest", "call: energy", "agent: share of a core at default settings"}
    assert len(kept["left_out"]) == 10 and kept["left_out"][0].startswith("lag, windows and the loaded GPU: ")
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

    def start_stretches(self, stretches_s):
        self._gpu._edges = []
        self._gpu.start_stretches(stretches_s)

    def take_edges(self):
        return self._gpu.take_edges()


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
    done = python("-c", program, UUID, **trace.environment())

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    ours, bare = (
        {name: one["value"] for name, one in figures.items() if name.startswith(tool)} for tool in (OURS, "counter")
    )
    assert [one["detail"]["windows"] for one in figures.values()] == [6, 10, 6, 10]
    assert ours[f"{OURS}: mean error of a window of 1 s, at most"] < 2.0
    assert all(own < other for own, other in zip(ours.values(), bare.values(), strict=True))
