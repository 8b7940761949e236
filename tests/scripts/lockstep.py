"""Ranks that train in lockstep like data-parallel ranks, without torch: in every step each rank waits for the slowest.

The ranks share a mapped file with a counter for each rank and the last iteration, which rank 0 sets.
"""

import argparse
import ctypes
import json
import mmap
import os
import struct
import time
from contextlib import nullcontext
from itertools import count
from pathlib import Path

import effllm

parser = argparse.ArgumentParser()
parser.add_argument("meeting", help="an existing file with space for the counters")
parser.add_argument("--iterations", type=int, default=200)
parser.add_argument("--until", type=Path, help="a file: after the iterations, continue until it exists")
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--stand", type=int, default=0, help="the iteration in which rank 1 hangs for --seconds ...")
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--pipe", default="", help="... or until a process writes to this named pipe")
parser.add_argument("--phase", default="", help="... in this marked phase after the iteration")
parser.add_argument("--native", action="store_true", help="... in a call of a C function")
parser.add_argument("--slow", type=int, default=-1, help="the slow rank ...")
parser.add_argument("--by", type=float, default=1.1, help="... factor of the duration of its steps")
parser.add_argument("--waits", type=int, default=-1, help="the rank with an extra data wait of a fifth of a step")
parser.add_argument("--sync", action="store_true", help="mark a sync point in each step")
given = parser.parse_args()
rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
world_size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
with Path(given.meeting).open("r+b") as file:
    counters = mmap.mmap(file.fileno(), 8 * (world_size + 1))


def all_reduce(iteration):
    if rank == 0 and iteration >= given.iterations and (not given.until or given.until.exists()):
        # All ranks read this value, because the counter of rank 0 is written later.
        struct.pack_into("<q", counters, 8 * world_size, iteration)
    struct.pack_into("<q", counters, 8 * rank, iteration)
    while min(struct.unpack_from(f"<{world_size}q", counters)) < iteration:
        time.sleep(0.001)


def stand():
    if given.pipe and given.native:
        ctypes.CDLL(None).open(given.pipe.encode(), os.O_RDONLY)
    elif given.native:
        ctypes.CDLL(None).usleep(ctypes.c_uint(int(given.seconds * 1e6)))
    else:
        time.sleep(given.seconds)


effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
steps, inner_s, own_s = [], [], []
for iteration in count(1):
    is_here = rank == 1 and iteration == given.stand
    if rank == given.waits:
        time.sleep(0.2 * given.step_s)
    start = time.monotonic()
    collector.record_iteration_start()
    began_s = time.monotonic()
    time.sleep(given.step_s * (given.by if rank == given.slow else 1.0))
    if is_here and not given.phase:
        stand()
    if given.sync:
        effllm.sync_point()
    own_s.append(time.monotonic() - start)
    all_reduce(iteration)
    inner_s.append(time.monotonic() - began_s)
    collector.record_iteration_end(100, 2)
    steps.append((start, time.monotonic()))
    with collector.phase(given.phase) if is_here and given.phase else nullcontext():
        if is_here and given.phase:
            stand()
    if iteration == struct.unpack_from("<q", counters, 8 * world_size)[0]:
        break
effllm.finalize_efficientllm_metrics()
Path("truth.json").write_text(json.dumps({"steps": steps, "inner_s": inner_s, "own_s": own_s}))
