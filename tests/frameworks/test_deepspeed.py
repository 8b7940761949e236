"""A plain loop with DeepSpeed's engine, two ranks on the CPU; only environment variables attach effllm."""

from __future__ import annotations

import jobs
import pytest
from systems import RAN

pytest.importorskip("deepspeed", reason="needs DeepSpeed")

pytestmark = pytest.mark.system("deepspeed", how=RAN)

CPU = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
SCRIPT = """
import os, sys
import torch, deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 15)
        self.out = torch.nn.Linear(15, 50)  # 750 + 750 + 50 parameters, an odd number of rows

    def forward(self, input_ids, labels=None):
        predicted = self.out(self.table(input_ids)).flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(predicted, labels.flatten())

model = Net()
stage = int(sys.argv[1])
adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": adam,
          "zero_optimization": {"stage": stage}, "bf16": {"enabled": stage > 0}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
generator = torch.Generator().manual_seed(engine.global_rank)
for step in range(12):
    ids = torch.randint(50, (4, 8), generator=generator)
    loss = engine(ids, labels=ids)
    engine.backward(loss)
    engine.step()
    if engine.global_rank == 0:
        print("loss", loss.item().hex())
    if step == 5:
        engine.eval()
        with torch.no_grad():
            engine(ids, labels=ids)
        engine.train()
        engine.save_checkpoint("checkpoint")
torch.distributed.destroy_process_group()
"""


def losses(job):
    return [line for line in job.stdout.splitlines() if line.startswith("loss")]


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_iterations_are_counted_and_losses_unchanged(frameworks, stage):
    """Each of 2 ranks has 12 micro-batches of 4 x 8 tokens, 2 per iteration; the evaluation batch is not counted."""
    job = frameworks.run(SCRIPT, stage, ranks=2, environ=CPU)

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations, summary.parameters) == ("completed", 6, 1550)
    assert (summary.samples, summary.tokens) == (12 * 4 * 2, 12 * 4 * 8 * 2)
    assert summary.time_by_class["evaluation"] > 0
    assert summary.time_by_class["checkpoint"] > 0
    assert (facts["framework"], facts["precision"]) == ("deepspeed", "bf16")
    assert (facts["parallel_layout"], facts["zero_stage"], facts["tensor_parallel"]) == ("ZeRO", stage, 1)
    assert not job.our_errors
    # In stages 0 to 2, ranks first synchronize in the last backward pass. In stage 3, ranks first synchronize in the
    # first forward pass, in an all-gather of parameters.
    assert (job.ledger.windows[-1].run.health.straggling_s is not None) is (stage < 3)

    without = frameworks.run(SCRIPT, stage, ranks=2, environ=CPU, attach="0")
    assert len(losses(job)) == 12
    assert losses(job) == losses(without)


def test_counts_of_the_loop_replace_counts_of_the_hook(frameworks):
    """Only the loop can count the padding; half of the positions are padding."""
    count = "    effllm.count(tokens=16, tokens_processed=32, samples=4)\n"
    code = "import effllm\n" + SCRIPT.replace("    engine.backward(loss)", count + "    engine.backward(loss)")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}

    job = frameworks.run(code, 0, environ={**CPU, **alone, "MASTER_PORT": str(jobs.unused_port())})

    assert (job.ledger.summary.tokens, job.ledger.summary.samples) == (12 * 16, 12 * 4)
    assert (job.ledger.facts["parallel_layout"], job.ledger.facts["precision"]) == ("single", "fp32")


@pytest.mark.parametrize(("rows", "stated"), [(4, None), (1, 4.0)])
def test_samples_per_second_of_deepspeed_are_compared(frameworks, rows, stated):
    """DeepSpeed multiplies its steps by the configured batch, of four rows; the loop's batch may have one row."""
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", **CPU}
    code = SCRIPT.replace("range(12)", "range(96)").replace(
        '"optimizer": adam', '"steps_per_print": 2, "optimizer": adam'
    )
    code = code.replace("    engine.backward(", "    import time; time.sleep(0.05)\n    engine.backward(").replace(
        "step == 5", "0"
    )
    code = code.replace("randint(50, (4, 8)", f"randint(50, ({rows}, 8)")
    job = frameworks.run(code, 0, environ={**environ, "MASTER_PORT": str(jobs.unused_port())}, log_interval=4)

    found = {one.name: one.factor for one in job.ledger.summary.audit.figures}
    assert found == ({"framework/samples_per_second": pytest.approx(stated, rel=0.05)} if stated else {})
    assert job.ledger.summary.instruments["framework/samples_per_second"].count > 5
