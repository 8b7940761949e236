"""Instruments in a training process return torch's values, start no threads, and import only the standard library."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker

STATE = """
import json, os, sys, threading

def state():
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    return [*threads, len(os.listdir("/proc/self/fd")), sorted(sys.modules)]
"""

USE = """
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer

GPUMemoryProfiler(0).measure("a"), GPUMemoryProfiler(0).detect_leak()
timer = TrainingTimer(0)
timer.start("a"), timer.stop("a"), timer.get_summary()
throughput = ThroughputTracker()
throughput.update(1, 1), throughput.update(1, 1), throughput.get_current_throughput()
profiler = ComprehensiveProfiler(0)
profiler.start_iteration(), profiler.end_iteration(1, 1), profiler.export_to_json("profiling.json")
tracker = MetricTracker()
tracker.update("loss", 1.0), tracker.get_summary("loss")
grpo = GRPOMetricsTracker()
grpo.update_grpo_step(1, 0.5), grpo.update_group_rewards([0.0, 1.0]), grpo.get_reward_distribution()
scores = ScoreDistributionTracker()
scores.update([1.0, None]), scores.get_distribution()
logger = TrainingLogger("logs", "run")
logger.log_step(1, {"loss": 1.0}, [1.0]), logger.save_checkpoint_metrics("a"), logger.export_all()
"""


def printed(code, folder):
    command = [sys.executable, "-W", "error", "-c", code]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder).stdout)


def test_instruments_start_no_thread_and_leave_no_file_open(tmp_path):
    before, after = printed(f"{STATE}\nbefore = state()\n{USE}\nprint(json.dumps([before, state()]))", tmp_path)

    assert after[:3] == before[:3] == [1, 1, before[2]]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["logs", "profiling.json"]


def test_use_of_the_instruments_imports_only_the_standard_library(tmp_path):
    before, after = printed(f"{STATE}\nbefore = state()\n{USE}\nprint(json.dumps([before, state()]))", tmp_path)
    tops = {name.split(".")[0] for name in set(after[3]) - set(before[3])}

    assert "effllm" in tops
    assert tops - {"effllm"} <= sys.stdlib_module_names


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["scalar", "with gradient", "one element", "half", "numpy scalar", "numpy array"])
def test_values_of_torch_and_numpy_are_read_without_a_warning(kind):
    torch, numpy = pytest.importorskip("torch"), pytest.importorskip("numpy")
    value = {
        "scalar": torch.tensor(0.5),
        "with gradient": torch.tensor(0.5, requires_grad=True),
        "one element": torch.tensor([0.5]),
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "numpy scalar": numpy.float32(0.5),
        "numpy array": numpy.array([0.5]),
    }[kind]
    tracker = MetricTracker()
    tracker.update("loss", value, step=numpy.int64(3))

    assert (tracker.get_mean("loss"), tracker.last_step) == (0.5, 3)
    assert type(tracker.get_recent("loss")[0]) is float


@pytest.mark.torch
def test_rewards_and_scores_in_tensors_are_read():
    torch = pytest.importorskip("torch")
    groups, scores = GRPOMetricsTracker(), ScoreDistributionTracker()
    groups.update_group_rewards(torch.tensor([0.25, 0.75, float("nan")]))
    scores.update(torch.tensor([0.0, 0.5, 0.5]))

    assert groups.get_reward_distribution()["rank_distribution"] == {"1": 0.75, "2": 0.25}
    assert groups.get_reward_distribution()["not_finite"] == {"nan": 1}
    assert scores.get_distribution()["score_counts"] == {"0.0": 1, "0.5": 2}


@pytest.mark.torch
def test_value_of_a_tensor_without_memory_is_missing():
    torch = pytest.importorskip("torch")
    scores = ScoreDistributionTracker()
    with pytest.warns(UserWarning, match="Tensor is not a number in CPU memory"):
        scores.update(torch.empty(3, device="meta"))

    assert scores.get_distribution()["missing_count"] == 3
