"""Ranks that train in lockstep; one rank is slow. Steps are sleeps, so that a few CPU cores are enough.

The ranks share a mapped file with a counter for each rank and the last iteration, which rank 0 sets.
"""

import argparse
import json
import mmap
import os
import struct
import time
from itertools import count
from pathlib import Path

import effllm

parser = argparse.ArgumentParser()
parser.add_argument("meeting", help="an existing file with space for the counters")
parser.add_argument("--iterations", type=int, default=150)
parser.add_argument("--until", type=Path, help="a file: after the iterations, continue until it exists")
parser.add_argument("--step-s", type=float, default=0.05)
parser.add_argument("--slow", type=int, default=-1, help="the slow rank ...")
parser.add_argument("--by", type=float, default=1.1, help="... factor of the duration of its steps")
parser.add_argument("--waits", type=int, default=-1, help="the rank with an extra data wait of a fifth of a step")
parser.add_argument("--silent", action="store_true", help="mark no sync point")
given = parser.parse_args()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
with Path(given.meeting).open("r+b") as file:
    counters = mmap.mmap(file.fileno(), 8 * (world_size + 1))


def all_reduce(iteration):
    if rank == 0 and iteration >= given.iterations and (not given.until or given.until.exists()):
        # All ranks read this value, because the counter of rank 0 is written later.
        struct.pack_into("<q", counters, 8 * world_size, iteration)
    struct.pack_into("<q", counters, 8 * rank, iteration)
    while min(struct.unpack_from(f"<{world_size}q", counters)) < iteration:
        time.sleep(0.0005)


effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
own_s = []
for iteration in count(1):
    if rank == given.waits:
        time.sleep(0.2 * given.step_s)
    start = time.monotonic()
    collector.record_iteration_start()
    time.sleep(given.step_s * (given.by if rank == given.slow else 1.0))
    if not given.silent:
        effllm.sync_point()
    own_s.append(time.monotonic() - start)
    all_reduce(iteration)
    collector.record_iteration_end(100, 2)
    if iteration == struct.unpack_from("<q", counters, 8 * world_size)[0]:
        break
effllm.finalize_efficientllm_metrics()
Path("truth.json").write_text(json.dumps({"own_s": own_s}))
