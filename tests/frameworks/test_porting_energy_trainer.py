"""Scripts with a Trainer for another energy callback and another energy log run; docs/porting.md lists them."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import jobs
import pytest
from nvml_library import Gpu, Trace, flat
from systems import RAN

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
yaml = pytest.importorskip("yaml", reason="needs PyYAML")

pytestmark = pytest.mark.system("transformers", how=RAN)

FOLDER = Path(__file__).parents[2] / "integration" / "sft_play"
WITHOUT_NETWORK = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


# --- the energy callback ---

#: The class of the script, with a tiny model in place of a download, and an object in place of the package wandb.
PIPELINE = """
import importlib.machinery, json, sys, time
from pathlib import Path
from unittest.mock import MagicMock

wandb = MagicMock(__path__=[], __spec__=importlib.machinery.ModuleSpec("wandb", None))  # in place of the package
sys.modules.update({name: wandb for name in ("wandb", "wandb.sdk", "wandb.sdk.lib", "wandb.sdk.lib.config_util")})
wandb.ConfigError = ValueError

from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor
from effllm.trainer import session
from transformers import Trainer, TrainerCallback
import tiny

session.READY_S = 60.0

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.6)

class Logs(TrainerCallback):
    "Keeps the logs; as the callbacks that send logs, it is before the callback that adds the energy."
    sent = []
    def on_log(self, args, state, control, logs=None, **_):
        self.sent.append(dict(logs))

class LlamaFineTuner:
    def __init__(self, wandb_key, hf_token):
        wandb.login(key=wandb_key)
        self.gpu_monitor = RobustGPUMonitor(
            sampling_interval=0.5,
            enable_high_precision=True
        )
        self.gpu_monitor.start_monitoring()

    def run_complete_pipeline(self, dataset_path):
        rows = [json.loads(line) for line in Path(dataset_path).read_text().splitlines()]
        energy_callback = EnergyTrackingCallback(
            gpu_monitor=self.gpu_monitor,
            sync_interval_s=5.0,
            carbon_intensity="document",
            language="pt",
        )
        arguments = tiny.arguments(max_steps=12, num_train_epochs=1, report_to=["wandb", "tensorboard"])
        trainer = Trainer(model=tiny.llama(), args=arguments, train_dataset=rows, data_collator=tiny.collate,
                          callbacks=[Logs(), Slow(), energy_callback])
        trainer.train()
        return trainer

wandb_key = hf_token = ""
dataset_path = "rows.jsonl"
Path(dataset_path).write_text("".join(json.dumps(row) + "\\n" for row in tiny.rows(24)))

fine_tuner = LlamaFineTuner(wandb_key, hf_token)
trainer = fine_tuner.run_complete_pipeline(dataset_path)

fine_tuner.gpu_monitor.stop_monitoring()
json.dump(Logs.sent, open("logs.json", "w"))
json.dump([call.args[0] for call in wandb.log.call_args_list], open("wandb.json", "w"))
tiny.losses(trainer)
"""
STEP = {"power_avg_w", "energy_per_step_wh", "energy_efficiency", "temperature_avg_c"}
INTERVAL = {"power_avg_w", "energy_consumed_wh", "efficiency_wh_per_step", "temperature_avg_c"}
INTERVAL |= {"gpu_utilization_avg_percent"}
FINAL = {"total_energy_consumed_kwh", "energy_per_step_wh", "energy_per_epoch_kwh", "energy_efficiency_score"}
FINAL |= {"carbon_footprint_estimate_kg"}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory, library):
    """Return the finished job of the pipeline: 12 steps of at least 0.6 s on a GPU with 300 W, 50 °C and 80 %."""
    folder = tmp_path_factory.mktemp("pipeline")
    trace = Trace(library, folder / "trace")
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), utilization=flat(0.8), memory=flat(8e9)))
    more = {"PYTHONPATH": str(Path(__file__).parent), **WITHOUT_NETWORK}
    with jobs.launching(folder) as launch:
        yield launch.code(PIPELINE, environ={**trace.environment(), **more}, device="nvml", attach="1").done(100.0)


def keys_of(logs, group):
    return {key.removeprefix(group) for key in logs if key.startswith(group)}


def test_pipeline_with_the_callback_runs_without_errors(pipeline):
    assert len(pipeline.output()["losses"]) == 12
    assert not pipeline.our_errors


def test_logs_of_steps_and_intervals_have_all_keys(pipeline):
    logs = pipeline.output("logs.json")
    of_steps = [one for one in logs if keys_of(one, "energy_step/")]
    of_intervals = [one for one in logs if keys_of(one, "energy_interval/")]

    assert {frozenset(keys_of(one, "energy_step/")) for one in of_steps} == {frozenset({*STEP, "step"})}
    assert {frozenset(keys_of(one, "energy_interval/")) for one in of_intervals} == {frozenset({*INTERVAL, "step"})}
    for one in of_steps:
        assert one["energy_step/power_avg_w"] == pytest.approx(300.0, rel=0.02)
        assert one["energy_step/temperature_avg_c"] == pytest.approx(50.0)
        assert one["energy_step/energy_efficiency"] == pytest.approx(one["energy_step/energy_per_step_wh"] / 0.8)
    for one in of_intervals:
        assert one["energy_interval/gpu_utilization_avg_percent"] == pytest.approx(80.0)


def test_last_log_has_all_final_values(pipeline):
    last = pipeline.output("logs.json")[-1]
    kwh = last["final_energy/total_energy_consumed_kwh"]

    assert keys_of(last, "final_energy/") == FINAL
    assert last["final_energy/energy_per_step_wh"] == pytest.approx(1000.0 * kwh / 12)
    assert last["final_energy/energy_per_epoch_kwh"] == pytest.approx(kwh)  # 24 rows in 12 steps are one epoch
    assert last["final_energy/energy_efficiency_score"] == pytest.approx(1000.0 * kwh / 12 / 0.8)
    assert last["final_energy/carbon_footprint_estimate_kg"] == pytest.approx(0.5 * kwh)


def charts(folder):
    """Return the names in the event files of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulators = [EventAccumulator(str(path)) for path in folder.rglob("events.out.tfevents.*")]
    return {name for one in accumulators for name in one.Reload().Tags()["scalars"]}


def test_keys_in_trackers_are_those_of_the_logs(pipeline):
    expected = {f"energy_step/{name}" for name in STEP}
    expected |= {f"energy_interval/{name}" for name in INTERVAL}
    expected |= {f"final_energy/{name}" for name in FINAL}
    sent = {name for logs in pipeline.output("wandb.json") for name in logs if "energy" in name}

    # The energy of the job is in the Trainer's own logs.
    assert sent - {"energy_step/step", "energy_interval/step", "train/energy_kwh"} == expected
    assert expected <= charts(pipeline.folder)


def test_interval_of_5_s_ends_with_the_next_step(pipeline):
    (path,) = (pipeline.folder / "results").glob("energy_interval_history_*.json")
    first, *_ = json.loads(path.read_text())
    (path,) = (pipeline.folder / "results").glob("energy_step_history_*.json")
    steps = json.loads(path.read_text())

    before_s = sum(one["duration_s"] for one in steps[: first["steps"] - 1])
    assert before_s < 5.0 <= first["duration_s"]
    assert (steps[0]["gpu_name"], steps[0]["samples_count"] > 0) == ("Traced", True)
    assert steps[0]["memory_used_avg_mb"] == pytest.approx(8000.0)


def test_final_report_of_a_training_is_portuguese(pipeline):
    report = pipeline.stdout[pipeline.stdout.index("RELATÓRIO ENERGÉTICO FINAL:") :]

    assert "• Potência média: 300.0W\n• Energia por step: " in report


# --- the energy log of fine-tuning ---

#: Commands that run all configurations, and then compare their lines of the results file.
ALL_CONFIGURATIONS = """
for config in configs/run_*.yaml; do
    echo "Testing $config"
    python scripts/train.py --config $config
done
python scripts/analyze_energy.py outputs/energy_results.csv
"""
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def shell(tmp_path, launch):
    """Return a function that runs shell lines in a copy of the folder, with short trainings on a simulated GPU."""
    folder = shutil.copytree(FOLDER, tmp_path / "sft_play")
    for name in ("run_adamw", "run_adafactor"):
        path = folder / "configs" / f"{name}.yaml"
        body = yaml.safe_load(path.read_text())
        body["model"]["llama"] = SMALL
        body["train"] |= {"max_steps": 8, "batch_size": 4}
        body["metrics"]["warmup_s"] = 0.0
        path.write_text(yaml.safe_dump(body))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)

    def shell(lines, environ=None, **settings):
        job = launch._job()
        chosen = launch.environ({"run_dir": "outputs/runs", **settings}, **WITHOUT_NETWORK, **(environ or {}))
        chosen["PATH"] = f"{tmp_path / 'bin'}:{chosen['PATH']}"
        for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of the make that runs the tests
            chosen.pop(name, None)
        job.folder = folder
        return job.start(["bash", "-c", lines], chosen).wait(250.0)

    return shell


def rows(job):
    with (job.folder / "outputs" / "energy_results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_configurations_are_measured_and_compared(shell):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    job = shell(ALL_CONFIGURATIONS)
    lines = job.stdout.splitlines()

    names = [line.split("/")[1] for line in lines if line.startswith("Testing configs/")]
    assert names == ["run_adafactor.yaml", "run_adamw.yaml", "run_bnb.yaml", "run_unsloth.yaml"]
    assert [row["optimizer"] for row in rows(job)] == ["adafactor", "adamw_torch"]
    for twin in ("adamw", "adafactor"):
        assert job.stdout.count(f"needs an NVIDIA GPU; on a CPU: make measure-{twin}") == 1
    assert "outputs/energy_results.csv: 2 runs" in lines
    assert "torch adamw_torch fp32, compared with torch adafactor fp32:" in lines
    assert lines[-1] == "some energy is of simulated devices"
    assert job.code == 0


def test_missing_nvml_is_reported_and_training_continues(shell, trace):
    trace.write(Gpu("GPU-a", "0:01:00"))
    trace.fault("init * error 9")
    job = shell("make PYTHON=python measure-adamw", trace.environment(), device="nvml")
    reasons = [line for line in job.stdout.splitlines() if line.startswith("[train] not measured: ")]

    assert job.code == 0
    reason = "the NVIDIA driver is not loaded: load it, or choose another device"
    assert reasons == [f"[train] not measured: energy: rank 0: no device is sampled: {reason}"]
    (row,) = rows(job)
    assert int(row["tokens_processed"]) > 0
    assert float(row["wall_s"]) > 0
    assert {row[name] for name in ("energy_J", "avg_power_W", "J_per_token", "E10k_J", "vram_peak_MB")} == {""}
