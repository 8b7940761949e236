"""A rank of a job that continues from a checkpoint and trains in lockstep with the other ranks, without torch."""

import argparse
import itertools
import mmap
import os
import signal
import struct
import time
from pathlib import Path

import effllm.efficientllm_metrics as effllm

parser = argparse.ArgumentParser()
parser.add_argument("meeting", help="a file for this start, with a counter for each rank")
parser.add_argument("checkpoint", type=Path, help="a file that rank 0 writes every 20 iterations")
parser.add_argument("--last", type=int, default=0, help="the iteration after which all ranks end")
parser.add_argument("--kill-rank", type=int, default=-1, help="the rank that is killed after iteration --at")
parser.add_argument(
    "--stop-rank", type=int, default=-1, help="the rank that stops after iteration --at, until it is killed"
)
parser.add_argument("--at", type=int, default=0)
given = parser.parse_args()
rank, world_size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
with Path(given.meeting).open("r+b") as file:
    counters = mmap.mmap(file.fileno(), 8 * world_size)
done = int(given.checkpoint.read_text()) if given.checkpoint.exists() else 0

effllm.initialize_efficientllm_metrics(1000, first_iteration=done)
collector = effllm.get_metrics_collector()
for iteration in itertools.count(done + 1):
    if given.last and iteration > given.last:
        break
    while rank == given.stop_rank and iteration > given.at:
        time.sleep(0.05)
    collector.record_iteration_start()
    time.sleep(0.05)
    struct.pack_into("<q", counters, 8 * rank, iteration)
    while min(struct.unpack_from(f"<{world_size}q", counters)) < iteration:
        time.sleep(0.002)
    collector.record_iteration_end(100, 2)
    if rank == 0 and iteration % 20 == 0:
        given.checkpoint.with_suffix(".new").write_text(str(iteration))
        given.checkpoint.with_suffix(".new").replace(given.checkpoint)
    if rank == given.kill_rank and iteration == given.at:
        os.kill(os.getpid(), signal.SIGKILL)
effllm.finalize_efficientllm_metrics()
