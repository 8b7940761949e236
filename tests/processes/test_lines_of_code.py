"""Lines of code in which the host of a real trainer is, by recordings of its stacks."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from types import SimpleNamespace

import jobs
import pytest
from cli_process import CommandLine
from jobs import needs_py_spy

from effllm.agent.stack_recording import APART_S, MAX_AT_ONCE, StackRecording

pytestmark = [*jobs.needs_torch]

REFUSED = "Linux does not permit py-spy to read the process; a container needs --cap-add=SYS_PTRACE"

ON = {"EFFICIENTLLM_ATTACH": "1", "EFFICIENTLLM_SINKS": "none", "EFFICIENTLLM_STACKS": "auto"}

#: A plain loop that works for a given time at one place of its code.
LOOP = """
import time, torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

def work(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass

class Rows(Dataset):
    def __len__(self):
        return {count}

    def __getitem__(self, at):
        work({of_item})
        return torch.ones(8)

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for rows in DataLoader(Rows(), batch_size=4):
    model(rows).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    work(0.004)
"""


def loop(launch, of_item=0.002, count=4000, **settings):
    return launch.code(LOOP.format(of_item=of_item, count=count), environ=ON | settings).done(120)


@needs_py_spy
def test_line_of_a_slow_data_set_is_named(launch, tmp_path):
    job = loop(launch)

    summary = job.ledger.summary
    assert summary.verdict.cause == "data_loading"
    assert re.match(r"in \d+ % of \d+ samples the host was in work \(\S+:[\d-]+\); data wait ", summary.verdict.why)
    assert summary.host.by_kind["data"] > 0.5 * summary.host.samples > 100
    assert job.our_errors == []
    assert not job.left()
    folded = tmp_path / "job.folded"
    inspected = CommandLine(tmp_path).run("inspect", str(job.ledger.folder), "--stacks", str(folded))
    counts = dict(line.rsplit(" ", 1) for line in folded.read_text().splitlines())
    assert inspected.stdout == f"{folded}: {summary.host.samples:,} samples of 1 rank\n"
    assert sum(map(int, counts.values())) == summary.host.samples
    assert any(re.match(r"rank 0;data;.*__getitem__ \(\S+:\d+\);work \(\S+:\d+\)$", stack) for stack in counts)


def test_nothing_is_recorded_if_it_is_switched_off(launch):
    job = loop(launch, count=400, EFFICIENTLLM_STACKS="off")

    assert job.ledger.summary.host is None
    assert not any(line.startswith("lines of code") for line in job.ledger.summary.not_measured)


def test_reason_is_stated_once_if_the_kernel_refuses(launch, tmp_path):
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho 'Error: Permission Denied: try again as root' >&2\nexit 1\n")
    refusing.chmod(0o755)
    job = loop(launch, of_item=0.0, PATH=f"{tmp_path}:{os.environ['PATH']}")

    reasons = [line for line in job.ledger.summary.not_measured if line.startswith("lines of code")]
    assert reasons == [f"lines of code: {REFUSED}"]
    assert job.our_errors == []


#: Begins the process again without the capability, as a container has it by default.
WITHOUT_PTRACE = """
import os, sys
if "WITHOUT_PTRACE" not in os.environ:
    os.environ["WITHOUT_PTRACE"] = "1"
    drop = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", "--"]
    os.execvp(drop[0], [*drop, sys.executable, *sys.orig_argv[1:]])
kept = next(line for line in open("/proc/self/status") if line.startswith("CapEff"))
assert not int(kept.split()[1], 16) >> 19 & 1, kept  # CAP_SYS_PTRACE
"""


@pytest.mark.long
@needs_py_spy
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
def test_line_is_named_without_the_capability_of_tracing(launch):
    job = launch.code(WITHOUT_PTRACE + LOOP.format(of_item=0.002, count=4000), environ=ON).done(120)

    summary = job.ledger.summary
    assert re.match(r"in \d+ % of \d+ samples the host was in work \(\S+:[\d-]+\); data wait ", summary.verdict.why)
    assert job.our_errors == []


#: A loop of which every fortieth iteration has a pause, at a place where all iterations are.
PAUSES = """
import time, torch

def refresh(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass

torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(1200):
    model(torch.ones(4, 8)).mean().backward()
    refresh(0.004)
    if number % 40 == 39:
        refresh(0.15)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.alone
@needs_py_spy
def test_line_of_long_iterations_is_named(launch):
    verdict = launch.code(PAUSES, environ=ON).done(120).ledger.summary.verdict

    assert verdict.cause == "slow_iterations"
    named = re.match(r"in (\d+) % of (\d+) samples of long iterations the host was in refresh \(", verdict.why)
    assert named is not None and int(named[1]) > 80, verdict.why


WORKERS = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

def tokenize():
    until = time.perf_counter() + 0.012
    while time.perf_counter() < until:
        pass

class Rows(Dataset):
    def __len__(self):
        return 1400

    def __getitem__(self, at):
        tokenize()
        return torch.ones(8)

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for rows in DataLoader(Rows(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1]):
        model(rows).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.long
@needs_py_spy
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_line_of_dataloader_workers_is_named(launch, tmp_path, start):
    (tmp_path / "train.py").write_text(WORKERS)
    job = launch.python(tmp_path / "train.py", start, environ=ON).done(120)

    verdict = job.ledger.summary.verdict
    assert verdict.cause == "data_loading"
    assert re.match(r"in \d+ % of \d+ samples a DataLoader worker was in tokenize \(train.py:", verdict.why), (
        verdict.why
    )
    assert job.our_errors == []
    assert not job.left()


#: Two ranks of DistributedDataParallel, the second of which makes statistics in each step.
RANKS = """
import time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def statistics():
    until = time.perf_counter() + 0.03
    while time.perf_counter() < until:
        pass

dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DDP(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(200):
    time.sleep(0.01)
    if dist.get_rank() == 1:
        statistics()
    model(torch.ones(4, 64)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.long
@needs_py_spy
def test_line_of_a_slow_rank_is_named_beside_its_peer(launch, tmp_path):
    (tmp_path / "train.py").write_text(RANKS)
    start = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
    job = launch.torchrun(start, tmp_path / "train.py", environ=ON).done(120)

    verdict = job.ledger.summary.verdict
    assert verdict.cause == "straggler"
    named = re.search(
        r"rank 1 is in statistics \(train.py:[\d-]+\) in (\d+) % of the samples, rank 0 in 0 %", verdict.why
    )
    assert named is not None and int(named[1]) > 40, verdict.why


def test_requests_are_served_at_once_until_the_limit_of_the_cost():
    trainer = SimpleNamespace(config=SimpleNamespace(stacks="auto"), place=SimpleNamespace(local_rank=0), pid=1)
    recording, began_s = StackRecording(trainer), time.monotonic()
    begun = []
    recording._begin_recording = lambda now_s, pid: begun.append(now_s)
    for second in range(4, 3600):
        recording.request_soon(began_s + second)
        recording.begin_or_end(began_s + second, 100)

    assert len([one for one in begun if one < began_s + 10]) == MAX_AT_ONCE
    assert MAX_AT_ONCE < len(begun) < MAX_AT_ONCE + 3600 / APART_S + 1


def test_recording_without_a_free_descriptor_has_a_reason(monkeypatch):
    trainer = SimpleNamespace(
        config=SimpleNamespace(stacks="auto"), place=SimpleNamespace(local_rank=0), agent="agent", rank=3, pid=1
    )
    recording = StackRecording(trainer)
    monkeypatch.setattr("effllm.agent.stack_recording.py_spy_path", lambda: "/bin/true")

    def refuse(_name):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("os.memfd_create", refuse)
    found = recording.begin_or_end(time.monotonic() + 100.0, 100)

    assert (found.rank, found.samples) == (3, 0)
    assert found.failed.startswith("py-spy cannot be started: ") and recording.is_idle
