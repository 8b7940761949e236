"""Data-parallel training with gloo; the global batch and the model are the same for any number of ranks."""

import argparse
import json
import math
import time
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

import effllm.efficientllm_metrics as effllm
from effllm.trainer import session

GLOBAL_SAMPLES, SEQUENCE_LENGTH, WIDTH = 8, 32, 64

parser = argparse.ArgumentParser()
parser.add_argument("--iterations", type=int, default=43)
parser.add_argument("--step-s", type=float, default=0.02)
parser.add_argument("--until", type=Path, help="a file: after the iterations, continue until it exists")
parser.add_argument("--values-within-s", type=float, default=0.0, help="maximum wait for values of the job")
given = parser.parse_args()

session.READY_S = 60.0  # long timeout: the first window must have a device, even on a busy machine
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
model = torch.nn.Linear(WIDTH, WIDTH, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = GLOBAL_SAMPLES // world_size
values = {}

effllm.initialize_efficientllm_metrics(sum(p.numel() for p in model.parameters()))
collector = effllm.get_metrics_collector()
deadline_s = time.monotonic() + given.values_within_s
dist.barrier()  # no rank starts to train before all agents have started
for iteration in count(1):
    stop = torch.tensor(float(iteration > given.iterations and (not given.until or given.until.exists())))
    if given.until:
        dist.broadcast(stop, 0)
    if stop.item():
        break
    collector.record_iteration_start()
    batch = torch.randn(samples, SEQUENCE_LENGTH, WIDTH)
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    time.sleep(given.step_s)
    collector.record_iteration_end(samples * SEQUENCE_LENGTH, samples)
    if effllm.should_log_metrics(iteration):
        values = collector.log_metrics(iteration, loss.item())
        while all(map(math.isnan, values.values())) and time.monotonic() < deadline_s:
            time.sleep(0.02)
            values = collector.log_metrics(iteration, loss.item())
effllm.finalize_efficientllm_metrics()
Path(f"truth-{rank}.json").write_text(json.dumps(values))
dist.destroy_process_group()
