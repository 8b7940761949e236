"""Use each instrument in one process, and record threads, open files and imports before, during and after the use."""

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

if "--torch" in sys.argv:
    import torch

    torch.set_num_threads(1)
    torch.ones(2).sum().item()
    ids = torch.ones(2, 4, dtype=torch.long)
else:

    class Ids:
        """The part of a tensor that counts of positions need."""

        shape = (2, 4)

        def __len__(self):
            return 2

        def dim(self):
            return 2

        def numel(self):
            return 8

    ids = Ids()


def state():
    """Return threads of Python, threads of the process, and the names of the open files."""
    files = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listed folder
            files.append(str(descriptor.readlink()).split(":[")[0])
    return [threading.active_count(), len(list(Path("/proc/self/task").iterdir())), sorted(files)]


def audit(event, arguments):
    if event == "open":
        opened.append(str(arguments[0]))
    elif event in ("_thread.start_new_thread", "_thread.start_joinable_thread"):
        started.append(event)


states, opened, started = {}, [], []
states["before"], modules = state(), set(sys.modules)
sys.addaudithook(audit)


def used(name):
    states[name] = state()


from effllm.instruments.metrics import (  # noqa: E402
    GRPOMetricsTracker,
    MetricTracker,
    ScoreDistributionTracker,
    TrainingLogger,
    grpo_tracker,
)
from effllm.instruments.profiling import (  # noqa: E402
    ComprehensiveProfiler,
    GPUMemoryProfiler,
    ThroughputTracker,
    TrainingTimer,
)
from effllm.instruments.results_csv import append_row  # noqa: E402
from effllm.instruments.run_results import read_results  # noqa: E402
from effllm.instruments.token_counter import CountingCollator  # noqa: E402

memory = GPUMemoryProfiler(0)
memory.set_baseline(), memory.measure("a"), memory.detect_leak(), memory.get_summary()
used("GPUMemoryProfiler")
timer = TrainingTimer(0)
with timer.time("a"):
    timer.start("b"), timer.stop("b")
timer.get_summary()
used("TrainingTimer")
throughput = ThroughputTracker()
throughput.update(1, 1), throughput.update(1, 1), throughput.get_current_throughput()
used("ThroughputTracker")
profiler = ComprehensiveProfiler(0)
for _ in range(300):  # more iterations than the first 256
    profiler.start_iteration(), profiler.end_iteration(1, 1)
profiler.export_to_json("profiling.json")
used("ComprehensiveProfiler")
tracker = MetricTracker()
tracker.update("loss", 1.0), tracker.update_batch({"loss": 2.0}, 2), tracker.get_summary("loss")
used("MetricTracker")
for grpo in (GRPOMetricsTracker(), grpo_tracker()):
    grpo.update_grpo_step(1, 0.5), grpo.update_group_rewards([0.0, 1.0]), grpo.get_reward_distribution()
used("GRPOMetricsTracker")
scores = ScoreDistributionTracker()
scores.update([1.0, None]), scores.get_distribution()
used("ScoreDistributionTracker")
logger = TrainingLogger("logs", "run")
logger.log_step(1, {"loss": 1.0}, [1.0]), logger.save_checkpoint_metrics("a"), logger.export_all()
used("TrainingLogger")
collator = CountingCollator(lambda rows: {"input_ids": ids})
assert [batch["input_ids"] is ids for batch in collator.over([collator([1]), collator([2])])] == [True, True]
assert (collator.samples, collator.tokens_processed) == (4, 16)
used("CountingCollator")

if "--monitor" in sys.argv:
    from effllm.instruments import RobustGPUMonitor
    from effllm.trainer import session

    session.READY_S = 60.0
    monitor = RobustGPUMonitor(0.1)
    assert monitor.start_monitoring()
    began_s = monitor.add_sync_marker("first")
    used("RobustGPUMonitor, started")
    for _ in range(20):
        time.sleep(0.02)
        monitor.cut_span(), monitor.take_spans(), monitor.get_metrics_since_timestamp(began_s)
        with profiler.timer.time("a"):
            memory.measure("a"), tracker.update("loss", 1.0), throughput.update(1, 1)
    used("RobustGPUMonitor, in a loop")
    found = monitor.get_metrics_since_timestamp(began_s, wait_s=20.0)
    assert found.energy_consumed_wh > 0, found
    monitor.summary()
    assert monitor.stop_monitoring().energy_consumed_wh > 0
    used("RobustGPUMonitor")

results = read_results(next(iter(sorted(Path("runs").glob("*"))), Path("runs")))
used("read_results")
append_row("results.csv", results.values | {"notes": "all instruments"})
used("append_row")
truth = {"states": states, "modules": sorted(set(sys.modules) - modules), "opened": opened, "started": started}
Path("truth.json").write_text(json.dumps(truth))
