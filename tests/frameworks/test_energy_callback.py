"""EnergyTrackingCallback on a Trainer: logs, files and report have the energy of simulated devices."""

from __future__ import annotations

import json

import pytest
from systems import RAN

from effllm.devices.simulated import Waveform
from effllm.records.clock import unix_minus_monotonic_ns

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")
torch = pytest.importorskip("torch", reason="needs PyTorch")

pytestmark = pytest.mark.system("transformers", how=RAN)

SCRIPT = """
import sys, time
from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor
from transformers import Trainer, TrainerCallback
import tiny

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        time.sleep({step_s})
        {at_step}

class Sent(TrainerCallback):
    "In place of the callbacks that send the logs, which a Trainer calls before those of the script."
    seen = []
    def on_log(self, args, state, control, logs=None, **_):
        self.seen.append((state.global_step, dict(logs)))

energy = EnergyTrackingCallback({energy})
sent = Sent()
trainer = Trainer(model=tiny.llama(), args=tiny.arguments({arguments}), train_dataset=tiny.rows(48),
                  data_collator=tiny.collate, callbacks=[sent, Slow(), energy{more}])
{train}
import json
json.dump(sent.seen, open("sent.json", "w"))
tiny.losses(trainer)
"""


def script(energy="", arguments="", more="", step_s=0.3, at_step="", train="trainer.train()"):
    return SCRIPT.format(energy=energy, arguments=arguments, more=more, step_s=step_s, at_step=at_step, train=train)


def read(job, name):
    (path,) = (job.folder / "results").glob(f"{name}_????????_??????.json")
    return json.loads(path.read_text())


def energy_j(one):
    """Return the true energy of the simulated device from the start to the end of an entry."""
    end_s = one["timestamp"] - unix_minus_monotonic_ns() * 1e-9
    return Waveform().energy_j(end_s - one["duration_s"], end_s)


def test_energy_of_steps_and_intervals_agrees_with_the_simulation(frameworks):
    job = frameworks.run(script("RobustGPUMonitor(baseline_wait_s=1.0), 0.7, carbon_intensity='document'"))
    steps, intervals = read(job, "energy_step_history"), read(job, "energy_interval_history")
    summary, monitor = read(job, "energy_monitoring_summary"), read(job, "robust_gpu_energy")

    assert [one["step"] for one in steps] == [1, 2, 3, 4, 5, 6]
    for one in [*steps, *intervals]:
        assert one["energy_consumed_wh"] * 3600 == pytest.approx(energy_j(one), rel=0.02)
        assert one["covered_s"] == pytest.approx(one["duration_s"])
    total_wh = sum(one["energy_consumed_wh"] for one in steps)
    assert summary["energy_consumed_wh"] == pytest.approx(total_wh)
    assert sum(one["energy_consumed_wh"] for one in intervals) == pytest.approx(total_wh)
    assert sum(one["steps"] for one in intervals) == summary["steps"] == 6
    assert summary["carbon_footprint_estimate_kg"] == pytest.approx(total_wh / 1000 * 0.5)
    above_wh = total_wh - monitor["baseline_power_w"] * summary["covered_s"] / 3600
    assert 100.0 < monitor["baseline_power_w"] < 800.0
    assert summary["energy_above_baseline_wh"] == pytest.approx(max(above_wh, 0.0))
    assert "FINAL ENERGY REPORT:" in job.stdout
    assert not job.our_errors


def test_callbacks_that_send_logs_receive_the_energy(frameworks):
    job = frameworks.run(script("sync_interval_s=0.3"))
    sent = [(step, logs) for step, logs in json.loads((job.folder / "sent.json").read_text())]
    stepped = [(step, logs) for step, logs in sent if "energy_step/energy_per_step_wh" in logs]
    final = sent[-1][1]

    assert stepped
    assert all(logs["energy_step/step"] <= step for step, logs in stepped)
    assert {"energy_step/power_avg_w", "energy_step/energy_efficiency"} <= stepped[0][1].keys()
    assert any("energy_interval/energy_consumed_wh" in logs for _, logs in sent)
    assert final["final_energy/total_energy_consumed_kwh"] > 0
    assert final["final_energy/energy_per_epoch_kwh"] > 0
    assert "final_energy/carbon_footprint_estimate_kg" not in final  # the script gives no carbon intensity


def test_losses_are_the_same_with_and_without_the_callback(frameworks):
    with_it = frameworks.run(script(step_s=0.0)).output()["losses"]
    without = frameworks.run(script(step_s=0.0).replace(", energy]", "]")).output()["losses"]

    assert with_it == without


def test_energy_is_measured_once_if_the_callback_is_added_twice(frameworks):
    job = frameworks.run(script(more=", energy, EnergyTrackingCallback()", step_s=0.1))

    assert [one["step"] for one in read(job, "energy_step_history")] == [1, 2, 3, 4, 5, 6]
    assert job.stdout.count("FINAL ENERGY REPORT:") == 1


def test_energy_of_steps_before_an_error_is_written(frameworks):
    train = "try:\n    trainer.train()\nexcept ZeroDivisionError:\n    print('went on')"
    job = frameworks.run(script(at_step="1 / (state.global_step - 3)", train=train))

    assert "went on" in job.stdout
    assert [one["step"] for one in read(job, "energy_step_history")] == [1, 2, 3]


@pytest.mark.parametrize("settings", [{"metrics_enabled": "0"}, {"device": "none"}])
def test_training_goes_on_if_energy_cannot_be_measured(frameworks, settings):
    job = frameworks.run("import warnings\nwarnings.simplefilter('default')\n" + script(step_s=0.0), **settings)
    summary = read(job, "energy_monitoring_summary")

    assert len(job.output()["losses"]) == 6
    assert summary["energy_consumed_wh"] is None
    assert summary["total_energy_consumed_kwh"] is None
    assert "• Total energy: not measured" in job.stdout
    assert job.stderr.count("energy is not measured:") == 1


def test_callback_adds_no_thread_file_or_module_to_the_training(frameworks):
    count = (
        "import os, threading; Slow.seen = getattr(Slow, 'seen', []); "
        "Slow.seen.append((threading.active_count(), len(os.listdir('/proc/self/fd')), "
        "sorted({'msgspec', 'zmq'} & set(sys.modules))))"
    )
    show = "trainer.train()\nimport json; json.dump(Slow.seen, open('seen.json', 'w'))"
    job = frameworks.run(script(at_step=count, train=show, step_s=0.05))
    other = frameworks.run(script(at_step=count, train=show, step_s=0.05).replace(", energy]", "]"))
    seen = json.loads((job.folder / "seen.json").read_text())

    assert seen == json.loads((other.folder / "seen.json").read_text())
    assert seen[0][2] == []
