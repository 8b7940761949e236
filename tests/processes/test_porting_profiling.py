"""effllm runs scripts that use other modules named profiling and metrics; docs/porting.md lists the differences."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker, TrainingTimer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "porting.md"
BLOCKS = Path(__file__).with_name("porting_blocks.md")
BATCH = 4


@pytest.fixture
def training():
    """Return a small model and its training step, which returns loss, reward and scores."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.randn(8, 1)
    loader = [torch.randn(BATCH, 8) for _ in range(5)]

    def loss_of(batch):
        return ((model(batch) - batch @ target) ** 2).mean()

    def step(batch):
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), 1.0 - loss.item(), [1.0, 0.5, None, 0.0]

    return SimpleNamespace(model=model, optimizer=optimizer, loader=loader, loss_of=loss_of, step=step)


def is_number(value):
    return isinstance(value, float) and math.isfinite(value)


def test_memory_is_measured_after_the_forward_pass(training):
    profiler = GPUMemoryProfiler(device=0)
    training.model(training.loader[0])
    stats = profiler.measure("after_forward")

    assert set(stats) == {"allocated_gb", "reserved_gb", "max_allocated_gb", "max_reserved_gb"}
    assert all(is_number(one) and one > 0 for one in stats.values())


def test_one_check_after_the_training_finds_no_trend():
    """A single check judges no trend; the rule of the baseline is used if it is requested."""
    profiler = GPUMemoryProfiler(device="cpu")
    profiler.set_baseline()
    kept = b"x" * 200_000_000

    assert not profiler.detect_leak(threshold_gb=0.1)
    assert profiler.detect_leak(threshold_gb=0.1, method="baseline")
    assert len(kept) == 200_000_000


def test_memory_leak_is_checked_every_100th_step(training):
    profiler = GPUMemoryProfiler(device=0)
    profiler.set_baseline()
    found = []
    for step in range(1000):
        training.step(training.loader[step % 5])
        if step % 100 == 0:
            found.append(profiler.detect_leak(threshold_gb=0.5))

    assert found == [False] * 10


def test_times_of_forward_backward_and_optimizer_are_measured(training):
    timer = TrainingTimer(device=0)
    for batch in training.loader:
        timer.start("forward")
        loss = training.loss_of(batch)
        assert is_number(timer.stop("forward")) or torch.cuda.is_available()
        timer.start("backward")
        loss.backward()
        timer.stop("backward")
        timer.start("optimizer")
        training.optimizer.step()
        timer.stop("optimizer")
    summary = timer.get_summary()

    assert set(summary) == {"forward", "backward", "optimizer"}
    assert all(one["count"] == 5 and one["mean_sec"] > 0 for one in summary.values())


def test_throughput_of_a_loop_is_measured(training):
    tracker = ThroughputTracker(window_size=100)
    for batch in training.loader:
        training.step(batch)
        tracker.update(num_samples=BATCH, num_tokens=batch.numel())
    throughput = tracker.get_current_throughput()

    assert set(throughput) == {"samples_per_sec", "tokens_per_sec"}
    assert throughput["tokens_per_sec"] == pytest.approx(8 * throughput["samples_per_sec"])


def test_profile_of_iterations_is_written_as_json(training, tmp_path):
    profiler = ComprehensiveProfiler(device=0)
    profiler.memory.set_baseline()
    for _epoch in range(2):
        for batch in training.loader:
            profiler.start_iteration()
            training.step(batch)
            profiler.end_iteration(num_samples=BATCH, num_tokens=batch.numel())
    profiler.export_to_json(str(tmp_path / "profiling_results.json"))
    body = json.loads((tmp_path / "profiling_results.json").read_text())

    assert {"timestamp", "device", "memory", "timing", "throughput"} <= set(body)
    assert body["device"] == 0
    assert all(is_number(body["memory"][name]) for name in ("peak_allocated_gb", "mean_allocated_gb", "baseline_gb"))
    assert body["timing"]["iteration"]["count"] == 10
    assert is_number(body["timing"]["iteration"]["mean_sec"])
    assert all(is_number(body["throughput"][name]) for name in ("samples_per_sec", "tokens_per_sec"))


def test_statistics_of_a_metric_include_the_number_of_its_values(training):
    tracker = MetricTracker()
    for step in range(200):
        loss, _, _ = training.step(training.loader[step % 5])
        tracker.update("loss", loss, step=step)
    tracker.update_batch({"loss": 0.5, "reward": 0.8, "kl_div": 0.01}, step=200)
    summary = tracker.get_summary("loss")

    assert is_number(tracker.get_mean("loss")) and is_number(tracker.get_std("loss"))
    assert tracker.get_mean("loss", window=100) < tracker.get_mean("loss")
    assert summary["count"] == 201
    assert all(is_number(summary[name]) for name in ("mean", "std", "min", "max", "p95"))
    assert tracker.get_summary("kl_div")["mean"] == 0.01


def test_step_and_group_rewards_of_grpo_are_tracked():
    tracker = GRPOMetricsTracker()
    components = {"format": 1.0, "score": 0.68, "meta": 0.85}
    tracker.update_grpo_step(
        step=100, policy_loss=0.45, mean_reward=0.72, reward_components=components, kl_divergence=0.012
    )
    tracker.update_group_rewards([0.9, 0.7, 0.5, 0.3])
    found = tracker.get_reward_distribution()

    assert found["reward_mean"] == pytest.approx(0.6)
    # The variance of a sample is the sum of the squares of 0.3, 0.1, 0.1 and 0.3, divided by 3.
    assert found["reward_std"] == pytest.approx(math.sqrt(0.2 / 3))
    assert found["rank_distribution"] == {"1": 0.9, "2": 0.7, "3": 0.5, "4": 0.3}
    assert tracker.get_summary("reward/meta")["mean"] == 0.85


def test_distribution_of_verification_scores_counts_invalid_scores():
    tracker = ScoreDistributionTracker()
    tracker.update([1.0, 0.5, None, 1.0, 0.0])
    expected = {"total": 5, "valid_count": 4, "invalid_count": 1, "invalid_rate": 0.2, "mean_score": 0.625}

    assert expected.items() <= tracker.get_distribution().items()
    assert tracker.get_distribution()["score_counts"] == {"0.0": 1, "0.5": 1, "1.0": 2}


def test_logs_of_an_experiment_are_written_as_json(training, tmp_path):
    logger = TrainingLogger(log_dir=str(tmp_path / "experiments" / "logs"), experiment_name="verifier_iter1")
    for step in range(200):
        loss, reward, _ = training.step(training.loader[step % 5])
        logger.log_step(step=step, metrics={"loss": loss, "reward": reward}, scores=[1.0, 0.5, 1.0, 0.0])
        if step % 100 == 0:
            logger.save_checkpoint_metrics(f"step_{step}")
    logger.export_all()
    files = {one.name: json.loads(one.read_text()) for one in (tmp_path / "experiments" / "logs").iterdir()}

    names = ["verifier_iter1_metrics.json", "verifier_iter1_step_0.json", "verifier_iter1_step_100.json"]
    assert sorted(files) == names
    body = files["verifier_iter1_metrics.json"]
    assert body["experiment_name"] == "verifier_iter1"
    assert set(body["metric_summaries"]) == {"loss", "reward"}
    assert {"mean", "std", "min", "max"} <= set(body["metric_summaries"]["loss"])
    assert body["score_distribution"]["mean_score"] == pytest.approx(0.625)
    assert body["score_distribution"]["score_counts"] == {"0.0": 200, "0.5": 200, "1.0": 400}
    assert len(body["raw_metrics"]["loss"]) == 200
    assert files["verifier_iter1_step_100.json"]["metric_summaries"]["loss"]["count"] == 101


def test_profiler_and_logger_work_in_one_loop(training, tmp_path):
    profiler = ComprehensiveProfiler(device=0)
    logger = TrainingLogger(tmp_path / "logs", "verifier_iter1")
    for epoch in range(2):
        for step, batch in enumerate(training.loader):
            profiler.start_iteration()
            loss, reward, scores = training.step(batch)
            profiler.end_iteration(num_samples=len(batch), num_tokens=batch.numel())
            logger.log_step(step=step, metrics={"loss": loss, "reward": reward}, scores=scores)
        profiler.export_to_json(tmp_path / f"profiling_epoch{epoch}.json")
        logger.save_checkpoint_metrics(f"epoch{epoch}")

    written = sorted(one.relative_to(tmp_path).as_posix() for one in tmp_path.rglob("*.json"))
    assert written == [
        "logs/verifier_iter1_epoch0.json",
        "logs/verifier_iter1_epoch1.json",
        "profiling_epoch0.json",
        "profiling_epoch1.json",
    ]
    last = json.loads((tmp_path / "logs" / "verifier_iter1_epoch1.json").read_text())
    assert last["score_distribution"]["invalid_count"] == 10


# --- the tables of the page ---


def rows(section, header):
    """Return the rows of the table with this header, as lists of cells."""
    (text,) = (one for one in BLOCKS.read_text().split("\n## ") if one.startswith(section))
    table = text.split(header, 1)[1].split("\n\n", 1)[0]
    return [re.split(r" *(?<!\\)\| *", line.strip("|").strip()) for line in table.splitlines()[2:]]


@pytest.mark.parametrize(
    ("section", "header", "blocks"),
    [
        ("Modules", "| block | test | adaptation |", 20),
        ("Energy callback", "| block | tests | adaptation |", 10),
        ("Energy of fine-tuning", "| block | tests | adaptation |", 17),
    ],
)
def test_page_has_a_row_for_each_code_block_of_a_guide(section, header, blocks):
    found = rows(section, header)

    # One row of the energy log has two commands, which are one block.
    assert len(found) == blocks
    assert all(len(row) == 3 and all(row) for row in found)
    text = BLOCKS.read_text().split(f"\n## {section}")[1].split("\n## ")[0]
    (number,) = re.findall(r"The (\w+) code blocks run", text)
    assert {"ten": 10, "seventeen": 17, "twenty": 20}[number] == blocks


def test_each_block_names_a_test_or_the_reason_why_it_cannot_run():
    named = [row[1].strip("`") for row in rows("Modules", "| block | test | adaptation |")]
    tests = {name for name in globals() if name.startswith("test_")}

    assert set(named) - {"cannot run"} <= tests
    assert named.count("cannot run") == 2
    assert {name for name in tests if "block" not in name and "tokens_processed" not in name} <= set(named)


def test_page_has_the_difference_of_tokens_processed():
    (row,) = (one for one in PAGE.read_text().splitlines() if one.startswith("| `tokens_processed` |"))

    assert "after the warm-up, without padding, of all ranks" in row
