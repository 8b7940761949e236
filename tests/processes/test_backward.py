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


def ranks(launch, tmp_path, where, modes, **settings):
    script = tmp_path / "train.py"
    script.write_text(dedent(RANKS))
    return launch.torchrun([*ONE_NODE, "2"], script, where, modes, environ=ON | settings).done(200)


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
    job = ranks(launch, tmp_path, where, modes)

    summary = job.ledger.summary
    assert [(one.ranks, one.evidence) for one in summary.stragglers] == [((1,), OWN_TIME)], summary.verdict
    assert summary.verdict.cause == "straggler"
    assert job.our_errors == []


def test_losses_of_a_ddp_loop_are_the_same_without_metrics(launch, tmp_path):
    seen = [ranks(launch, tmp_path, "none", "buffer+accumulation", EFFICIENTLLM_ATTACH=on) for on in ("1", "0")]

    first, second = ([line for line in job.stdout.splitlines() if line.startswith("loss")] for job in seen)
    assert first == second != []


ALONE = """
import time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def alone(launch, code):
    return launch.code(dedent(ALONE) + dedent(code), environ=ON).done(100)


def test_loss_of_a_loop_is_that_of_its_last_iteration(launch):
    job = alone(
        launch,
        """
        for _ in range(40):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("last", loss.item())
        """,
    )

    assert job.ledger.summary.loss == float(job.stdout.split("last ")[1].split()[0])
    assert job.ledger.summary.losses_not_finite == 0


@pytest.mark.parametrize(("steps", "is_last_nan"), [(37, False), (37, True)])
def test_loss_of_the_last_iteration_is_seen_in_a_window_that_is_not_full(launch, steps, is_last_nan):
    job = alone(
        launch,
        f"""
        for at in range({steps}):
            scale = float("nan") if {is_last_nan} and at == {steps} - 1 else 1.0
            loss = model(torch.ones(2, 8)).square().mean() * scale
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("last", loss.item())
        """,
    )

    summary = job.ledger.summary
    assert summary.losses_not_finite == is_last_nan
    assert summary.loss == (None if is_last_nan else float(job.stdout.split("last ")[1].split()[0]))


def test_loss_of_several_ranks_is_not_read(launch):
    """To read a DTensor would be a collective."""
    job = alone(
        launch,
        """
        class Distributed(torch.Tensor):
            device_mesh = "a mesh"
            def __float__(self):
                raise SystemExit("a collective")

        for _ in range(20):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            loss.as_subclass(Distributed).backward()
            optimizer.step()
        """,
    )

    assert (job.ledger.summary.loss, job.ledger.summary.iterations) == (None, 19)


def test_single_infinite_loss_is_counted(launch):
    job = alone(
        launch,
        """
        for at in range(40):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            (loss if at != 13 else loss * float("inf")).backward()
            if at != 13:
                optimizer.step()
        """,
    )

    assert (job.ledger.summary.losses_not_finite, job.ledger.summary.loss is not None) == (1, True)


@pytest.mark.parametrize(
    "body",
    [
        "(loss / 2).backward(retain_graph=True); (loss / 2).backward()",
        "torch.autograd.backward([loss])",
        "model(torch.ones(2, 8)).backward(torch.ones(2, 4))",
    ],
)
def test_loss_of_unknown_scale_is_not_shown(launch, body):
    job = alone(
        launch,
        f"""
        for _ in range(31):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            {body}
            optimizer.step()
        """,
    )

    assert job.ledger.summary.loss is None
    assert job.ledger.summary.iterations == 30


@pytest.mark.parametrize(
    "scaler", ["torch.amp.GradScaler", "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"]
)
def test_scaler_is_divided_out_of_the_loss(launch, scaler):
    job = alone(
        launch,
        f"""
        import torch.distributed.fsdp.sharded_grad_scaler
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        scaler = {scaler}("cpu", init_scale=1024.0)
        for _ in range(30):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print("last", loss.item())
        """,
    )

    assert job.ledger.summary.loss == float(job.stdout.split("last ")[1].split()[0])


@pytest.mark.parametrize("calls", ["loss.backward()", "(loss / 2).backward(retain_graph=True); (loss / 2).backward()"])
def test_loss_that_is_not_a_number_is_seen_within_two_windows(launch, calls):
    job = alone(
        launch,
        f"""
        for number in range(1, 62):
            loss = model(torch.ones(2, 8)).square().mean() * (float("nan") if number > 22 else 1.0)
            optimizer.zero_grad()
            {calls}
            optimizer.step()
            time.sleep(0.01)
        """,
    )

    summary = job.ledger.summary
    assert "loss_not_finite" in summary.events
    assert 22 <= summary.first_not_finite <= 22 + 20


def test_given_losses_have_priority(launch):
    job = alone(
        launch,
        """
        import effllm
        for number in range(31):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            effllm.get_metrics_collector().log_metrics(number, 7.0)
        """,
    )

    assert job.ledger.summary.loss == 7.0


def test_reentrant_checkpointing_is_no_sync_point_and_other_threads_are_no_loop(launch):
    job = alone(
        launch,
        """
        import threading
        from torch.utils.checkpoint import checkpoint
        other = torch.nn.Linear(8, 4)

        def elsewhere():
            for _ in range(50):
                (other(torch.ones(2, 8)).square().mean() * float("nan")).backward()

        thread = threading.Thread(target=elsewhere)
        thread.start()
        for _ in range(30):
            x = torch.ones(2, 8, requires_grad=True)
            loss = checkpoint(model, x, use_reentrant=True).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        thread.join()
        print("last", loss.item())
        """,
    )

    summary = job.ledger.summary
    assert (summary.loss, summary.losses_not_finite) == (float(job.stdout.split("last ")[1].split()[0]), 0)
    assert summary.iterations == 29


BATCHES = """
from torch.utils.data import DataLoader
model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = [{"input_ids": torch.arange(6) % 50, "attention_mask": (torch.arange(6) < 4 + i % 3).long()} for i in range(30)]
loader, held_out = DataLoader(rows, batch_size=3), DataLoader(rows[:9], batch_size=3)
tokens = []  # of each step

def train(batch):
    optimizer.zero_grad()
    model(batch["input_ids"]).square().mean().backward()
    optimizer.step()
    tokens.append(int(batch["attention_mask"].sum()))
"""

LOOPS = {
    "plain": """
for _ in range(3):
    for batch in loader:
        train(batch)
""",
    "with evaluation": """
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
}


@pytest.mark.parametrize("name", LOOPS)
def test_tokens_of_a_plain_loop_are_those_of_its_batches(launch, name):
    job = alone(launch, dedent(BATCHES) + LOOPS[name] + 'print("tokens", sum(tokens[1:]))')

    summary = job.ledger.summary
    assert summary.iterations == 29  # the first step starts the metrics
    assert summary.tokens == int(job.stdout.split("tokens ")[1].split()[0])
    assert summary.samples == 29 * 3
    assert job.ledger.facts["token_source"] == summary.token_source == "attention mask"
    assert f"{summary.tokens:,}, from the batches (attention mask)" in (job.ledger.folder / "summary.txt").read_text()


#: Loops that take several batches, or other batches, before a backward pass; each appends (samples, tokens) of a step.
ORDERS = {
    "evaluation at the top": """
small = DataLoader(rows[:4], batch_size=2)
for at, batch in enumerate(loader):
    if at % 2:
        with torch.no_grad():
            for other in small:
                model(other["input_ids"])
    step([batch])
""",
    "evaluation in eval mode at the top": """
small = DataLoader(rows[:4], batch_size=2)
for at, batch in enumerate(loader):
    if at % 2:
        model.eval()
        for other in small:
            model(other["input_ids"])
        model.train()
    step([batch])
""",
    "all micro-batches first": """
batches = iter(loader)
while len(micro := list(islice(batches, 2))) == 2:
    step(micro)
""",
    "two loaders": """
for pair in zip(loader, DataLoader(rows, batch_size=2)):
    step(pair, is_one=True)
""",
    "two batches ahead": """
batches, ahead = iter(loader), deque()
for _ in range(len(loader)):
    while len(ahead) < 3 and (batch := next(batches, None)) is not None:
        ahead.append(batch)
    step([ahead.popleft()])
""",
    "skipped batches": """
for at, batch in enumerate(loader):
    if at % 3:
        step([batch])
""",
}


@pytest.mark.parametrize(
    "name",
    [
        "evaluation at the top",
        "all micro-batches first",
        *(pytest.param(one, marks=pytest.mark.long) for one in list(ORDERS)[1:] if one != "all micro-batches first"),
    ],
)
def test_tokens_are_those_of_the_batches_with_a_backward_pass(launch, name):
    code = """
from collections import deque
from itertools import islice
rows = [{"input_ids": torch.arange(6) % 50, "attention_mask": torch.ones(6).long()} for i in range(60)]
loader, counts = DataLoader(rows, batch_size=3), []

def step(batches, is_one=False):
    optimizer.zero_grad()
    losses = [model(batch["input_ids"]).square().mean() for batch in batches]
    for loss in [sum(losses)] if is_one else losses:
        loss.backward()
    optimizer.step()
    counts.append(sum(len(batch["input_ids"]) for batch in batches))
"""
    job = alone(launch, dedent(BATCHES) + code + ORDERS[name] + 'print("counts", len(counts), sum(counts[1:]))')

    steps, samples = map(int, job.stdout.split("counts ")[1].split()[:2])
    left_out = 3 if name == "two batches ahead" else 0  # fetched before the first step, which starts the metrics
    summary = job.ledger.summary
    assert (summary.iterations, summary.samples) == (steps - 1, samples - left_out)
    assert summary.tokens == 6 * summary.samples


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
    script = tmp_path / "train.py"
    script.write_text(dedent(ALONE) + LANGUAGE.format(wrap=line))
    job = launch.torchrun([*ONE_NODE, str(ranks)], script, environ=ON).done(200)

    summary, facts = job.ledger.summary, job.ledger.facts
    assert (summary.tokens, summary.samples) == (ranks * 19 * 3 * 6, ranks * 19 * 3)
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
    script = tmp_path / "train.py"
    script.write_text(dedent(ALONE) + LANGUAGE.format(wrap=line))
    job = launch.torchrun([*ONE_NODE, "2"], script, environ=ON).done(200)

    assert (job.ledger.summary.iterations, job.ledger.summary.measured_tokens) == (19, None)
    assert "parallel_layout" not in job.ledger.facts


def test_loop_with_images_has_samples_and_no_tokens(launch):
    job = alone(
        launch,
        """
        from torch.utils.data import DataLoader, TensorDataset
        loader = DataLoader(TensorDataset(torch.ones(60, 8), torch.zeros(60, dtype=torch.long)), batch_size=5)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    )

    assert (job.ledger.summary.samples, job.ledger.summary.tokens) == (11 * 5, None)


def test_counts_of_the_script_have_priority_over_batches(launch):
    code = (
        dedent(BATCHES)
        + "import effllm\nfor batch in loader:\n    effllm.count(tokens=7, samples=1)\n    train(batch)\n"
    )
    job = alone(launch, code)

    assert (job.ledger.summary.tokens, job.ledger.summary.samples) == (9 * 7, 9)
    assert (job.ledger.summary.token_source, "token_source" in job.ledger.facts) == ("", False)


def test_loss_is_not_read_while_a_graph_is_captured(launch):
    """A copy in a capture would become a part of the graph, and an allocation would end the capture with an error."""
    job = alone(
        launch,
        """
        class Captured(torch.Tensor):
            is_cuda = True

        torch.cuda.is_current_stream_capturing = lambda: True
        for _ in range(40):
            loss = model(torch.ones(2, 8)).square().mean()
            optimizer.zero_grad()
            loss.as_subclass(Captured).backward()
            optimizer.step()
        """,
    )

    assert (job.ledger.summary.loss, job.ledger.summary.iterations) == (None, 39)
    assert job.our_errors == []


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
