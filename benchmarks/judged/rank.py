"""One rank of a short real job: a loop that spends the planned times, and waits for the other ranks.

    python rank.py PLAN                   (loops that call effllm)
    python -m effllm run rank.py PLAN     (loops that effllm attaches to)

``PLAN`` is a JSON file of `real.plan_of`.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

RANK = int(os.environ["JUDGED_RANK"])
PARAMETERS = 7_000_000_000


class Planned:
    """The times that this rank spends in each iteration, asleep or in a busy loop."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan, self._of_rank, self._is_busy = plan, plan["of_rank"][RANK], plan["is_busy"]
        self.first, self.count = plan["first"], len(self._of_rank["wait"])
        self._stamps = [0.0]  # the start of the first iteration, and the end of each

    def spend(self, part: str, index: int) -> None:
        until_s = time.monotonic() + self._of_rank[part][index]
        while (rest_s := until_s - time.monotonic()) > 0:
            if not self._is_busy:
                time.sleep(rest_s)

    def phases(self, index: int, phase: Any) -> None:
        for name in self.plan["phases"]:
            if self._of_rank[name][index] > 0:
                with phase(name):
                    self.spend(name, index)

    def begin(self) -> None:
        self._stamps[0] = time.monotonic()

    def end(self, index: int) -> None:
        """Note the end of an iteration, and fail or be killed in the planned one."""
        self._stamps.append(time.monotonic())
        if index == self.count - 1:
            if RANK == 0:
                Path(self.plan["stamps"]).write_text(json.dumps(self._stamps))
            if self.plan["status"] == "failed" and RANK == 0:
                raise RuntimeError("this failure is planned")
            if self.plan["status"] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)


class Meeting:
    """A barrier of all ranks in a mapped file."""

    def __init__(self, path: str, ranks: int) -> None:
        with Path(path).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8 * ranks)
        self._format = f"<{ranks}q"

    def wait(self, number: int) -> None:
        struct.pack_into("<q", self._map, 8 * RANK, number)
        while min(struct.unpack_from(self._format, self._map)) < number:
            time.sleep(0.0003)


def api_loop(planned: Planned) -> None:
    """Call the older names of effllm."""
    import effllm.efficientllm_metrics as effllm

    plan, meeting = planned.plan, Meeting(planned.plan["meeting"], planned.plan["ranks"])
    effllm.initialize_efficientllm_metrics(
        PARAMETERS, first_iteration=planned.first, is_numbered=True, flops_per_token=6.0 * PARAMETERS
    )
    collector = effllm.get_metrics_collector()
    time.sleep(plan["startup_s"])
    meeting.wait(1)
    planned.begin()
    for index in range(planned.count):
        planned.spend("wait", index)
        collector.record_iteration_start()
        planned.spend("forward", index)
        if plan["own"] == "forward":
            collector.sync_point()
        planned.spend("backward", index)
        if plan["own"] == "all":
            collector.sync_point()
        meeting.wait(index + 2)
        planned.spend("communication", index)
        planned.spend("optimizer", index)
        planned.end(index)
        collector.record_iteration_end(plan["processed"], 1, tokens=plan["tokens"])
        collector.log_metrics(planned.first + index + 1, 2.0)
        planned.phases(index, collector.phase)
    effllm.finalize_efficientllm_metrics()


def monitor_loop(planned: Planned) -> None:
    """Use `effllm.monitor`: all time between two calls is an iteration."""
    import effllm

    plan, meeting = planned.plan, Meeting(planned.plan["meeting"], planned.plan["ranks"])
    time.sleep(plan["startup_s"])
    meeting.wait(1)
    with effllm.monitor(parameters=PARAMETERS, flops_per_token=6.0 * PARAMETERS) as monitor:
        for index in range(planned.count):
            for part in ("wait", "forward", "backward"):
                planned.spend(part, index)
            meeting.wait(index + 2)
            planned.spend("communication", index)
            planned.spend("optimizer", index)
            planned.end(index)
            monitor.iteration(tokens=plan["tokens"], samples=1, loss=2.0)
            planned.phases(index, monitor.phase)


def ddp_loop(planned: Planned) -> None:
    """Train with torch's DDP and DataLoader; effllm attaches to the optimizer."""
    import torch
    from torch import distributed, nn
    from torch.utils.data import DataLoader, Dataset

    import effllm

    plan, now = planned.plan, {"index": 0}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")

    class Delay(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(_context: Any, values: Any) -> Any:
            planned.spend("forward", now["index"])
            return values.clone()

        @staticmethod
        def backward(_context: Any, *gradients: Any) -> Any:
            planned.spend("backward", now["index"])
            return gradients[0]

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, values: Any) -> Any:
            return Delay.apply(self.layer(values))

    class Slow(torch.optim.SGD):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            planned.spend("optimizer", now["index"])
            return super().step(closure)

    class Rows(Dataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return planned.count

        def __getitem__(self, index: int) -> Any:
            planned.spend("wait", index)
            return torch.ones(16)

    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = Slow(model.parameters(), lr=0.01)
    for index, rows in enumerate(DataLoader(Rows(), batch_size=1)):
        now["index"] = index
        effllm.count(tokens=plan["tokens"], samples=1, tokens_processed=plan["processed"])
        loss = model(rows).sum()
        if plan["own"] == "forward":
            effllm.sync_point()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        planned.end(index)
        planned.phases(index, effllm.phase)
    distributed.destroy_process_group()


def megatron_loop(planned: Planned) -> None:
    """Train with megatron-core's schedule and optimizer on the CPU, with the model of the integration."""
    import torch
    from corpus import Corpus  # type: ignore[import-not-found]
    from cpu import train_on_cpu  # type: ignore[import-not-found]
    from gpt import build  # type: ignore[import-not-found]
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from settings import Data, Model, Parallelism, Settings, Training  # type: ignore[import-not-found]
    from torch import distributed

    torch.set_num_threads(1)
    train_on_cpu()
    distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(1, 1)
    data = Data(sequence_length=8, micro_batch_size=1, global_batch_size=planned.plan["ranks"])
    model = Model(num_layers=1, hidden_size=16, num_attention_heads=2, tie_embeddings=True)
    trainee = build(Settings(model, data, Training(warmup_iterations=0), Parallelism()), torch.device("cpu"))
    corpus, now = Corpus(data.sequence_length, data.global_batch_size, seed=1), {"index": 0}

    def step(rows: Any, model: Any) -> Any:
        planned.spend("forward", now["index"])
        planned.spend("backward", now["index"])
        row = next(rows)
        tokens, labels = row[:, :-1].contiguous(), row[:, 1:].contiguous()
        length = tokens.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        found = model(tokens, torch.arange(length).expand_as(tokens), mask, labels=labels)
        return found, lambda losses: (losses.float().mean(), {"loss": losses.detach().float().mean()})

    for index in range(planned.count):
        now["index"] = index
        batch = corpus.training_batch(index + 1, RANK, planned.plan["ranks"])
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(batch.split(1)), model=trainee.chunks, num_microbatches=1,
            seq_length=data.sequence_length, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        planned.spend("optimizer", index)
        trainee.optimizer.step()
        planned.end(index)
    distributed.destroy_process_group()


LOOPS = {"api": api_loop, "monitor": monitor_loop, "ddp": ddp_loop, "megatron": megatron_loop}

if __name__ == "__main__":
    the_plan = json.loads(Path(sys.argv[1]).read_text())
    LOOPS[the_plan["loop"]](Planned(the_plan))
