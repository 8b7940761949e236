"""A training loop without torch that uses the instruments; the loss is the rank plus the iteration number."""

import json
import os
import sys
import time
from itertools import count
from pathlib import Path

import effllm
from effllm.instruments import profiling
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker
from effllm.instruments.profiling import ComprehensiveProfiler
from effllm.trainer import session

session.READY_S = 60.0  # long wait: the first window must have a device, even on a busy machine

ITERATIONS, RECENT = 20, 5
profiling.MAX_RECENT = RECENT
until = Path(sys.argv[1]) if sys.argv[1:] else None  # continue after ITERATIONS until this file exists
rank = int(os.environ.get("RANK", "0"))

effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
tracker, profiler = MetricTracker(max_recent=RECENT), ComprehensiveProfiler("cpu")
scores, groups = ScoreDistributionTracker(), GRPOMetricsTracker()
for iteration in count(1):
    if iteration > ITERATIONS and (not until or until.exists()):
        break
    collector.record_iteration_start()
    profiler.start_iteration()
    time.sleep(0.01)
    tracker.update("loss", float(rank + iteration), iteration)
    tracker.update(f"only/{rank}", 1.0)
    scores.update([0.5, None])
    groups.update_group_rewards([0.0, 1.0])
    profiler.end_iteration(2, 100)
    collector.record_iteration_end(100, 2)
    if iteration == 3:
        tracker.update("loss", float("nan"), iteration)
reading, writing = os.pipe()
if (child := os.fork()) == 0:  # a child, such as a worker of a DataLoader
    os.read(reading, 1)
    tracker.update("of a child", 1.0)
    tracker.update("loss", 1e6)
    os._exit(0)
tracker.update("after the fork", 1.0)
os.write(writing, b"x")
os.waitpid(child, 0)
effllm.finalize_efficientllm_metrics()
truth = {"loss": tracker.get_summary("loss"), "timing": profiler.timer.get_summary()}
Path("truth.json").write_text(json.dumps(truth))
