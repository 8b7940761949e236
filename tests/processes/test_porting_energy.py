"""Scripts for another energy callback and another energy log run; docs/porting.md lists the differences."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvml_library import Gpu, square

FOLDER = Path(__file__).parents[2] / "integration" / "sft_play"


# --- the energy callback ---


MONITORED = """
import dataclasses, json, time
from effllm.instruments import RobustGPUMonitor
from effllm.trainer import session

session.READY_S = 60.0
gpu_monitor = RobustGPUMonitor(sampling_interval=0.5, enable_high_precision={has_baseline}, baseline_wait_s={wait_s})
assert gpu_monitor.start_monitoring()
began_s = time.monotonic()
time.sleep(max(0.0, {high_s} - time.monotonic()) + 2.0)
total = gpu_monitor.stop_monitoring()
found = dict(began_s=began_s, total=dataclasses.asdict(total), **gpu_monitor.summary())
json.dump(found, open("truth.json", "w"))
"""


@pytest.fixture
def monitored(launch, trace):
    """Return a function that monitors a GPU and returns the GPU and the values; the power is 100 W, later 400 W.

    The power changes ``after_s`` seconds after the start.
    """

    def monitored(after_s, has_baseline, wait_s):
        high_s = time.monotonic() + after_s
        (gpu,) = trace.write(Gpu("GPU-a", "0:01:00", power=square(100.0, 400.0, high_s)))
        code = MONITORED.format(high_s=high_s, has_baseline=has_baseline, wait_s=wait_s)
        return gpu, launch.code(code, environ=trace.environment(), device="nvml").done().output()

    return monitored


@pytest.mark.alone
def test_energy_above_baseline_excludes_the_baseline_power(monitored):
    gpu, found = monitored(12.0, has_baseline=True, wait_s=5.0)
    began_s, total, duration_s = found["began_s"], found["total"], found["total"]["duration_s"]
    truth_j = gpu.energy_j(began_s, began_s + duration_s)
    baseline_w = gpu.power.mean(began_s - found["baseline_covered_s"], began_s)  # 100 W, if the machine is not slow
    above_j = max(0.0, truth_j - baseline_w * duration_s)

    assert 3.0 < found["baseline_covered_s"] <= 5.0
    assert found["baseline_power_w"] == pytest.approx(baseline_w, rel=0.02)
    assert total["energy_consumed_wh"] * 3600 == pytest.approx(truth_j, rel=0.02)
    assert found["energy_above_baseline_wh"] * 3600 == pytest.approx(above_j, rel=0.02, abs=10.0)
    # A reading every 0.5 s, at most one more for each edge of a span, and those of the calibration, 2 ms or more apart.
    assert duration_s / 0.5 - 3 <= total["samples_count"] <= duration_s / 0.5 + 6 + 1000


def test_monitor_without_high_precision_has_no_baseline(monitored):
    _, found = monitored(0.0, has_baseline=False, wait_s=1.0)

    assert found["total"]["energy_consumed_wh"] > 0
    assert math.isnan(found["baseline_power_w"])
    assert math.isnan(found["energy_above_baseline_wh"])


# --- the energy log of fine-tuning ---

SECTION_METRICS = """
metrics:
  enable_energy_logging: true
  sample_interval_s: 0.05
  warmup_s: 60.0
  log_vram_every_s: 1.0
  results_csv: "outputs/energy_results.csv"
"""

READ = """
import dataclasses, json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from settings import read_settings
import train
settings = read_settings(Path(sys.argv[2]))
train.configure(settings, tensorboard=False)
variables = {name: value for name, value in os.environ.items() if name.startswith("EFFICIENTLLM_")}
json.dump([dataclasses.asdict(settings), variables], sys.stdout)
"""


def read(path):
    """Return the settings of a YAML file, and the variables that the training script sets."""
    command = [sys.executable, "-c", READ, str(FOLDER / "scripts"), str(path)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_configuration_section_metrics_sets_the_effllm_variables(tmp_path):
    pytest.importorskip("yaml", reason="needs PyYAML")
    (tmp_path / "run.yaml").write_text(SECTION_METRICS)
    settings, variables = read(tmp_path / "run.yaml")

    assert settings["metrics"]["results_csv"] == "outputs/energy_results.csv"
    assert variables == {
        "EFFICIENTLLM_METRICS_ENABLED": "true",
        "EFFICIENTLLM_COLLECTION_INTERVAL": "0.05",
        "EFFICIENTLLM_WARMUP": "60s",
        "EFFICIENTLLM_SINKS": "none",
        "EFFICIENTLLM_RUN_DIR": "outputs/runs",
    }


@pytest.fixture
def folder(tmp_path):
    """Return a copy of the folder with the commands."""
    return shutil.copytree(FOLDER, tmp_path / "sft_play")


def make(folder, *targets):
    """Run targets of the Makefile in the folder."""
    command = ["make", "--no-print-directory", f"PYTHON={sys.executable}", *targets]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.parametrize(("backend", "twin"), [("bnb", "adamw"), ("unsloth", "adafactor")])
def test_make_target_of_a_backend_is_rejected_without_a_gpu(folder, backend, twin):
    torch = pytest.importorskip("torch")
    pytest.importorskip("yaml", reason="needs PyYAML")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = make(folder, f"measure-{backend}")

    assert done.returncode == 2
    line = f"[train] backend {backend} needs an NVIDIA GPU; on a CPU: make measure-{twin}"
    assert done.stdout.splitlines()[1:] == [line]
    assert not (folder / "outputs").exists()


@pytest.mark.parametrize("backend", ["bnb", "unsloth"])
def test_make_targets_of_a_backend_use_its_configuration(folder, backend):
    """``make -n`` prints the commands of a target."""
    plain, charts = (make(folder, "-n", name) for name in (f"measure-{backend}", f"train-{backend}-tb"))

    command = f"{sys.executable} scripts/train.py --config configs/run_{backend}.yaml"
    assert (plain.stdout, charts.stdout) == (f"{command}\n", f"{command} --tensorboard\n")
