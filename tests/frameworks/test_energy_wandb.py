"""Keys of the energy in W&B: a real run of the package wandb, offline, whose file is read."""

from __future__ import annotations

import pytest
from nvml_library import Gpu, flat
from systems import RAN
from wandb_history import KEYS, OFFLINE, history

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
pytest.importorskip("wandb", reason="needs wandb")

pytestmark = pytest.mark.system("transformers", how=RAN)

SCRIPT = """
import sys, time
import tiny
from effllm.instruments import EnergyTrackingCallback
from transformers import Trainer, TrainerCallback

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep(0.3)

BEFORE
energy = EnergyTrackingCallback(sync_interval_s=0.3, carbon_intensity="document"MORE)
trainer = Trainer(model=tiny.llama(), args=tiny.arguments(report_to=REPORT_TO), train_dataset=tiny.rows(48),
                  data_collator=tiny.collate, callbacks=[Slow(), energy])
trainer.train()
AFTER
tiny.losses(trainer)
"""
#: Values that the simulated device has not; `gpu` has these.
OF_A_GPU = {"energy_step/temperature_avg_c", "energy_interval/temperature_avg_c"}


def script(before="", more="", after="", report_to='["wandb"]'):
    names = {"BEFORE": before, "MORE": more, "REPORT_TO": report_to, "AFTER": after}
    code = SCRIPT
    for name, text in names.items():
        code = code.replace(name, text)
    return code


@pytest.fixture
def gpu(trace):
    """Return the variables and settings for a GPU with 300 W, 50 °C and 80 %."""
    trace.write(Gpu("GPU-a", "0:01:00", power=flat(300.0), utilization=flat(0.8)))
    return {"environ": {**trace.environment(), **OFFLINE}, "device": "nvml"}


def keys(rows):
    """Return the keys of the energy callback: the Trainer's own logs have the energy of the job."""
    return {key for row in rows for key in row if "energy" in key} - {"train/energy_kwh"}


def test_function_log_gets_the_documented_keys(frameworks, gpu):
    before = 'import wandb\nrun = wandb.init(project="tests")'
    job = frameworks.run(script(before, ", log=run.log", "run.finish()"), **gpu)
    rows = history(job)
    steps = [row["energy_step/step"] for row in rows if "energy_step/step" in row]
    (final,) = (row for row in rows if "final_energy/total_energy_consumed_kwh" in row)

    assert keys(rows) == KEYS
    assert any("train/loss" in row for row in rows)  # one run has the values of the Trainer and of the energy
    assert steps == sorted(steps)
    assert final["final_energy/carbon_footprint_estimate_kg"] == pytest.approx(
        0.5 * final["final_energy/total_energy_consumed_kwh"]
    )
    assert not job.our_errors


def test_energy_is_not_logged_to_a_run_that_the_script_does_not_give(frameworks):
    """The script has a run of its own, and its Trainer reports to no tracker."""
    before = 'import wandb\nrun = wandb.init(project="tests")'
    job = frameworks.run(script(before, "", "run.log({'own': 1.0})\nrun.finish()", '"none"'), environ=OFFLINE)

    assert [set(row) for row in history(job)] == [{"own"}]


def test_training_continues_if_the_function_log_fails(frameworks):
    fails = "lambda values: 1 / 0"
    job = frameworks.run(script("", f", log={fails}", "", '["wandb"]'), environ=OFFLINE)

    assert len(job.output()["losses"]) == 6
    assert keys(history(job)) == KEYS - OF_A_GPU  # also those of the failed call
    line = "the function log= failed; the energy is in the logs of the Trainer from now on: ZeroDivisionError: "
    assert job.stderr.count(line) == 1
