"""The energy of EnergyTrackingCallback differs from a known trace by less than its stated error.

The sensor of the trace shows 0.4 % too much. Its calibration states a gain error of 0.5 %, or the agent calibrates it.
"""

from __future__ import annotations

import json
import time

import pytest
from nvml_library import Gpu, square

from effllm.energy.calibration import Calibration, store
from effllm.instruments._energy import J_PER_WH
from effllm.records.clock import unix_minus_monotonic_ns
from effllm.records.rank import UNCALIBRATED_GAIN_ERROR, Sensor

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = pytest.mark.alone

GAIN, GAIN_ERROR = 1.004, 0.005
SENSOR = Sensor(
    tick_s=0.1, tick_error_s=1e-5, lag_error_s=0.001, is_held=True, gain_error=GAIN_ERROR, source="measured"
)

SCRIPT = """
import random, sys, time
from effllm.instruments import EnergyTrackingCallback, RobustGPUMonitor
from transformers import Trainer, TrainerCallback
import tiny

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, draw=random.Random(1), **_):
        time.sleep(draw.uniform(0.1, 0.3))

class Waits:
    "Keeps the waits of the instruments, with the number of ended steps; replaces time.sleep."
    sleep, seen, trainer = time.sleep, [], None
    def __call__(self, seconds):
        if sys._getframe(1).f_globals["__name__"].startswith(("effllm.instruments", "effllm.hooks")):
            self.seen.append((seconds, self.trainer.state.global_step if self.trainer else 0))
        Waits.sleep(seconds)

time.sleep = Waits()
monitor = RobustGPUMonitor(0.1)
assert monitor.start_monitoring()
time.sleep(5.5)  # the baseline has samples of 5 s
trainer = Trainer(model=tiny.llama(), args=tiny.arguments(max_steps=30), train_dataset=tiny.rows(64),
                  data_collator=tiny.collate, callbacks=[Slow(), EnergyTrackingCallback(monitor, 1.0)])
Waits.trainer = trainer
trainer.train()
import json
json.dump(Waits.seen, open("waits.json", "w"))
monitor.stop_monitoring()
tiny.losses(trainer)
"""


class Trained:
    """A training with the callback on a GPU of a trace."""

    def __init__(self, job, gpu):
        self.job, self._gpu = job, gpu
        self._unix_minus_monotonic_s = unix_minus_monotonic_ns() * 1e-9

    def read(self, name):
        (path,) = (self.job.folder / "results").glob(f"{name}_????????_??????.json")
        return json.loads(path.read_text())

    def true_j(self, first, last):
        """Return the true energy from the start of an entry to the end of another entry."""
        start_s = first["timestamp"] - first["duration_s"] - self._unix_minus_monotonic_s
        return self._gpu.energy_j(start_s, last["timestamp"] - self._unix_minus_monotonic_s)


@pytest.fixture
def trained(frameworks, trace, tmp_path):
    def trained(power, is_calibrated=True):
        (gpu,) = trace.write(Gpu("GPU-a", "0:01:00", power=power, power_mode="held", tick_s=0.1, gain=GAIN))
        if is_calibrated:
            known = Calibration("Traced", "570.0", time.strftime("%Y-%m-%d"), SENSOR, measured_lag=True)
            store(tmp_path / "cache" / "efficientllm" / "calibration", known)
        job = frameworks.run(SCRIPT, environ=trace.environment(), device="nvml", collection_interval=0.1)
        return Trained(job, gpu)

    return trained


def errors_j(entry):
    """Return the stated random error and gain error of an entry."""
    return entry["energy_error_wh"] * J_PER_WH, entry["energy_gain_error_wh"] * J_PER_WH


@pytest.mark.parametrize("is_calibrated", [True, False])
def test_energy_agrees_with_the_trace_within_the_stated_error(trained, is_calibrated):
    found = trained(square(180.0, 620.0, 0.83, 0.6), is_calibrated)
    steps, intervals = found.read("energy_step_history"), found.read("energy_interval_history")
    summary = found.read("energy_monitoring_summary")
    gain_error = GAIN_ERROR if is_calibrated else UNCALIBRATED_GAIN_ERROR

    pairs = [(one, found.true_j(one, one)) for one in [*steps, *intervals]]
    pairs.append((summary, found.true_j(steps[0], steps[-1])))
    assert len(steps) == 30
    for one, true_j in pairs:
        joules, (error_j, gain_j) = one["energy_consumed_wh"] * J_PER_WH, errors_j(one)
        assert abs(joules - true_j) <= error_j + gain_j
        assert abs(joules - GAIN * true_j) <= error_j  # the rest of the difference is the gain of the sensor
        assert gain_j == pytest.approx(gain_error * joules)
        assert one["covered_s"] == pytest.approx(one["duration_s"])
    # Only the end of the training waits, for the last answers of the agent.
    assert {step for _, step in found.job.output("waits.json")} <= {30}
    # The stated error of a training is small enough to show a difference of a percent.
    assert not is_calibrated or sum(errors_j(summary)) < 0.01 * summary["energy_consumed_wh"] * J_PER_WH
