"""A loop of two ranks that uses everything that has a column: padding, FLOPs, a profile, requests, a value, a NaN."""

import time

import torch
import torch.distributed as dist

import effllm
from effllm.instruments.metrics import MetricTracker

ITERATIONS = 60

dist.init_process_group("gloo")
collector = effllm.initialize_efficientllm_metrics(
    124_000_000,
    total_iterations=ITERATIONS,
    flops_per_token=7.44e8,
    hardware_flops_per_token=9.9e8,
    facts={"model": "gpt-small", "sequence_length": 1024, "precision": "bf16"},
)
tracker = MetricTracker()
layer, sums = torch.nn.Linear(256, 256), torch.zeros(1_000_000)
for iteration in range(1, ITERATIONS + 1):
    collector.record_iteration_start()
    layer(torch.randn(64, 256)).square().mean().backward()
    time.sleep(0.04)
    effllm.sync_point()
    dist.all_reduce(sums)
    collector.record_iteration_end(8192, 8, tokens=7000, tokens_loss=7000)
    tracker.update("reward", 0.1 * iteration)
    collector.log_metrics(iteration, loss=float("nan") if iteration == 7 else 3 - iteration / ITERATIONS)
    if iteration == 30:
        with effllm.phase("evaluation"):
            time.sleep(0.3)
    if iteration % 20 == 0:
        with effllm.request(samples=2) as request:
            time.sleep(0.2)
            request.prompt(500)
            request.generated(100)
effllm.finalize_efficientllm_metrics()
dist.destroy_process_group()
