"""One rank of a short planted job: a real training loop that sleeps as planned, and waits for the other ranks.

    python rank.py PLAN

``PLAN`` is a JSON file of `real.plan_of`.  The ranks share a mapped file with one counter for each rank.  The profile
of an iteration is the loop's own stamps, in place of torch.profiler: the loop has no kernels.
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

import effllm.efficientllm_metrics as effllm
from effllm.records.timeline import Split
from effllm.trainer.torch_profile import Profiled
from effllm.trainer.watched_recorder import DeviceMemory


class LoopProfile:
    """Returns the split of an iteration from the stamps of the loop."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._number = 0
        self.kernel_ns = self.exposed_ns = 0

    def start_if_due(self, number: int) -> None:
        self._number = number

    def end(self, _ended_ns: int) -> Profiled | None:
        if self._number % self._every:
            return None
        kernel_ns, exposed_ns = self.kernel_ns, self.exposed_ns
        kinds = {"all_reduce": (exposed_ns, exposed_ns)}
        return Profiled(Split(kernel_ns + exposed_ns, exposed_ns, exposed_ns, kernel_ns, 0, kinds), False, 1000)

    def close(self, failed: bool = False) -> None: ...


class LoopMemory(DeviceMemory):
    """An allocator whose retries are planned, in place of torch's."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, nothing)
        self.retries = 0

    def read_allocator(self) -> tuple[float, ...]:
        used = 60.0 * 2**30
        return used, used, used, used, 0.0, float(self.retries), 0.0, 0.0


class Meeting:
    """A barrier of all ranks, in a mapped file."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        with Path(path).open("r+b") as file:
            self._counters = mmap.mmap(file.fileno(), 8 * ranks)
        self._rank, self._format = rank, f"<{ranks}q"

    def wait(self, number: int) -> None:
        struct.pack_into("<q", self._counters, 8 * self._rank, number)
        while min(struct.unpack_from(self._format, self._counters)) < number:
            time.sleep(0.0005)


def sleep_until(at_s: float) -> None:
    """Sleep until a monotonic time: the delay of a sleep does not add up."""
    while (rest_s := at_s - time.monotonic()) > 0:
        time.sleep(rest_s)


def main(path: str) -> None:
    plan = json.loads(Path(path).read_text())
    rank = int(os.environ["SLURM_PROCID"])
    meeting = Meeting(plan["meeting"], rank, plan["ranks"])
    effllm.initialize_efficientllm_metrics(
        7_000_000_000,
        first_iteration=plan["first"] - 1,
        is_numbered=True,
        flops_per_token=plan["flops_per_token"],
        facts={"framework": "torch"},  # as if a hook had seen the DataLoader
    )
    collector = effllm.get_metrics_collector()
    profile = LoopProfile(plan["profile_every"] or 1)
    recorder: Any = collector.recorder
    memory = LoopMemory()
    if plan["profile_every"]:
        recorder._profile, recorder._memory = profile, memory
    time.sleep(plan["startup_s"])
    meeting.wait(plan["first"])
    own = plan["of_rank"][rank]
    for index, (wait_s, own_s, kernel_s) in enumerate(zip(own["wait_s"], own["own_s"], own["kernel_s"], strict=True)):
        iteration = plan["first"] + index
        start_s = time.monotonic() + wait_s
        sleep_until(start_s)
        collector.record_iteration_start()
        sleep_until(start_s + kernel_s)
        profile.kernel_ns = int((time.monotonic() - start_s) * 1e9)
        sleep_until(start_s + own_s)
        memory.retries += plan["has_retry"][index]
        came_s = time.monotonic()
        collector.sync_point()
        meeting.wait(iteration + 1)
        time.sleep(plan["communication_s"][index])
        profile.exposed_ns = int((time.monotonic() - came_s) * 1e9)
        collector.record_iteration_end(plan["processed"], 1, tokens=plan["tokens"])
        for name, seconds in plan["phases_s"].items():
            if seconds[index] > 0:
                with collector.phase(name):
                    time.sleep(seconds[index])
    if plan["status"] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    effllm.finalize_efficientllm_metrics()


if __name__ == "__main__":
    main(sys.argv[1])
