"""Own times and losses of plain torch loops, from their backward passes: two ranks under DDP, and single processes."""

from __future__ import annotations

import re
from textwrap import dedent

import jobs
import pytest

from effllm.records.verdict import OWN_TIME

pytestmark = [*jobs.needs_torch, pytest.mark.system("torchrun", how="ran")]

ON = {"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none", "EFFICIENTLLM_LOG_INTERVAL": "10"}
#: Each world has its own port: a port that is found free may be taken before torchrun opens it.
ONE_NODE = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]

#: Two ranks, the second of which works longer at a place that the first argument names.
RANKS = """
import contextlib, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

where, modes = sys.argv[1], sys.argv[2].split("+")
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)

def work(place):
    time.sleep(0.002 + 0.02 * (place == where and dist.get_rank() == 1))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        if "buffer" in modes:
            self.register_buffer("inv_freq", torch.ones(64))

    def forward(self, x):
        work("forward")
        return self.layer(x)

models = [DDP(Model()) for _ in range(2 if "two models" in modes else 1)]
optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in models]
forward = [torch.compile(one) if "compile" in modes else one for one in models]
batches = 4 if "accumulation" in modes else 1
for _ in range(60 if batches > 1 else 90):
    for batch in range(batches):
        for model, call in zip(models, forward):
            is_last = batch == batches - 1 or "no_sync" not in modes
            with contextlib.nullcontext() if is_last else model.no_sync():
                work("before")
                out = call(torch.randn(4, 64))
                work("after")
                loss = out.square().mean() / batches
                loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
if dist.get_rank() == 0:
    print("loss", loss.item())
del models, optimizers, forward, model, call, out, loss  # torch 2.13 may abort at the end if they use a destroyed group
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(launch, tmp_path, num_ranks, code, *arguments, **settings):
    script = tmp_path / "train.py"
    script.write_text(code)
    return launch.torchrun([*ONE_NODE, str(num_ranks)], script, *arguments, environ=ON | settings).done(200)


@pytest.mark.parametrize(
    ("where", "modes"),
    [
        ("before", "plain"),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("after", "accumulation+no_sync+buffer"),  # beside other load, noise may hide the slow rank
                ("forward", "buffer"),
                ("after", "buffer"),
                ("before", "accumulation"),
                ("forward", "two models"),
                ("before", "compile+buffer"),
            )
        ),
    ],
)
def test_slow_rank_of_a_plain_ddp_loop_is_named(launch, tmp_path, where, modes):
    job = torchrun(launch, tmp_path, 2, RANKS, where, modes)

    summary = job.ledger.summary
    assert [(one.ranks, one.evidence) for one in summary.stragglers] == [((1,), OWN_TIME)], summary.verdict
    assert summary.verdict.cause == "straggler"
    assert job.our_errors == []


def test_losses_of_a_ddp_loop_are_the_same_without_metrics(launch, tmp_path):
    first, second = (
        torchrun(launch, tmp_path, 2, RANKS, "none", "buffer+accumulation", EFFICIENTLLM_ATTACH=on) for on in "10"
    )

    assert printed(first, "loss", str) == printed(second, "loss", str)


ALONE = """
import time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def loss_of(x=torch.ones(2, 8)):
    return model(x).square().mean()

def step(loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def alone(launch, code):
    return launch.code(ALONE + dedent(code), environ=ON).done(100)


#: Losses that are not read: to read a DTensor would be a collective. A copy in a capture would become a part of the
#: graph, and an allocation would end the capture with an error.
NOT_READ = """
class Distributed(torch.Tensor):
    device_mesh = "a mesh"
    def __float__(self):
        raise SystemExit("a collective")
class Captured(torch.Tensor):
    is_cuda = True
torch.cuda.is_current_stream_capturing = lambda: True
"""
SCALER = """
import torch.distributed.fsdp.sharded_grad_scaler
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
scaler = {}("cpu", init_scale=1024.0)
for _ in range(30):
    loss = loss_of()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
UNKNOWN = "for _ in range(31): loss = loss_of(); optimizer.zero_grad(); {}; optimizer.step()"
INFINITE = """
for at in range(40):
    optimizer.zero_grad()
    loss = loss_of() if at != 13 else loss_of() * float("inf")
    loss.backward()
    if at != 13:
        optimizer.step()
"""
GIVEN = """
import effllm
for number in range(31):
    step(loss_of())
    effllm.get_metrics_collector().log_metrics(number, 7.0)
"""
#: The sync point of reentrant checkpointing does not count, and neither do those of other threads.
CHECKPOINTS = """
import threading
from torch.utils.checkpoint import checkpoint
other = torch.nn.Linear(8, 4)

def elsewhere():
    for _ in range(50):
        (other(torch.ones(2, 8)).square().mean() * float("nan")).backward()

thread = threading.Thread(target=elsewhere)
thread.start()
for _ in range(30):
    step(loss := checkpoint(model, torch.ones(2, 8, requires_grad=True), use_reentrant=True).square().mean())
thread.join()
"""
LAST = "the loss of the last iteration"
#: Loop -> its iterations, its loss, and how many losses were not finite.
LOSSES = {
    "plain": ("for _ in range(40): step(loss := loss_of())", 39, LAST, 0),
    "last window is not full": ("for _ in range(37): step(loss := loss_of())", 36, LAST, 0),
    "last loss is nan": ("for at in range(37): step(loss_of() * (float('nan') if at == 36 else 1))", 36, None, 1),
    "one infinite loss": (INFINITE, 38, LAST, 1),
    "given losses have priority": (GIVEN, 30, 7.0, 0),
    "reentrant checkpointing, other threads": (CHECKPOINTS, 29, LAST, 0),
    "GradScaler": (SCALER.format("torch.amp.GradScaler"), 29, LAST, 0),
    "ShardedGradScaler": (
        SCALER.format("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"), 29, LAST, 0
    ),
    "two backward passes": (UNKNOWN.format("(loss / 2).backward(retain_graph=True); loss.backward()"), 30, None, 0),
    "a function of autograd": (UNKNOWN.format("torch.autograd.backward([loss])"), 30, None, 0),
    "a given gradient": (UNKNOWN.format("model(torch.ones(2, 8)).backward(torch.ones(2, 4))"), 30, None, 0),
    "of several ranks": (NOT_READ + "for _ in range(20): step(loss_of().as_subclass(Distributed))", 19, None, 0),
    "in a capture of a graph": (NOT_READ + "for _ in range(40): step(loss_of().as_subclass(Captured))", 39, None, 0),
}  # fmt: skip


@pytest.mark.parametrize(("code", "iterations", "loss", "not_finite"), LOSSES.values(), ids=LOSSES)
def test_loss_of_a_loop_is_that_of_its_last_iteration(launch, code, iterations, loss, not_finite):
    job = alone(launch, code + ("\nprint('last', loss.item())" if loss == LAST else ""))

    summary = job.ledger.summary
    assert (summary.iterations, summary.losses_not_finite) == (iterations, not_finite)
    assert summary.loss == (printed(job, "last", float) if loss == LAST else loss)
    assert job.our_errors == []


def printed(job, word, kind=int):
    """Return the number that the script printed behind a word."""
    return kind(job.stdout.split(f"{word} ")[1].split()[0])


@pytest.mark.parametrize("calls", ["loss.backward()", "(loss / 2).backward(retain_graph=True); (loss / 2).backward()"])
def test_loss_that_is_not_a_number_is_seen_within_two_windows(launch, calls):
    job = alone(
        launch,
        f"""
        for number in range(1, 62):
            loss = loss_of() * (float("nan") if number > 22 else 1.0)
            optimizer.zero_grad()
            {calls}
            optimizer.step()
            time.sleep(0.01)
        """,
    )

    summary = job.ledger.summary
    assert "loss_not_finite" in summary.events
    assert 22 <= summary.first_not_finite <= 22 + 20


BATCHES = """
from collections import deque
from itertools import islice
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"input_ids": torch.arange(6) % 50, "attention_mask": (torch.arange(6) < 4 + i % 3).long()} for i in range(60)]
loader, held_out = DataLoader(rows, batch_size=3), DataLoader(rows[:9], batch_size=3)
counts = []  # samples and tokens of each step

def train(*batches, is_one=False):
    optimizer.zero_grad()
    losses = [model(batch["input_ids"]).square().mean() for batch in batches]
    for loss in [sum(losses)] if is_one else losses:
        loss.backward()
    optimizer.step()
    masks = [batch["attention_mask"] for batch in batches]
    counts.append([sum(map(len, masks)), sum(int(mask.sum()) for mask in masks)])
"""

#: Loops that take batches in other orders, several batches, or other batches, before a backward pass.
ORDERS = {
    "a batch in each step": """
for _ in range(3):
    for batch in loader:
        train(batch)
    with torch.no_grad():
        for batch in held_out:
            model(batch["input_ids"])
""",
    "a batch ahead": """
for _ in range(3):
    batches = iter(loader)
    ahead = next(batches)
    while ahead is not None:
        batch, ahead = ahead, next(batches, None)
        train(batch)
""",
    "evaluation at the top": """
small = DataLoader(rows[:4], batch_size=2)
for at, batch in enumerate(loader):
    if at % 2:
        with torch.no_grad():
            for other in small:
                model(other["input_ids"])
    train(batch)
""",
    "evaluation in eval mode at the top": """
small = DataLoader(rows[:4], batch_size=2)
for at, batch in enumerate(loader):
    if at % 2:
        model.eval()
        for other in small:
            model(other["input_ids"])
        model.train()
    train(batch)
""",
    "all micro-batches first": """
batches = iter(loader)
while len(micro := list(islice(batches, 2))) == 2:
    train(*micro)
""",
    "two loaders": """
for pair in zip(loader, DataLoader(rows, batch_size=2)):
    train(*pair, is_one=True)
""",
    "two batches ahead": """
batches, ahead = iter(loader), deque()
for _ in range(len(loader)):
    while len(ahead) < 3 and (batch := next(batches, None)) is not None:
        ahead.append(batch)
    train(ahead.popleft())
""",
    "skipped batches": """
for at, batch in enumerate(loader):
    if at % 3:
        train(batch)
""",
}
SHORT = ("a batch in each step", "a batch ahead", "evaluation at the top", "all micro-batches first")


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in SHORT else pytest.mark.long) for one in ORDERS])
def test_tokens_are_those_of_the_batches_with_a_backward_pass(launch, name):
    """The first step starts the metrics; a batch ahead was taken before it."""
    known = "print('steps', len(counts)); print('samples', sum(samples for samples, _ in counts[FROM:]))\n"
    known += "print('tokens', sum(tokens for _, tokens in counts[FROM:]))"
    job = alone(launch, BATCHES + ORDERS[name] + known.replace("FROM", "2" if name == "two batches ahead" else "1"))

    summary = job.ledger.summary
    assert summary.iterations == printed(job, "steps") - 1
    assert (summary.samples, summary.tokens) == (printed(job, "samples"), printed(job, "tokens"))
    assert job.ledger.facts["token_source"] == summary.token_source == "attention mask"
    assert f"{summary.tokens:,}, from the batches (attention mask)" in (job.ledger.folder / "summary.txt").read_text()


def test_ids_without_names_are_counted_only_if_the_labels_are_the_ids():
    import torch

    from effllm.hooks._batches import counts_of_batch

    x = torch.arange(18).reshape(3, 6)
    shifted = torch.cat([x[:, 1:], torch.full((3, 1), -100)], 1)
    mask = torch.ones(3, 6).long()
    mask[0, 4:] = 0
    for batch, tokens in (
        ((x, shifted), 18),
        ([x, x.masked_fill(x < 9, -100)], 18),
        ((x, mask, x), 16),
        ((x,), 18),
        ((x, x.flip(1)), 0),
        ((x, shifted[:, :4]), 0),
        ((x, mask, shifted, x), 0),
        ((x.float(), x), 0),
    ):
        assert int(counts_of_batch(batch, is_language_model=True).tokens) == tokens, batch


def test_fields_of_an_object_and_nested_names_are_names():
    import torch

    from effllm.hooks._batches import counts_of_batch

    class Fields:
        def __init__(self):
            self.input_ids, self.attention_mask = torch.ones(3, 6).long(), torch.ones(3, 6).long().tril()

    for batch in (Fields(), {"text": vars(Fields()), "image": torch.ones(3, 4)}):
        assert (int(counts_of_batch(batch).tokens), counts_of_batch(batch).samples) == (6, 3)


LANGUAGE = """
from torch.utils.data import DataLoader
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50, bias=False)
    def forward(self, ids):
        return self.head(self.table(ids))
model = Net()
rows = [(torch.arange(6) % 50, (torch.arange(6) + 1) % 50) for i in range(60)]
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for ids, labels in DataLoader(rows, batch_size=3):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    optimizer.step()
"""
FSDP = (
    "from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard; "
    "from torch.distributed.device_mesh import init_device_mesh; "
    'torch.distributed.init_process_group("gloo")'
)
WRAPS = {
    "alone": (1, ""),
    "compiled": (1, 'model = torch.compile(model, backend="eager")'),
    "ddp": (
        2,
        'torch.distributed.init_process_group("gloo"); model = torch.nn.parallel.DistributedDataParallel(model)',
    ),
    "fsdp1": (2, f"{FSDP}; model = FullyShardedDataParallel(model, device_id=torch.device('cpu'))"),
    "fsdp": (2, f"{FSDP}; fully_shard(model.table); fully_shard(model)"),
    "fsdp, own mesh": (
        2,
        f"{FSDP}; fully_shard(model, mesh=init_device_mesh('cpu', (2,), mesh_dim_names=['dp_shard']))",
    ),
}


@pytest.mark.parametrize(
    "wrap",
    [
        *("alone", "ddp", "fsdp"),
        *(pytest.param(one, marks=pytest.mark.long) for one in ("compiled", "fsdp1", "fsdp, own mesh")),
    ],
)
def test_tokens_and_flops_of_a_language_model_follow_from_batches_without_names(launch, tmp_path, wrap):
    ranks, line = WRAPS[wrap]
    job = torchrun(launch, tmp_path, ranks, ALONE + LANGUAGE.format(wrap=line))

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.tokens, summary.samples) == (ranks * 19 * 3 * 6, ranks * 19 * 3)
    assert summary.parameters == 2 * 50 * 8, "of the whole model"
    assert facts["token_source"] == "all positions, because padding is unknown"
    assert facts["sequence_length"] == 6
    assert facts["parallel_layout"] == {1: "single", 2: "FSDP" if "fsdp" in wrap else "DDP"}[ranks]
    assert facts["flops_convention"].startswith("FLOPs per token: 6 x multiplied weights")
    assert not any("the FLOPs per token are unknown" in one for one in summary.waterfall.unknown)


@pytest.mark.parametrize(
    "line",
    [
        f"{FSDP}; fully_shard(model, mesh=init_device_mesh('cpu', (2,), mesh_dim_names=['cp']))",
        f"from torch.distributed.tensor.experimental import context_parallel; {FSDP}; fully_shard(model)",
    ],
)
def test_tokens_are_not_counted_where_ranks_may_share_batches(launch, tmp_path, line):
    job = torchrun(launch, tmp_path, 2, ALONE + LANGUAGE.format(wrap=line))

    assert (job.ledger.summary.iterations, job.ledger.summary.measured_tokens) == (19, None)
    assert "parallel_layout" not in job.ledger.facts


def test_loop_with_images_has_samples_and_no_tokens(launch):
    job = alone(
        launch,
        """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(60, 8), torch.zeros(60, dtype=torch.long)), batch_size=5)
        for x, y in loader:
            step(torch.nn.functional.cross_entropy(model(x), y))
        """,
    )

    assert (job.ledger.summary.samples, job.ledger.summary.tokens) == (11 * 5, None)


def test_counts_of_the_script_have_priority_over_batches(launch):
    job = alone(launch, BATCHES + "import effllm\nfor batch in loader: effllm.count(tokens=7, samples=1); train(batch)")

    assert (job.ledger.summary.tokens, job.ledger.summary.samples) == (19 * 7, 19)
    assert (job.ledger.summary.token_source, "token_source" in job.ledger.facts) == ("", False)


COMPILED = """
import torch, torch.distributed as dist
from torch._dynamo.utils import counters

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

def forward():
    loss = model(torch.ones(2, 8)).square().mean()
    return loss, scaler.scale(loss)

def step():
    loss, scaled = forward()
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss

PART = torch.compile(PART, backend="eager")
for _ in range(40):
    loss = step()
print("compiled", counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
print("last", loss.item())
"""


@pytest.mark.parametrize("part", ["forward", "step"])
def test_compiled_code_has_the_graphs_that_it_has_without_metrics(launch, part):
    code = COMPILED.replace("PART", part)
    job, plain = (launch.code(code, environ=ON | {"EFFICIENTLLM_ATTACH": on}).done(100) for on in ("1", "0"))

    first, second = (re.search(r"^compiled .*\nlast (.*)", one.stdout, re.MULTILINE) for one in (job, plain))
    assert first[0] == second[0]
    assert job.ledger.summary.loss == float(first[1])
    assert job.our_errors == []
