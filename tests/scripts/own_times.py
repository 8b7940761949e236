"""Ranks that train in lockstep, of which one computes for longer; computing is sleeping, so that no core is short.

They meet in a file that all of them map: a counter for each rank.
"""

import argparse
import mmap
import os
import struct
import time
from pathlib import Path

import effllm

parser = argparse.ArgumentParser()
parser.add_argument("meeting", help="the file, which is there and long enough")
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--slow", type=int, default=-1, help="the rank that is slow ...")
parser.add_argument("--by", type=float, default=1.1, help="... its steps take so many times as long ...")
parser.add_argument("--until", type=int, default=10**9, help="... up to this iteration")
parser.add_argument("--waits", type=int, default=-1, help="the rank whose data take another tenth of a step")
parser.add_argument("--silent", action="store_true", help="tell no sync point")
given = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with Path(given.meeting).open("r+b") as file:
    counters = mmap.mmap(file.fileno(), 8 * world_size)


def all_reduce(iteration):
    struct.pack_into("<q", counters, 8 * rank, iteration)
    while min(struct.unpack_from(f"<{world_size}q", counters)) < iteration:
        time.sleep(0.0005)


effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, given.iterations + 1):
    if rank == given.waits:
        time.sleep(0.2 * given.step_s)
    collector.record_iteration_start()
    is_slow = rank == given.slow and iteration <= given.until
    time.sleep(given.step_s * (given.by if is_slow else 1.0))
    if not given.silent:
        effllm.sync_point()
    all_reduce(iteration)
    collector.record_iteration_end(100, 2)
effllm.finalize_efficientllm_metrics()
