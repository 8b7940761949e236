"""A training loop from accelerate's documentation, started by `accelerate launch` and by Python."""

from __future__ import annotations

import sys

import jobs
import pytest

pytest.importorskip("accelerate", reason="needs accelerate")
pytestmark = [*jobs.needs_torch, pytest.mark.system("accelerate", how="ran")]

ON = {"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none"}
SCRIPT = """
import sys, torch
from accelerate import Accelerator
import effllm
torch.manual_seed(0)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=int(sys.argv[1]))
model = torch.nn.Linear(8, 4)  # 36 parameters
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(96, 8), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(batch).square().mean()
        effllm.count(tokens=batch.numel(), samples=len(batch))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print("loss", loss.item().hex())
accelerator.end_training()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def launched(launch, script, accumulate):
    job = launch._job()
    # With --cpu, accelerate starts one process. With --multi_gpu, accelerate starts torchrun; the script selects the
    # CPU.
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        *options,
        "--dynamo_backend=no",
        "--main_process_port",
    ]
    return job.start([*command, str(jobs.unused_port()), str(script), str(accumulate)], launch.environ({}, **ON))


def test_accumulated_micro_batches_count_as_one_iteration(launch, script):
    job = launch.python(script, 3, environ=ON).done(60)
    summary = job.ledger.summary
    # The 24 batches are 8 steps, and the first step is not measured. Each of the other 7 steps has 3 batches of 4 rows
    # of 8 tokens.
    assert (summary.iterations, summary.samples, summary.tokens) == (7, 84, 84 * 8)
    assert summary.parameters == 36
    assert job.ledger.facts["framework"] == "accelerate"
    assert job.our_errors == []


def test_accelerate_launch_starts_two_ranks_of_one_run(launch, script):
    job = launched(launch, script, 2).done(90)
    summary = job.ledger.summary
    assert (summary.coverage.ranks_reporting, summary.coverage.ranks_expected) == (2, 2)
    # Each rank has 12 of 24 batches: 6 steps, of which 5 are measured.
    assert (summary.iterations, summary.samples, summary.parameters) == (5, 2 * 5 * 8, 36)
    # The last backward pass of an iteration begins at a sync point.
    assert all("straggler/named_ranks" in window.values for window in job.ledger.windows)


def test_losses_are_equal_with_and_without_effllm(launch, script):
    def losses(**environ):
        job = launch.python(script, 2, environ={**ON, **environ}).done(60)
        return [line for line in job.stdout.splitlines() if line.startswith("loss")]

    on = losses()
    assert len(on) == 24
    assert on == losses(EFFICIENTLLM_METRICS_ENABLED="no")
