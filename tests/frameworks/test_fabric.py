"""Plain loops with Lightning Fabric on the CPU; only environment variables attach effllm."""

from __future__ import annotations

import jobs
import pytest
from systems import RAN

pytest.importorskip("lightning", reason="needs Lightning")

pytestmark = [*jobs.needs_torch, pytest.mark.system("fabric", how=RAN)]

CPU = {"OMP_NUM_THREADS": "1"}
NET = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from PACKAGE import Fabric

torch.manual_seed(0)
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 15)
        self.out = torch.nn.Linear(15, 50)  # 750 + 750 + 50 parameters

    def forward(self, idx):
        return self.out(self.table(idx))

def loss_of(model, ids):
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

def made(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
"""
LOOP = """
fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp" if sys.argv[1] == "2" else "auto")
fabric.launch()
model = Net()
model, optimizer = fabric.setup(model, made(model))
generator = torch.Generator().manual_seed(fabric.global_rank)
data = torch.utils.data.DataLoader(torch.randint(50, (48, 8), generator=generator), batch_size=4)
for step, ids in enumerate(data):
    is_held = step % 2 == 0
    with fabric.no_backward_sync(model, enabled=is_held):
        loss = loss_of(model, ids)
        fabric.backward(loss)
    if not is_held:
        optimizer.step()
        optimizer.zero_grad()
    if fabric.global_rank == 0:
        print("loss", loss.item().hex())
    if step == 5:
        model.eval()
        with torch.no_grad():
            model(ids)
        model.train()
        fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
if fabric.global_rank == 0:
    torch.save(model.module, "model.pt")
    print("traces", open("model.pt", "rb").read().count(b"effllm"))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def script(loop, package="lightning.fabric"):
    return NET.replace("PACKAGE", package) + loop


def lines(job, word):
    return [line for line in job.stdout.splitlines() if line.startswith(word)]


@pytest.mark.parametrize(("ranks", "package"), [(2, "lightning.fabric"), (1, "lightning_fabric")])
def test_fabric_iterations_are_counted_and_losses_unchanged(frameworks, ranks, package):
    """Each rank has 12 micro-batches of 4 x 8 tokens, 2 per iteration; the evaluation batch is not counted."""
    pytest.importorskip(package, reason=f"needs {package}")
    job = frameworks.run(script(LOOP, package), ranks, ranks=ranks, environ=CPU)

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.status, summary.iterations, summary.parameters) == ("completed", 6, 1550)
    assert (summary.samples, summary.tokens) == (12 * 4 * ranks, 12 * 4 * 8 * ranks)
    assert summary.time_by_class["evaluation"] > 0
    assert summary.time_by_class["checkpoint"] > 0
    assert facts["framework"] == "fabric"
    assert (facts["precision"], facts["parallel_layout"]) == ("fp32", "DDP" if ranks == 2 else "single")
    assert "evaluation_in_iterations" not in facts
    assert not [line for line in summary.not_measured if line.startswith("first iteration")]
    assert not job.our_errors
    # DDP first synchronizes ranks in the last backward pass.
    assert (job.ledger.windows[-1].run.health.straggling_s is not None) is (ranks == 2)
    assert lines(job, "traces") == ["traces 0"]

    without = frameworks.run(script(LOOP, package), ranks, ranks=ranks, environ=CPU, attach="0")
    assert len(lines(job, "loss")) == 12
    assert lines(job, "loss") == lines(without, "loss")


GAN = """
fabric = Fabric(accelerator="cpu", devices=1)
one, two, teacher = Net(), Net(), Net().requires_grad_(False)
one, of_one = fabric.setup(one, made(one))
two, of_two = fabric.setup(two, made(two))
teacher = fabric.setup_module(teacher)
for step in range(6):
    ids = torch.randint(50, (4, 8))
    teacher(ids)
    for model, optimizer in ((one, of_one), (two, of_two)):
        loss = loss_of(model, ids)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_alternating_steps_of_two_models_count_as_one_iteration(frameworks):
    """Parameters are counted for both trained models, and batches only for the first; a frozen model is not counted."""
    summary = frameworks.run(script(GAN), environ=CPU).ledger.summary

    assert (summary.iterations, summary.parameters) == (6, 2 * 1550)
    assert (summary.samples, summary.tokens) == (6 * 4, 6 * 4 * 8)


COMPILED = """
from torch._dynamo.testing import CompileCounter

counter = CompileCounter()
fabric = Fabric(accelerator="cpu", devices=1)
model = Net()
if sys.argv[1] == "inside":
    model, optimizer = fabric.setup(torch.compile(model, backend=counter), made(model))
else:
    model, optimizer = fabric.setup(model, made(model))
    model = torch.compile(model, backend=counter)
for step in range(6):
    loss = loss_of(model, torch.randint(50, (4, 8)))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
print("graphs", counter.frame_count)
"""


@pytest.mark.parametrize(("place", "framework", "iterations"), [("inside", "fabric", 6), ("outside", "torch", 5)])
def test_hooks_do_not_change_compiled_graphs(frameworks, place, framework, iterations):
    """torch.compile around Fabric's wrapper hides the forward pass; then each optimizer step except the first one
    counts as an iteration."""
    job = frameworks.run(script(COMPILED), place, environ=CPU)
    without = frameworks.run(script(COMPILED), place, environ=CPU, attach="0")

    assert (job.ledger.facts["framework"], job.ledger.summary.iterations) == (framework, iterations)
    assert len(lines(job, "loss")) == 6
    assert lines(job, "loss") == lines(without, "loss")
    assert lines(job, "graphs") == lines(without, "graphs")


LITGPT = """
from litgpt import GPT, Config

fabric = Fabric(accelerator="cpu", devices=1)
model = GPT(Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, padded_vocab_size=50, block_size=8))
print("parameters", sum(one.numel() for one in model.parameters()))
model, optimizer = fabric.setup(model, made(model))
for step in range(6):
    loss = loss_of(model, torch.randint(50, (4, 8)))
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex())
"""


def test_tokens_of_a_litgpt_model_are_counted(frameworks):
    """The forward pass of LitGPT has the tokens in its argument ``idx``."""
    pytest.importorskip("litgpt", reason="needs litgpt")
    job = frameworks.run(script(LITGPT), environ=CPU)
    without = frameworks.run(script(LITGPT), environ=CPU, attach="0")

    summary = job.ledger.summary
    assert (summary.iterations, summary.samples, summary.tokens) == (6, 6 * 4, 6 * 4 * 8)
    assert lines(job, "parameters") == [f"parameters {summary.parameters}"]
    assert len(lines(job, "loss")) == 6
    assert lines(job, "loss") == lines(without, "loss")
