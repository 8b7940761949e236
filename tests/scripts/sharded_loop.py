"""Training of one model with one global batch: on one rank, or replicated or sharded over several ranks."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import effllm

ITERATIONS, GLOBAL_SAMPLES, LENGTH, WIDTH = 12, 8, 16, 32

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Embedding(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
if sys.argv[1] == "sharded":
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
elif dist.get_world_size() > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.arange(GLOBAL_SAMPLES * LENGTH).reshape(GLOBAL_SAMPLES, LENGTH) % WIDTH
mine = rows.chunk(dist.get_world_size())[dist.get_rank()]
# `numel()` of a sharded parameter is the number of all elements, not only of the local ones.
effllm.initialize_efficientllm_metrics(sum(parameter.numel() for parameter in model.parameters()))
collector = effllm.get_metrics_collector()
for _ in range(ITERATIONS):
    collector.record_iteration_start()
    loss = torch.nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    collector.record_iteration_end(mine.numel(), len(mine))
effllm.finalize_efficientllm_metrics()
dist.destroy_process_group()
