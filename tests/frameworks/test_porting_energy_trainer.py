"""Scripts with a Trainer for another energy callback and another energy log run; docs/porting.md lists them."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
from nvml_library import Gpu, flat
from systems import RAN
from wandb_history import KEYS

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


def charts(folder):
    """Return the names in the event files of TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulators = [EventAccumulator(str(path)) for path in folder.rglob("events.out.tfevents.*")]
    return {name for one in accumulators for name in one.Reload().Tags()["scalars"]}


def history(job, name):
    (path,) = (job.folder / "results").glob(f"energy_{name}_history_*.json")
    return json.loads(path.read_text())


def test_pipeline_with_the_callback_runs(frameworks, trace):
    """12 steps of at least 0.6 s on a GPU with 300 W, 50 °C and 80 %; 24 rows in 12 steps are one epoch."""
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), utilization=flat(0.8), memory=flat(8e9)))
    job = frameworks.start(PIPELINE, environ=trace.environment(), device="nvml").done(within_s=200.0)
    logs, steps, (first, *_) = job.output("logs.json"), history(job, "step"), history(job, "interval")
    of_steps = [one for one in logs if "energy_step/step" in one]

    assert (len(job.output()["losses"]), job.our_errors) == (12, [])
    for one in of_steps:
        assert one["energy_step/power_avg_w"] == pytest.approx(300.0, rel=0.02)
        assert one["energy_step/temperature_avg_c"] == pytest.approx(50.0)
    kwh = logs[-1]["final_energy/total_energy_consumed_kwh"]
    assert logs[-1]["final_energy/energy_per_epoch_kwh"] == pytest.approx(kwh)
    assert logs[-1]["final_energy/energy_efficiency_score"] == pytest.approx(1000.0 * kwh / 12 / 0.8)
    # The energy of the job is in the Trainer's own logs.
    sent = {name for logs in job.output("wandb.json") for name in logs if "energy" in name} - {"train/energy_kwh"}
    assert sent == KEYS
    assert charts(job.folder) >= KEYS - {"energy_step/step", "energy_interval/step"}
    assert sum(one["duration_s"] for one in steps[: first["steps"] - 1]) < 5.0 <= first["duration_s"]
    assert (steps[0]["gpu_name"], steps[0]["memory_used_avg_mb"]) == ("Traced", pytest.approx(8000.0))
    assert "RELATÓRIO ENERGÉTICO FINAL:" in job.stdout


# --- the energy log of fine-tuning ---

#: The commands of the guide; preparing the data is not part of effllm.
COMMANDS = """
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


def test_commands_measure_and_compare_all_configurations(shell):
    """Without a GPU for bnb and unsloth, two optimizers are compared."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    job = shell(COMMANDS)
    lines = job.stdout.splitlines()

    names = [line.split("/")[1] for line in lines if line.startswith("Testing configs/")]
    assert names == ["run_adafactor.yaml", "run_adamw.yaml", "run_bnb.yaml", "run_unsloth.yaml"]
    assert [row["optimizer"] for row in rows(job)] == ["adafactor", "adamw_torch"]
    for backend, twin in (("bnb", "adamw"), ("unsloth", "adafactor")):
        assert lines.count(f"[train] backend {backend} needs an NVIDIA GPU; on a CPU: make measure-{twin}") == 1
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
