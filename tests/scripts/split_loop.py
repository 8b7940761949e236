"""Data-parallel training with DDP and two extra all-reduces: one is exposed, one is hidden by computation.

Writes this rank's wait for the exposed all-reduce in the profiled iterations, and all bits of every loss.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

import effllm.efficientllm_metrics as effllm

WIDTH, PARTS = 256, 4_000_000

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--profile-every", type=int, default=0)
given = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters())
exposed, hidden = torch.zeros(PARTS), torch.zeros(PARTS)
square = torch.randn(WIDTH, WIDTH) / WIDTH
waited_s, losses = 0.0, []

effllm.initialize_efficientllm_metrics(sum(p.numel() for p in model.parameters()))
collector = effllm.get_metrics_collector()
dist.barrier()
for iteration in range(1, given.iterations + 1):
    collector.record_iteration_start()
    optimizer.zero_grad()
    loss = model(torch.randn(32, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    began_s = time.perf_counter()
    dist.all_reduce(exposed)
    if given.profile_every and iteration % given.profile_every == 0:
        waited_s += time.perf_counter() - began_s
    work = dist.all_reduce(hidden, async_op=True)
    while not work.is_completed():
        square @ square
    work.wait()
    collector.record_iteration_end(32, 32)
    losses.append(loss.item().hex())
    collector.log_metrics(iteration, loss.item())
effllm.finalize_efficientllm_metrics()
Path(f"truth-{rank}.json").write_text(json.dumps({"waited_s": waited_s, "losses": losses}))
dist.destroy_process_group()
