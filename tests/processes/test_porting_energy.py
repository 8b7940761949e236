"""Scripts for another energy callback and another energy log run; docs/porting.md lists the differences."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from nvml_library import Gpu, square
from sft_play_sections import SECTION_METRICS, SECTIONS_BNB, SECTIONS_UNSLOTH

from effllm.instruments import EnergyMetrics
from effllm.instruments._energy import Baseline, SpanReadings
from effllm.instruments.energy_report import Block, entry, final_values, intensity, report, write_files
from effllm.instruments.results_csv import append_row
from effllm.records.spans import SpanPart

FOLDER = Path(__file__).parents[2] / "integration" / "sft_play"


# --- the energy callback ---


def block(joules, seconds, steps, utilization):
    """Return the block of a GPU with these sums."""
    ends = {"start_ns": 0, "end_ns": round(seconds * 1e9)}
    shares = {"utilization_seconds": utilization * seconds, "utilization_covered_s": seconds}
    part = SpanPart(1, 0, 1, **ends, joules=joules, covered_s=seconds, **shares)
    return Block(SpanReadings.of([part]), steps, 1, 1 + round(seconds * 1e9))


def test_energy_metrics_of_a_script_have_the_given_values():
    metrics = EnergyMetrics(
        timestamp=1753713022.5,
        step=100,
        epoch=0.3,
        power_avg_w=300.0,
        power_max_w=350.0,
        power_min_w=250.0,
        energy_consumed_wh=0.5,
        temperature_avg_c=60.0,
        temperature_max_c=65.0,
        utilization_avg_percent=90.0,
        memory_used_avg_mb=8000.0,
        gpu_name="NVIDIA A100",
        duration_s=6.0,
        samples_count=12,
    )
    values = dataclasses.asdict(metrics)

    assert EnergyMetrics(*values.values()) == metrics
    kinds = {field.name: field.type for field in dataclasses.fields(EnergyMetrics)}
    others = {"step": "int", "samples_count": "int", "gpu_name": "str"}
    assert kinds == {name: others.get(name, "float") for name in values}


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


@pytest.mark.parametrize(("utilization", "score"), [(0.5, 0.2), (0.001, 10.0)])
def test_efficiency_divides_energy_per_step_by_utilization(utilization, score):
    """36 kJ in 100 steps are 0.1 Wh per step; a utilization below 0.01 counts as 0.01."""
    of_steps = block(36_000.0, 120.0, 100, utilization)

    assert final_values(of_steps, 1.0, None)["final_energy/energy_efficiency_score"] == pytest.approx(score)


def test_efficiency_of_an_entry_is_computed_from_its_fields():
    of_step = block(720.0, 2.0, 1, 0.8)
    metrics = EnergyMetrics(0.0, 1, 0.0, 360.0, 360.0, 360.0, 0.2, 60.0, 60.0, 80.0, 0.0, "", 2.0, 4)
    written = entry(metrics, of_step, Baseline())

    utilization_factor = written["utilization_avg_percent"] / 100.0
    assert written["energy_efficiency"] == pytest.approx(written["energy_consumed_wh"] / max(0.01, utilization_factor))


def test_carbon_mass_is_half_a_kilogram_per_kilowatt_hour():
    two_kwh = block(2 * 3.6e6, 3600.0, 10, 0.9)
    final = final_values(two_kwh, 1.0, intensity(None, "document"))

    assert final["final_energy/total_energy_consumed_kwh"] == pytest.approx(2.0)
    assert final["final_energy/carbon_footprint_estimate_kg"] == pytest.approx(1.0)


def test_names_of_the_four_energy_files_contain_the_same_time(tmp_path):
    paths = write_files(str(tmp_path / "results"), ([], [], {}, {}))

    stamp = paths[0].stem.removeprefix("energy_step_history_")
    time.strptime(stamp, "%Y%m%d_%H%M%S")
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == [
        f"energy_interval_history_{stamp}.json",
        f"energy_monitoring_summary_{stamp}.json",
        f"energy_step_history_{stamp}.json",
        f"robust_gpu_energy_{stamp}.json",
    ]


def test_portuguese_report_of_an_hour_has_nine_values():
    """550 W for an hour are 0.55 kWh; 1000 steps have 0.55 Wh each, and 0.55 Wh / 0.92 is 0.5978."""
    hour = block(550.0 * 3600, 3600.0, 1000, 0.92)

    assert report(hour, 3.0, intensity(None, "document"), language="pt").splitlines() == [
        "RELATÓRIO ENERGÉTICO FINAL:",
        "• Duração: 3600s (1.00h)",
        "• Steps: 1000",
        "• Épocas: 3.00",
        "• Energia total: 0.5500 kWh",
        "• Potência média: 550.0W",
        "• Energia por step: 0.5500Wh",
        "• Energia por época: 0.1833kWh",
        "• Score de eficiência: 0.5978",
        "• Pegada de carbono estimada: 0.275000kg CO2",
    ]


# --- the energy log of fine-tuning ---

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


@pytest.mark.parametrize(("name", "sections"), [("bnb", SECTIONS_BNB), ("unsloth", SECTIONS_UNSLOTH)])
def test_configuration_of_a_backend_has_the_known_keys(tmp_path, name, sections):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    (tmp_path / "run.yaml").write_text(sections)
    settings, _ = read(tmp_path / "run.yaml")
    complete, variables = read(FOLDER / "configs" / f"run_{name}.yaml")

    for section, values in yaml.safe_load(sections).items():
        assert values.items() <= settings[section].items()
        assert values.items() <= complete[section].items()
    assert complete["metrics"] == yaml.safe_load(SECTION_METRICS)["metrics"]
    assert variables["EFFICIENTLLM_COLLECTION_INTERVAL"] == "0.05"


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


def test_file_of_results_has_the_known_columns(tmp_path):
    path = tmp_path / "outputs" / "energy_results.csv"
    append_row(path, {"tokens_processed": 20_000, "energy_J": 800.0, "backend": "bnb", "notes": "LoRA r=32"})
    shown = subprocess.run(["cat", "outputs/energy_results.csv"], cwd=tmp_path, capture_output=True, text=True).stdout

    (row,) = csv.DictReader(shown.splitlines())
    assert list(row) == [
        "tokens_processed", "wall_s", "warmup_s", "energy_J", "avg_power_W", "peak_power_W", "tok_per_s",
        "J_per_token", "E10k_J", "vram_peak_MB", "vram_avg_MB", "model", "dataset", "backend", "optimizer",
        "batch_size", "grad_accum", "seq_len", "precision", "seed", "notes",
    ]  # fmt: skip
    assert (row["tokens_processed"], row["energy_J"], row["wall_s"]) == ("20000", "800", "")
