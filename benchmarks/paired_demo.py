"""The demo's training with metrics alternately on and off; training.py starts it with torchrun.

While metrics are off, the loop makes no calls of effllm, and agent and aggregator are stopped with SIGSTOP.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import torch.distributed as dist
import train as demo
from settings import data_parallel_size, parse_arguments

import effllm
from benchmarks.paired_loop import stopped
from effllm.hooks.megatron import parameter_share

DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"
UNTIMED = 2  # iterations that are not timed, after each change between on and off


def main(times: Path, pairs: int, iterations: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the stopped processes continue, and end
    settings = parse_arguments(["--config", str(DEMO)])
    replicas = data_parallel_size(settings, int(os.environ["WORLD_SIZE"]))
    job = demo.prepare(settings, demo.join_processes(settings), replicas)
    collector = effllm.initialize_efficientllm_metrics(parameter_share=parameter_share(job.trainee.chunks))
    ours = [child for child in psutil.Process().children(recursive=True) if "effllm" in " ".join(child.cmdline())]
    done = 0

    def train(measured: bool) -> float:
        nonlocal done
        began_s = 0.0
        for turn in range(UNTIMED + iterations):
            if turn == UNTIMED:
                dist.barrier()
                began_s = time.perf_counter()
            done += 1
            batch = job.corpus.training_batch(done, job.replica, job.replicas)
            if measured:
                collector.record_iteration_start()
            demo.train_step(job, batch)
            if measured:
                collector.record_iteration_end(len(batch) * settings.data.sequence_length, len(batch))
                collector.log_metrics(done, 1.0)
        dist.barrier()
        return (time.perf_counter() - began_s) / iterations

    train(measured=True)
    order = random.Random(7)
    seconds = []
    for _ in range(pairs):
        pair = {}
        for measured in order.sample([True, False], 2):
            if measured:
                pair[measured] = train(measured)
            else:
                with stopped(ours):
                    pair[measured] = train(measured)
        seconds.append((pair[True], pair[False]))
    effllm.finalize_efficientllm_metrics()
    if dist.get_rank() == 0:
        times.write_text(json.dumps(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    path, *numbers = sys.argv[1:]
    main(Path(path), *map(int, numbers))
