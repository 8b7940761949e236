"""The hook of torchtitan with a fake of its modules, names and signatures, because torchtitan itself needs a GPU."""

from __future__ import annotations

import sys

import jobs
import pytest

pytestmark = [*jobs.needs_torch, pytest.mark.long, pytest.mark.system("torchtitan", how="stand-in")]

METRICS = """
class Logger(dict):
    def log(self, metrics, step):
        self.update(metrics)
class MetricsProcessor:
    def __init__(self, config, *, parallel_dims=None):
        self.ntokens_since_last_log = 0
        self.data_loading_times = []
        self.num_flops_per_token = -1
        self.logger = Logger()
    def should_log(self, step):
        return step % 3 == 0
    def log(self, step, global_avg_loss, global_max_loss, grad_norm=None, extra_metrics=None):
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
"""
TRAINER = """
import sys, time
from types import SimpleNamespace
import torch
from torchtitan.components.metrics import MetricsProcessor

class Checkpointer:
    def save(self, curr_step, last_step=False):
        if last_step:
            time.sleep(0.05)

class Validator:
    def validate(self, model_parts, step):
        time.sleep(0.02)

class Trainer:
    def __init__(self):
        self.config = SimpleNamespace(
            training=SimpleNamespace(seq_len=16, steps=8), model=SimpleNamespace(name="llama3", flavor="8B")
        )
        self.parallel_dims = SimpleNamespace(pp=1, pp_enabled=False, cp_enabled=False, tp_enabled=False)
        self.metrics_processor = MetricsProcessor(None, parallel_dims=self.parallel_dims)
        self.metrics_processor.num_flops_per_token = 216
        self.model_parts = [torch.nn.Linear(8, 4)]
        self.optimizer = torch.optim.SGD(self.model_parts[0].parameters(), lr=0.1)
        self.checkpointer, self.validator = Checkpointer(), Validator()
        self.step = 0
    def batch_generator(self):
        while True:
            began = time.perf_counter()
            time.sleep(0.02)
            labels = torch.zeros(2, 16)
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
            yield {}, labels
    def train_step(self, data_iterator):
        for _ in range(2):
            next(data_iterator)
        time.sleep(0.01)
        if "fail" in sys.argv and self.step == 5:
            raise RuntimeError("as ordered")
        self.model_parts[0](torch.ones(2, 8)).mean().backward()
        self.optimizer.step()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(self.step, 0.5 * self.step, 1.0, 0.1)
        deadline_s = time.monotonic() + 30
        while "wait" in sys.argv and self.step == 6 and not self.metrics_processor.logger:
            assert time.monotonic() < deadline_s, "nothing of the job's has come back"
            time.sleep(0.02)
            self.metrics_processor.log(self.step, 0.5 * self.step, 1.0, 0.1)
    def train(self):
        data_iterator = self.batch_generator()
        while self.step < self.config.training.steps:
            self.step += 1
            self.train_step(data_iterator)
            self.checkpointer.save(self.step, last_step=self.step == 8)
            if self.step % 4 == 0:
                self.validator.validate(self.model_parts, self.step)
"""
MAIN = """
if __name__ == "__main__":
    trainer = Trainer()
    trainer.train()
    print("logged", sorted(trainer.metrics_processor.logger))
"""


@pytest.fixture
def start(launch, tmp_path):
    """Return a function that starts `-m torchtitan.train` with the Trainer in a separate or in the main module."""

    def started(era, *arguments):
        package = tmp_path / "titan" / "torchtitan"
        (package / "components").mkdir(parents=True)
        for name, text in {
            "__init__.py": "__version__ = '0.0'\n",
            "components/__init__.py": "",
            "components/metrics.py": METRICS,
            "train.py": TRAINER + MAIN if era == "0.2" else "from torchtitan.trainer import Trainer\n" + MAIN,
            **({"trainer.py": TRAINER} if era == "0.3" else {}),
        }.items():
            (package / name).write_text(text)
        environ = {"EFFICIENTLLM_ATTACH": "1", "PYTHONPATH": str(package.parent), "EFFICIENTLLM_SINKS": "none"}
        job = launch._job()
        command = [sys.executable, "-m", "torchtitan.train", *arguments]
        return job.start(command, launch.environ({"log_interval": 2}, **environ))

    return started


@pytest.mark.alone
@pytest.mark.parametrize("era", ["0.2", "0.3"])
def test_steps_tokens_waits_and_phases_of_torchtitan_are_measured(start, era):
    job = start(era).done()
    summary = job.ledger.summary
    # 8 steps of 2 batches with 2 x 16 labels
    assert (summary.iterations, summary.tokens, summary.samples, summary.parameters) == (8, 512, 32, 36)
    assert summary.status == "completed"
    assert summary.loss == 3.0  # of step 6
    assert (job.ledger.facts["framework"], summary.model) == ("torchtitan", "llama3 8B")
    assert summary.metrics["al_seconds"].value == pytest.approx(0.01, abs=0.02)  # 0.05 with the loading
    # Each step has 0.04 s of data loading.
    assert summary.metrics["run_throughput/data_wait_ratio"].value == pytest.approx(0.75, abs=0.15)
    assert summary.time_by_class["checkpoint"] == pytest.approx(0.05, abs=0.03)
    assert summary.time_by_class["evaluation"] == pytest.approx(0.04, abs=0.03)
    assert job.our_errors == []


def test_loggers_of_torchtitan_receive_the_metrics(start):
    assert "efficientllm/al_seconds" in start("0.3", "wait").done().stdout


def test_status_of_a_run_with_a_failed_training_is_failed(start):
    job = start("0.3", "fail").wait()
    assert job.code == 1
    assert not job.left(within_s=8.0)
    assert (job.ledger.summary.iterations, job.ledger.summary.status) == (4, "failed")


def test_torchtitan_without_a_trainer_class_runs_without_metrics(launch, tmp_path):
    (tmp_path / "torchtitan" / "components").mkdir(parents=True)
    (tmp_path / "torchtitan" / "__init__.py").write_text("")
    (tmp_path / "torchtitan" / "train.py").write_text("def main(): pass\n")
    code = "import torch, torchtitan.train\nprint('goes on')\n"
    job = launch.code(code, environ={"EFFICIENTLLM_ATTACH": "1", "PYTHONPATH": str(tmp_path)}).done()
    assert job.stdout == "goes on\n"
    line, end = job.our_errors  # one line at the import, one line at the end
    assert "this version of torchtitan.train is unknown" in line
    assert "this job ran without metrics" in end
