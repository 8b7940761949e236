"""Data-parallel training that continues from a checkpoint; --kill-rank kills one rank in the first attempt."""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import effllm.efficientllm_metrics as effllm

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=60)
parser.add_argument("--checkpoint-every", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--kill-rank", type=int, default=-1)
parser.add_argument(
    "--at", type=int, default=0, help="the iteration after which the rank is killed, in the first attempt"
)
parser.add_argument("--until", default="", help="a file: after the iterations, continue until it exists")
parser.add_argument("--folder", type=Path, default=Path(), help="folder of the checkpoint")
given = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
checkpoint, starts = given.folder / "checkpoint.json", given.folder / f"starts-{rank}.jsonl"
done = json.loads(checkpoint.read_text()) if checkpoint.exists() else 0

effllm.initialize_efficientllm_metrics(1000, first_iteration=done)
collector = effllm.get_metrics_collector()
dist.barrier()  # rank 0 has published its address; all ranks find this address before a rank is killed
gradient = torch.ones(1)
iteration = done
while True:
    stop = torch.tensor([float(iteration >= given.iterations and (not given.until or Path(given.until).exists()))])
    dist.broadcast(stop, 0)
    if stop.item():
        break
    iteration += 1
    collector.record_iteration_start()
    time.sleep(given.step_s)
    dist.all_reduce(gradient)
    if iteration == done + 1:  # torchrun ends some worlds before this
        with starts.open("a") as file:
            file.write(json.dumps({"world_size": world_size, "first": iteration}) + "\n")
    collector.record_iteration_end(100, 2)
    if iteration == given.at and rank == given.kill_rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and iteration % given.checkpoint_every == 0:
        with collector.phase("checkpoint"):
            checkpoint.with_suffix(".new").write_text(json.dumps(iteration))
            checkpoint.with_suffix(".new").replace(checkpoint)
    if rank == 0:
        (given.folder / "progress").write_text(f"{done} {iteration}")
effllm.finalize_efficientllm_metrics()
dist.destroy_process_group()
