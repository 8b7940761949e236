"""No value of a training loop raises an exception in a call of an instrument, and all results remain readable."""

import json
import warnings
from decimal import Decimal

import pytest

from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.instruments.profiling import ComprehensiveProfiler, GPUMemoryProfiler, ThroughputTracker


class Raises:
    def __float__(self):
        raise KeyError("of the script")

    def __iter__(self):
        return iter([1.0, None, self])


ODD = {
    "None": None,
    "bool": True,
    "negative": -1,
    "nan": float("nan"),
    "infinite": float("-inf"),
    "beyond floats": 10**400,
    "text": "0.5",
    "bytes": b"0.5",
    "complex": 1j,
    "decimal": Decimal("1e999"),
    "object": object(),
    "class": int,
    "empty list": [],
    "lists in a list": [None, "x", [1.0], {}],
    "dictionary": {"a": None, 2: "b"},
    "set": {0.5},
    "range": range(3),
    "raises": Raises(),
}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
def test_invalid_value_raises_no_error_and_results_are_readable(tmp_path, value):
    tracker, groups, scores = MetricTracker(), GRPOMetricsTracker(), ScoreDistributionTracker()
    logger, throughput = TrainingLogger(tmp_path, "odd"), ThroughputTracker()
    profiler, memory = ComprehensiveProfiler("cpu"), GPUMemoryProfiler("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            tracker.update("loss", value, step=value)
            tracker.update_batch(value, step=value)
            groups.update_grpo_step(value, value, value, value, value, other=value)
            groups.update_group_rewards(value)
            scores.update(value)
            logger.log_step(value, metrics={"loss": value}, scores=value)
            logger.log_step(1, metrics=value)
            throughput.update(value, value)
            profiler.start_iteration()
            profiler.end_iteration(value, value)
            memory.measure("end", iteration=value)

    assert {"count", "mean", "p95"} <= set(tracker.get_summary("loss"))
    assert set(throughput.get_current_throughput()) == {"samples_per_sec", "tokens_per_sec"}
    distribution = scores.get_distribution()
    assert distribution["total"] == distribution["valid_count"] + distribution["invalid_count"]
    assert groups.get_reward_distribution()["groups"] + groups.get_reward_distribution()["empty_groups"] == 2
    for path in (logger.export_all(), profiler.export_to_json(tmp_path / "profile.json")):
        assert json.loads(path.read_text())


def test_each_mistake_of_a_loop_gives_one_warning(recwarn):
    tracker, groups, scores = MetricTracker(), GRPOMetricsTracker(), ScoreDistributionTracker()
    throughput, profiler = ThroughputTracker(), ComprehensiveProfiler("cpu")
    for _ in range(5):
        tracker.update("loss", "0.5")
        groups.update_group_rewards(["0.5"])
        scores.update(["0.5"])
        throughput.update(-1)
        profiler.timer.stop("never started")

    assert len(recwarn) == 5
