"""A loop of fixed work that trains a block of iterations for each line on stdin; trackers.py starts two of them.

Each block is one line on stdout: the clocks of the training thread.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

WORK = b"x" * 2**20
HASHES = 10  # of WORK in a step: some milliseconds
UNTIMED = 5  # iterations of a block that are not timed: effllm's processes continue after a stop


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


def main(tracker: str, iterations: int) -> None:
    import effllm

    log = _open_tracker(tracker)
    collector = effllm.initialize_efficientllm_metrics(1000)
    done = 0
    for _line in sys.stdin:
        began = Reading.now()
        for turn in range(UNTIMED + iterations):
            if turn == UNTIMED:
                began = Reading.now()
            done += 1
            collector.record_iteration_start()
            for _ in range(HASHES):
                hashlib.sha256(WORK)
            collector.record_iteration_end(100, 2)
            collector.log_metrics(done, 1.0)
            if log is not None:
                log({"mine": done})
        print(json.dumps(began.until(Reading.now())), flush=True)
    effllm.finalize_efficientllm_metrics()


def _open_tracker(name: str) -> Callable[[dict[str, Any]], Any] | None:
    """Return the function that logs in the training process, or None if the tracker has no run there."""
    if name != "wandb":
        return None
    import wandb

    settings = wandb.Settings(x_disable_stats=True)
    return wandb.init(project="effllm", mode="offline", settings=settings).log


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop these processes for the time of the block."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
