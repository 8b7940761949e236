"""One rank of ``effllm demo``: the calls of a real training loop, with sleeps as steps."""

from __future__ import annotations

import math
import mmap
import os
import signal
import time

import effllm
from effllm.config.place import read_place
from effllm.config.switches import process_environ

PARAMETERS = 124_000_000  # parameters of GPT-2 small
FLOPS_PER_TOKEN = 6 * PARAMETERS  # forward and backward pass, without attention
SAMPLES = 8  # samples per rank and iteration
TOKENS = SAMPLES * 1024
SLOWDOWN = 1.12  # step time of the last rank over the step time of other ranks
DATA_SHARE = 0.04  # data wait as a share of an iteration
EVALUATION_STEPS = 6
POLL_SHARE = 0.02  # of an iteration: time between two looks at the other ranks


def main(arguments: list[str]) -> None:
    """Simulate training; the arguments are iterations, seconds of an iteration, and a descriptor of shared memory.

    The memory has an integer of 4 bytes for each rank: how often the rank has waited for the others.
    """
    iterations, step_s, descriptor = int(arguments[0]), float(arguments[1]), int(arguments[2])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, lambda *_: signal.raise_signal(signal.SIGINT))  # the demo sends it after Ctrl-C
    collector = effllm.initialize_efficientllm_metrics(
        PARAMETERS, total_iterations=iterations, flops_per_token=FLOPS_PER_TOKEN
    )
    _train(collector, iterations, step_s, memoryview(mmap.mmap(descriptor, 0)).cast("I"))
    effllm.finalize_efficientllm_metrics()


def _train(collector: effllm.MetricsCollector, iterations: int, step_s: float, waits: memoryview[int]) -> None:
    place, launcher = read_place(process_environ()), os.getppid()
    is_slow = place.world_size > 1 and place.rank == place.world_size - 1

    def wait_for_others() -> None:
        waits[place.rank] += 1
        if not is_slow:  # sleep through most of the wait for the slow rank, which needs the cores
            time.sleep(0.9 * (SLOWDOWN - 1) * step_s)
        while min(waits[: place.world_size]) < waits[place.rank] and os.getppid() == launcher:
            time.sleep(POLL_SHARE * step_s)

    wait_for_others()  # until all have started
    for iteration in range(1, iterations + 1):
        time.sleep(DATA_SHARE * step_s)
        collector.record_iteration_start()
        time.sleep((1 - DATA_SHARE) * step_s * (SLOWDOWN if is_slow else 1.0))
        effllm.sync_point()  # the point at which a real rank first waits for other ranks
        wait_for_others()
        collector.record_iteration_end(tokens_processed=TOKENS, samples_processed=SAMPLES)
        collector.log_metrics(iteration, loss=loss(iteration))
        if iteration == iterations // 2:
            with effllm.phase("evaluation"):
                time.sleep(EVALUATION_STEPS * step_s)
        if os.getppid() != launcher:  # the demo has ended without a signal to this rank
            signal.raise_signal(signal.SIGTERM)


def loss(iteration: int) -> float:
    return 2.8 + 8.0 * math.exp(-iteration / 25) + 0.05 * math.sin(iteration * 1.7)  # falls, with small waves
