"""A loop under torchrun whose ranks share only torchrun's store: torch is imported, but no model is trained."""

import argparse
import os
import time
from datetime import timedelta
from os import environ

import torch.distributed as dist

import effllm.efficientllm_metrics as effllm

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=40)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--at", type=int, default=0, help="the iteration after which the first attempt ends")
given = parser.parse_args()
attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

store = dist.TCPStore(
    environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60)
)
if attempt and environ["RANK"] == "0":
    time.sleep(2.0)  # the other ranks find what the first attempt left in the store
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
key = f"ready/{attempt}"
store.add(key, 1)
while store.add(key, 0) < int(environ["WORLD_SIZE"]):
    time.sleep(0.02)
for iteration in range(1, given.iterations + 1):
    collector.record_iteration_start()
    time.sleep(given.step_s)
    collector.record_iteration_end(100, 2)
    collector.log_metrics(iteration, 1.0)
    if not attempt and iteration == given.at:
        os._exit(3)
effllm.finalize_efficientllm_metrics()
