"""A training loop without torch that uses the instruments; rank r has losses of r + 1, 2, 3, ... in its iterations."""

import os
import time

import effllm
from effllm.instruments.metrics import MetricTracker
from effllm.trainer import session

session.READY_S = 60.0  # long wait: the first window must have a device, even on a busy machine

ITERATIONS = 20
rank = int(os.environ.get("RANK", "0"))
tracker = MetricTracker()
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, ITERATIONS + 1):
    collector.record_iteration_start()
    time.sleep(0.01)
    tracker.update("loss", float(rank + iteration), iteration)
    collector.record_iteration_end(100, 2)
    if iteration == 3:
        tracker.update("loss", float("nan"), iteration)
    tracker.update(f"only/{rank}", 1.0)
effllm.finalize_efficientllm_metrics()
