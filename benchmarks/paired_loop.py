"""A loop of fixed work with metrics alternately on and off; trackers.py starts it.

While metrics are off, the loop makes no calls of effllm, and agent and aggregator are stopped with SIGSTOP.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

WORK = b"x" * 2**20
HASHES = 10  # of WORK in a step: some milliseconds
UNTIMED = 10  # iterations that are not timed, after each change between on and off
WARM_S = 20.0  # time before the first pair, in which the tracker is imported and has its first values


class Reading(NamedTuple):
    """Clocks of the training thread."""

    wall_s: float
    cpu_s: float
    waited_s: float  # runnable, but without a CPU

    @classmethod
    def now(cls) -> Reading:
        waited_s = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9
        return cls(time.perf_counter(), time.thread_time(), waited_s)

    def until(self, end: Reading) -> dict[str, float]:
        """Return the seconds until a later reading; ``asleep_s`` is neither work nor a wait for a CPU."""
        wall_s, cpu_s, waited_s = (later - earlier for later, earlier in zip(end, self, strict=True))
        return {"wall_s": wall_s, "cpu_s": cpu_s, "asleep_s": wall_s - cpu_s - waited_s}


def main(times: Path, pairs: int, iterations: int, tracker: str) -> None:
    import effllm

    log = _open_tracker(tracker)
    collector = effllm.initialize_efficientllm_metrics(1000)
    ours = [child for child in psutil.Process().children(recursive=True) if "effllm" in " ".join(child.cmdline())]
    done = 0

    def train(*, measured: bool, iterations: int) -> dict[str, float]:
        nonlocal done
        began = Reading.now()
        for turn in range(UNTIMED + iterations):
            if turn == UNTIMED:
                began = Reading.now()
            done += 1
            if measured:
                collector.record_iteration_start()
            for _ in range(HASHES):
                hashlib.sha256(WORK)
            if measured:
                collector.record_iteration_end(100, 2)
                collector.log_metrics(done, 1.0)
            if log is not None:
                log({"mine": done})
        return began.until(Reading.now())

    until_s = time.monotonic() + WARM_S
    while time.monotonic() < until_s:
        train(measured=True, iterations=iterations)
    order = random.Random(7)
    found = []
    for _ in range(pairs):
        pair = {}
        for measured in order.sample([True, False], 2):
            if measured:
                pair["on"] = train(measured=True, iterations=iterations)
            else:
                with stopped(ours):
                    pair["off"] = train(measured=False, iterations=iterations)
        found.append(pair)
    effllm.finalize_efficientllm_metrics()
    times.write_text(json.dumps(found))


def _open_tracker(name: str) -> Callable[[dict[str, Any]], Any] | None:
    """Return the function that logs in the training process, or None if the tracker has no run there."""
    if name != "wandb":
        return None
    import wandb

    settings = wandb.Settings(x_disable_stats=True)
    return wandb.init(project="effllm", mode="offline", settings=settings).log


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Stop these processes for the time of the block."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    path, num_pairs, num_iterations, tracker_name = sys.argv[1:]
    main(Path(path), int(num_pairs), int(num_iterations), tracker_name)
