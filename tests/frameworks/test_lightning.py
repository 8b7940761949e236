"""Lightning's Trainer, imported from both of its packages, in scripts without effllm code."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import jobs
import pytest

pytest.importorskip("lightning", reason="needs Lightning")
pytestmark = [*jobs.needs_torch, pytest.mark.system("lightning", how="ran")]

JOB = Path(__file__).parent.parent.parent / "integration" / "lightning" / "train.py"
PARAMETERS = 64 * 16 + 16 * 64 + 64  # weights of the embedding, then weights and bias of the head
ON = {"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none"}
SCRIPT = """
import logging, sys, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
import PACKAGE as pl
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)  # 36 parameters
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(48, 8), torch.zeros(48))
loader = torch.utils.data.DataLoader(data, batch_size=4)  # 12 batches
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
             enable_checkpointing=False, max_epochs=1)
"""


def train(launch, code, package="lightning.pytorch", **settings):
    script = dedent(SCRIPT).replace("PACKAGE", package) + dedent(code)
    return launch.code(script, environ=ON, **settings).done(300)


def test_steps_tokens_and_phases_of_the_trainer_are_reported(launch):
    job = launch.python(JOB, "--folder", ".", environ=ON).done(300)
    summary = job.ledger.summary
    # 20 steps of 4 rows of 32 positions; 24 positions per row are tokens, 8 are padding
    assert (summary.iterations, summary.tokens, summary.samples) == (20, 20 * 4 * 24, 80)
    assert (summary.parameters, summary.status) == (PARAMETERS, "completed")
    assert summary.metrics["run_throughput/padding_ratio"].value == pytest.approx(0.25)
    assert {"iterations", "evaluation", "checkpoint"} <= set(summary.time_by_class)
    assert summary.loss is not None
    facts = job.ledger.facts
    assert (facts["framework"], facts["precision"], facts["parallel_layout"]) == ("lightning", "fp32", "single")
    assert summary.model
    assert job.ledger.facts["token_source"] == "attention mask"
    assert job.ledger.event_texts("warning") == []
    assert [line for line in job.our_errors if "Adding 1 callbacks" not in line] == []


def test_losses_are_equal_with_and_without_effllm(launch):
    def losses(job):
        return [line for line in job.stdout.splitlines() if line.startswith("loss")]

    on = losses(launch.python(JOB, "--folder", ".", environ=ON).done(300))
    off = losses(launch.python(JOB, "--folder", ".", environ={**ON, "EFFICIENTLLM_METRICS_ENABLED": "no"}).done(300))
    assert on == off != []


def test_ranks_launched_by_lightning_share_one_run(launch):
    job = launch.python(JOB, "--folder", ".", "--devices", 2, "--accumulate", 2, environ=ON).done(300)
    summary = job.ledger.summary
    assert (summary.coverage.ranks_reporting, summary.coverage.ranks_expected) == (2, 2)
    assert job.ledger.facts["parallel_layout"] == "DDP"
    assert (summary.iterations, summary.parameters) == (20, PARAMETERS)
    assert (summary.tokens, summary.samples) == (2 * 20 * 2 * 4 * 24, 2 * 20 * 2 * 4)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_batches_without_tokens_are_counted_in_samples(launch, package):
    pytest.importorskip(package.split(".")[0])
    job = train(launch, "pl.Trainer(accumulate_grad_batches=3, **quiet).fit(Module(), loader)", package)
    summary = job.ledger.summary
    assert (summary.iterations, summary.samples, summary.parameters) == (4, 48, 36)
    assert not summary.tokens


def test_tokens_that_the_module_counts_are_reported(launch):
    job = train(
        launch,
        """
        import effllm
        class Counting(Module):
            def training_step(self, batch, batch_idx):
                effllm.count(tokens=batch[0].numel())
                return super().training_step(batch, batch_idx)
        pl.Trainer(**quiet).fit(Counting(), loader)
        """,
    )
    assert (job.ledger.summary.tokens, job.ledger.summary.samples) == (12 * 4 * 8, 48)


def test_steps_of_two_manual_optimizers_count_as_one_iteration(launch):
    job = train(
        launch,
        """
        class Gan(Module):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False
                self.other = torch.nn.Linear(8, 4)
            def training_step(self, batch, batch_idx):
                for optimizer, layer in zip(self.optimizers(), (self.layer, self.other)):
                    optimizer.zero_grad()
                    self.manual_backward(layer(batch[0]).mean())
                    optimizer.step()
            def configure_optimizers(self):
                return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]
        pl.Trainer(**quiet).fit(Gan(), loader)
        """,
    )
    assert (job.ledger.summary.iterations, job.ledger.summary.parameters) == (12, 72)


def test_training_after_a_failed_training_is_a_separate_run(launch):
    job = train(
        launch,
        """
        class Failing(Module):
            def training_step(self, batch, batch_idx):
                if batch_idx == 6:
                    raise RuntimeError("as ordered")
                return super().training_step(batch, batch_idx)
        try:
            pl.Trainer(**quiet).fit(Failing(), loader)
        except RuntimeError:
            pass
        class Wider(Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 5)
        pl.Trainer(**quiet).fit(Wider(), loader)
        """,
    )
    first, second = sorted((jobs.Ledger(folder) for folder in job.runs()), key=lambda one: one.summary.iterations)
    assert (first.summary.status, first.summary.iterations, first.summary.parameters) == ("failed", 6, 36)
    assert (second.summary.status, second.summary.iterations, second.summary.parameters) == ("completed", 12, 45)


def test_lightning_loggers_receive_the_metrics(launch):
    job = train(
        launch,
        """
        import time
        class Slow(Module):
            def training_step(self, batch, batch_idx):
                time.sleep(0.05)
                return super().training_step(batch, batch_idx)
        from lightning.pytorch.loggers import CSVLogger
        quiet |= {"logger": CSVLogger("logs"), "max_epochs": 3}
        pl.Trainer(log_every_n_steps=2, **quiet).fit(Slow(), loader)
        """,
        log_interval=2,
    )
    (metrics,) = job.folder.glob("logs/**/metrics.csv")
    assert "efficientllm/al_seconds" in metrics.read_text().splitlines()[0]


def test_callback_is_attached_in_spawned_processes(launch, tmp_path):
    # strategy="ddp_spawn" pickles the Trainer, callbacks included.
    script = tmp_path / "spawned.py"
    body = "pl.Trainer(strategy='ddp_spawn', devices=2, **quiet).fit(Module(), loader)"
    script.write_text(
        dedent(SCRIPT).replace("PACKAGE", "lightning.pytorch") + f"if __name__ == '__main__':\n    {body}\n"
    )
    summary = launch.python(script, environ=ON).done(300).ledger.summary
    assert (summary.coverage.ranks_reporting, summary.iterations, summary.samples) == (2, 6, 48)


def test_no_callback_is_added_without_the_environment_variable(launch):
    job = launch.code(
        dedent(SCRIPT).replace("PACKAGE", "lightning.pytorch")
        + "print([type(one).__name__ for one in pl.Trainer(**quiet).callbacks])\n"
        + "print('effllm.hooks._steps' in sys.modules)"
    ).done()
    assert "EfficientLLM" not in job.stdout


def test_entry_point_does_not_import_lightning_if_metrics_are_off(launch):
    job = launch.code(
        "import sys\nfrom effllm.hooks.lightning import callbacks\nprint(callbacks(), 'lightning' in sys.modules)"
    ).done()
    assert job.stdout == "[] False\n"
