"""The code of a guide to other modules named profiling and metrics runs; docs/porting.md lists the differences.

The tests of the instruments have their values: here are the types, keys and values that the guide states.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer

BLOCKS = Path(__file__).with_name("porting_blocks.md")
BATCH = 4


class Training:
    """A small model, whose step returns loss, reward and scores."""

    def __init__(self, torch):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.target = torch.randn(8, 1)
        self.loader = [torch.randn(BATCH, 8) for _ in range(5)]

    def loss_of(self, batch):
        return ((self.model(batch) - batch @ self.target) ** 2).mean()

    def step(self, batch):
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), 1.0 - loss.item(), [1.0, 0.5, None, 0.0]


@pytest.fixture
def training():
    return Training(pytest.importorskip("torch"))


def are_numbers(values, *names):
    return all(isinstance(values[name], float) and math.isfinite(values[name]) for name in names or values)


@pytest.mark.torch
def test_code_of_the_module_profiling_runs(training, tmp_path):
    memory = GPUMemoryProfiler(device=0)
    memory.set_baseline()
    stats = memory.measure("after_forward")
    assert are_numbers(stats, "allocated_gb", "reserved_gb", "max_allocated_gb", "max_reserved_gb")
    assert not memory.detect_leak(threshold_gb=0.1), "a single check judges no trend"

    timer, tracker = TrainingTimer(device=0), ThroughputTracker(window_size=100)
    for batch in training.loader:
        timer.start("forward")
        loss = training.loss_of(batch)
        timer.stop("forward")
        timer.start("backward")
        loss.backward()
        timer.stop("backward")
        tracker.update(num_samples=BATCH, num_tokens=batch.numel())
    assert all(one["count"] == 5 and one["mean_sec"] > 0 for one in timer.get_summary().values())
    throughput = tracker.get_current_throughput()
    assert throughput["tokens_per_sec"] == pytest.approx(8 * throughput["samples_per_sec"])

    profiler = ComprehensiveProfiler(device=0)
    profiler.memory.set_baseline()
    for _epoch in range(2):
        for batch in training.loader:
            profiler.start_iteration()
            training.step(batch)
            profiler.end_iteration(num_samples=BATCH, num_tokens=batch.numel())
    profiler.export_to_json(str(tmp_path / "profiling_results.json"))
    body = json.loads((tmp_path / "profiling_results.json").read_text())
    assert body.keys() >= {"timestamp", "device", "memory", "timing", "throughput"}
    assert are_numbers(body["memory"], "peak_allocated_gb", "mean_allocated_gb", "baseline_gb")
    assert (body["device"], body["timing"]["iteration"]["count"]) == (0, 10)
    assert are_numbers(body["throughput"], "samples_per_sec", "tokens_per_sec")


@pytest.mark.torch
def test_memory_leak_is_checked_every_100th_step(training):
    profiler = GPUMemoryProfiler(device=0)
    profiler.set_baseline()
    found = []
    for step in range(1000):
        training.step(training.loader[step % 5])
        if step % 100 == 0:
            found.append(profiler.detect_leak(threshold_gb=0.5))

    assert found == [False] * 10


@pytest.mark.torch
def test_code_of_the_module_metrics_runs(training, tmp_path):
    tracker, profiler = MetricTracker(), ComprehensiveProfiler(device=0)
    logger = TrainingLogger(log_dir=str(tmp_path / "logs"), experiment_name="verifier_iter1")
    for step in range(200):
        profiler.start_iteration()
        loss, reward, scores = training.step(training.loader[step % 5])
        profiler.end_iteration(num_samples=BATCH, num_tokens=BATCH * 8)
        tracker.update("loss", loss, step=step)
        logger.log_step(step=step, metrics={"loss": loss, "reward": reward}, scores=scores)
        if step % 100 == 0:
            logger.save_checkpoint_metrics(f"step_{step}")
    tracker.update_batch({"loss": 0.5, "reward": 0.8, "kl_div": 0.01}, step=200)
    logger.export_all()

    summary = tracker.get_summary("loss")
    assert tracker.get_mean("loss", window=100) < tracker.get_mean("loss")
    assert (summary["count"], tracker.get_summary("kl_div")["mean"]) == (201, 0.01)
    assert are_numbers(summary, "mean", "std", "min", "max", "p95")
    names = ["verifier_iter1_metrics.json", "verifier_iter1_step_0.json", "verifier_iter1_step_100.json"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == names
    body, _, last = (json.loads((tmp_path / "logs" / name).read_text()) for name in names)
    assert (body["experiment_name"], body["metric_summaries"].keys()) == ("verifier_iter1", {"loss", "reward"})
    assert body["score_distribution"]["score_counts"] == {"0.0": 200, "0.5": 200, "1.0": 200}
    assert (len(body["raw_metrics"]["loss"]), last["metric_summaries"]["loss"]["count"]) == (200, 101)


def test_code_of_rewards_and_scores_runs():
    tracker, scores = GRPOMetricsTracker(), ScoreDistributionTracker()
    components = {"format": 1.0, "score": 0.68, "meta": 0.85}
    tracker.update_grpo_step(
        step=100, policy_loss=0.45, mean_reward=0.72, reward_components=components, kl_divergence=0.012
    )
    tracker.update_group_rewards([0.9, 0.7, 0.5, 0.3])
    scores.update([1.0, 0.5, None, 1.0, 0.0])

    found = tracker.get_reward_distribution()
    assert found["reward_mean"] == pytest.approx(0.6)
    # The variance of a sample is the sum of the squares of 0.3, 0.1, 0.1 and 0.3, divided by 3.
    assert found["reward_std"] == pytest.approx(math.sqrt(0.2 / 3))
    assert found["rank_distribution"] == {"1": 0.9, "2": 0.7, "3": 0.5, "4": 0.3}
    assert tracker.get_summary("reward/meta")["mean"] == 0.85
    expected = {"total": 5, "valid_count": 4, "invalid_count": 1, "invalid_rate": 0.2, "mean_score": 0.625}
    assert scores.get_distribution().items() >= expected.items()
    assert scores.get_distribution()["score_counts"] == {"0.0": 1, "0.5": 1, "1.0": 2}


def test_page_has_a_row_for_each_code_block_of_a_guide():
    sections = BLOCKS.read_text().split("\n## ")[1:]
    tables = [re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:] for section in sections]
    rows = [[re.split(r" *(?<!\\)\| *", row) for row in table] for table in tables]

    # One row of the energy log has two commands, which are one block.
    assert [len(table) for table in rows] == [20, 10, 17]
    assert [row for table in rows for row in table if len(row) != 3 or not all(row)] == []
