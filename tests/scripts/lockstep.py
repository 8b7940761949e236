"""Ranks that train in lockstep, as data-parallel ones do: each waits in every step for the slowest; no torch.

They meet in a file that all of them map: a counter for each rank.
"""

import argparse
import ctypes
import json
import mmap
import os
import struct
import time
from contextlib import nullcontext
from pathlib import Path

import effllm.efficientllm_metrics as effllm

parser = argparse.ArgumentParser()
parser.add_argument("meeting", help="the file, which is there and long enough")
parser.add_argument("--iterations", type=int, default=200)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--stand", type=int, default=0, help="the iteration in which rank 1 stands for --seconds ...")
parser.add_argument("--seconds", type=float, default=0.0)
parser.add_argument("--phase", default="", help="... in a marked phase after it")
parser.add_argument("--native", action="store_true", help="... in a call of C")
parser.add_argument("--lone", action="store_true", help="do not wait for each other")
given = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with Path(given.meeting).open("r+b") as file:
    counters = mmap.mmap(file.fileno(), 8 * world_size)


def all_reduce(iteration):
    struct.pack_into("<q", counters, 8 * rank, iteration)
    while not given.lone and min(struct.unpack_from(f"<{world_size}q", counters)) < iteration:
        time.sleep(0.001)


def stand():
    if given.native:
        ctypes.CDLL(None).usleep(ctypes.c_uint(int(given.seconds * 1e6)))
    else:
        time.sleep(given.seconds)


effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
steps = []
for iteration in range(1, given.iterations + 1):
    is_here = rank == 1 and iteration == given.stand
    start = time.monotonic()
    collector.record_iteration_start()
    time.sleep(given.step_s)
    if is_here and not given.phase:
        stand()
    all_reduce(iteration)
    collector.record_iteration_end(100, 2)
    steps.append((start, time.monotonic()))
    with collector.phase(given.phase) if is_here and given.phase else nullcontext():
        if is_here and given.phase:
            stand()
effllm.finalize_efficientllm_metrics()
Path("truth.json").write_text(json.dumps({"steps": steps}))
