"""Metrics of training and of GRPO, distributions of scores, and the logger of an experiment."""

import json
import math
import random
import statistics
import sys
import threading
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest
from cases import cases

from effllm.instruments import _statistics
from effllm.instruments._statistics import ADD_TOGETHER, Statistics
from effllm.instruments.metrics import GRPOMetricsTracker, MetricTracker, ScoreDistributionTracker, TrainingLogger
from effllm.records.moments import Moments


def test_mean_and_deviation_cover_all_values():
    chance = random.Random(1)
    values = [chance.gauss(1e6, 1.0) for _ in range(30_000)]
    tracker = MetricTracker(max_recent=100)
    for step, value in enumerate(values):
        tracker.update("loss", value, step=step)

    assert tracker.get_mean("loss") == pytest.approx(statistics.fmean(values), rel=1e-12)
    assert tracker.get_std("loss") == pytest.approx(statistics.stdev(values), rel=1e-6)
    summary = tracker.get_summary("loss")
    assert (summary["count"], summary["min"], summary["max"]) == (30_000, min(values), max(values))
    assert summary["percentiles_of"] == 100
    assert tracker.last_step == 29_999


@pytest.mark.parametrize("odd", [[], [math.nan, math.inf, -math.inf], [1e308, 1e308, -1e308]], ids=str)
def test_results_include_every_value_at_any_time(odd):
    chance = random.Random(2)
    values = [*(chance.gauss(3.0, 1.0) for _ in range(80)), *odd]
    chance.shuffle(values)
    tracker, known = MetricTracker(), Moments()
    for num, value in enumerate(values, 1):
        tracker.update("loss", value)
        known.add(value)
        if num % 7 == 0 or num >= 78:
            found = tracker.get_summary("loss")

            assert (found["count"], found["not_finite"]) == (known.count, known.not_finite)
            assert (found["min"], found["max"]) == (known.minimum, known.maximum)
            assert tracker.get_recent("loss") == [one for one in values[:num] if math.isfinite(one)]
            if not odd or math.isnan(odd[0]):
                assert found["mean"] == pytest.approx(known.mean, rel=1e-12)
                assert found["std"] == pytest.approx(known.std, rel=1e-9)


def test_values_of_two_threads_are_counted_once():
    tracker = MetricTracker(max_recent=10)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        others = [threading.Thread(target=lambda: [tracker.update("loss", 1.0) for _ in range(5000)]) for _ in range(3)]
        for other in others:
            other.start()
        while any(other.is_alive() for other in others):
            tracker.get_summary("loss")
        for other in others:
            other.join()
    finally:
        sys.setswitchinterval(interval_s)

    assert tracker.get_summary("loss")["count"] == 15_000
    assert (tracker.get_mean("loss"), tracker.get_std("loss")) == (1.0, 0.0)


def test_number_of_values_that_are_not_yet_in_the_sums_is_bounded():
    found = Statistics(max_recent=1)
    for number in range(1000):
        found.add(float(number))

        assert len(found._new) < ADD_TOGETHER


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (None, (2, "newest", 4.5)),
        ((3, [7.0] * 6), (3, "estimated", 7.0)),
        ((1, [7.0] * 6), (2, "newest", 4.5)),  # the agent has read fewer values than are kept here
        ((6, [7.0] * 6), (2, "newest", 4.5)),  # another tracker of this process uses the same name
    ],
)
def test_summary_names_the_values_that_percentiles_cover(monkeypatch, run, expected):
    monkeypatch.setattr(_statistics, "percentiles_of_run", lambda name: run if name == "loss" else None)
    tracker = MetricTracker(max_recent=2)
    for number in range(1, 6):
        tracker.update("loss", number)
    found = tracker.get_summary("loss")

    assert (found["percentiles_of"], found["percentiles_are"], found["p50"]) == expected
    assert tracker.get_summary("loss", window=2)["percentiles_are"] == "exact"


def test_window_covers_the_newest_values():
    tracker = MetricTracker()
    for value in range(1000):
        tracker.update("loss", value)

    assert tracker.get_mean("loss", window=100) == pytest.approx(949.5)
    assert tracker.get_summary("loss", window=100)["min"] == 900
    assert tracker.get_summary("loss", window=100)["p95"] == pytest.approx(994.05)


@pytest.mark.parametrize("window", [0, -1, 11])
def test_window_above_the_number_of_kept_values_raises_an_error(window):
    tracker = MetricTracker(max_recent=10)
    tracker.update("loss", 1.0)

    with pytest.raises(ValueError, match="1 to 10"):
        tracker.get_mean("loss", window=window)


def test_nan_and_infinite_values_are_counted_and_not_averaged():
    tracker = MetricTracker()
    tracker.update_batch({"loss": 1.0}, step=1)
    for value in (float("nan"), float("inf"), float("-inf"), float("nan")):
        tracker.update("loss", value)

    assert tracker.get_mean("loss") == 1.0
    assert tracker.get_summary("loss")["not_finite"] == {"nan": 2, "inf": 1, "-inf": 1}


def test_metric_without_values_is_not_measured():
    assert math.isnan(MetricTracker().get_mean("loss"))
    assert math.isnan(MetricTracker().get_std("loss", window=3))
    assert MetricTracker().get_summary("loss")["count"] == 0


def test_tensor_on_a_gpu_gives_one_warning_and_is_not_read(recwarn):
    class OnGpu:
        device = SimpleNamespace(type="cuda")

        def __float__(self):
            raise AssertionError("a synchronisation")

    tracker = MetricTracker()
    tracker.update("loss", OnGpu())
    tracker.update("loss", OnGpu())

    assert [str(one.message) for one in recwarn] == [
        "metric loss: OnGpu is not a number in CPU memory; pass loss.item()",
    ]
    assert tracker.get_summary("loss")["count"] == 0


class RaisesAsANumber:
    def __float__(self):
        raise RuntimeError("of the script")


@cases("value", [None, "0.5", b"0.5", 1j, [0.5], RaisesAsANumber(), Decimal("sNaN")])
def test_value_that_is_no_number_is_left_out_with_a_warning(value):
    tracker = MetricTracker()
    with pytest.warns(UserWarning, match="metric loss"):
        tracker.update("loss", value, step=1)

    assert (tracker.names, tracker.last_step) == ([], None)


@cases("value", [True, 1, Decimal(1), Fraction(1), 1.0])
def test_every_type_of_number_is_accepted(value):
    tracker = MetricTracker()
    tracker.update("accuracy", value)

    assert tracker.get_mean("accuracy") == 1.0


def test_integer_above_the_largest_float_counts_as_infinite():
    tracker = MetricTracker()
    tracker.update("loss", -(10**400))

    assert tracker.get_summary("loss")["not_finite"] == {"-inf": 1}


@pytest.mark.parametrize("metrics", [None, 0.5, ["loss"]])
def test_batch_that_is_no_dictionary_is_left_out_with_a_warning(metrics):
    tracker = MetricTracker()
    with pytest.warns(UserWarning, match="a dictionary"):
        tracker.update_batch(metrics, step=1)

    assert tracker.names == []


@cases(("percent", "value"), [("p5", 5.95), ("p25", 25.75), ("p75", 75.25), ("p99", 99.01)])
def test_percentiles_are_interpolated_between_two_values(percent, value):
    """NumPy's default: the value at position (100 - 1) x percent / 100 of the sorted values 1 to 100."""
    tracker = MetricTracker()
    for number in range(100, 0, -1):
        tracker.update("loss", number)

    assert tracker.get_summary("loss")[percent] == pytest.approx(value)


def test_names_are_bounded():
    tracker = MetricTracker(max_recent=1)
    with pytest.warns(UserWarning, match="more than 1000 names"):
        for number in range(1010):
            tracker.update(f"metric {number}", 1.0)

    assert len(tracker.names) == 1000


def test_grpo_step_keeps_reward_components_by_name():
    tracker = GRPOMetricsTracker()
    tracker.update_grpo_step(
        step=100,
        policy_loss=0.45,
        mean_reward=0.72,
        reward_components={"format": 1.0, "score": 0.68},
        kl_divergence=0.012,
    )

    assert tracker.get_mean("policy_loss") == 0.45
    assert tracker.get_mean("reward/format") == 1.0
    assert tracker.names == ["policy_loss", "mean_reward", "kl_divergence", "reward/format", "reward/score"]


def test_reward_distribution_has_a_mean_for_each_place_in_a_group():
    tracker = GRPOMetricsTracker()
    tracker.update_group_rewards([0.3, 0.9, 0.5, 0.7])
    tracker.update_group_rewards([0.5, 0.1, 0.3, 0.7])
    found = tracker.get_reward_distribution()

    assert found["reward_mean"] == pytest.approx(0.5)
    assert found["reward_std"] == pytest.approx(statistics.stdev([0.3, 0.9, 0.5, 0.7, 0.5, 0.1, 0.3, 0.7]))
    assert found["rank_distribution"] == pytest.approx({"1": 0.8, "2": 0.6, "3": 0.4, "4": 0.2})
    assert (found["groups"], found["empty_groups"], found["equal_groups"]) == (2, 0, 0)


def test_groups_without_rewards_or_with_equal_rewards_are_counted():
    tracker = GRPOMetricsTracker()
    tracker.update_group_rewards([])
    tracker.update_group_rewards([float("nan")])
    tracker.update_group_rewards([1.0, 1.0])
    found = tracker.get_reward_distribution()

    assert (found["groups"], found["empty_groups"], found["equal_groups"]) == (1, 2, 1)
    assert found["not_finite"] == {"nan": 1}


def test_rewards_that_are_no_numbers_are_counted_as_missing(recwarn):
    tracker = GRPOMetricsTracker()
    tracker.update_group_rewards([None, 1.0, None])
    tracker.update_group_rewards(["good", "bad", 0.0])
    found = tracker.get_reward_distribution()

    assert (found["groups"], found["missing_rewards"], found["reward_mean"]) == (2, 4, 0.5)
    assert [str(one.message) for one in recwarn] == ["a reward of type str is not a number in CPU memory"]


def test_single_reward_is_a_group_of_one_completion():
    tracker = GRPOMetricsTracker()
    tracker.update_group_rewards(0.5)

    assert tracker.get_reward_distribution()["rank_distribution"] == {"1": 0.5}
    assert math.isnan(tracker.get_reward_distribution()["group_std_mean"])


def test_reward_components_that_are_no_dictionary_are_left_out():
    tracker = GRPOMetricsTracker()
    with pytest.warns(UserWarning, match="reward_components is list"):
        tracker.update_grpo_step(step=1, policy_loss=0.5, reward_components=[1.0])

    assert tracker.names == ["policy_loss"]


def test_scores_of_the_example_are_counted():
    tracker = ScoreDistributionTracker()
    tracker.update([1.0, 0.5, None, 1.0, 0.0])
    found = tracker.get_distribution()

    assert found["total"] == 5
    assert found["valid_count"] == 4
    assert found["invalid_count"] == 1
    assert found["invalid_rate"] == 0.2
    assert found["score_counts"] == {"0.0": 1, "0.5": 1, "1.0": 2}
    assert found["mean_score"] == 0.625


def test_invalid_scores_are_counted_by_reason():
    tracker = ScoreDistributionTracker(minimum=0.0, maximum=1.0)
    with pytest.warns(UserWarning, match="type str is not a number"):
        tracker.update([None, "high", float("nan"), 7.0, -0.1])
    found = tracker.get_distribution()

    assert (found["missing_count"], found["not_finite_count"], found["out_of_range_count"]) == (2, 1, 2)
    assert found["invalid_rate"] == 1.0
    assert math.isnan(found["mean_score"])


@cases("scores", [0.5, [0.5], (0.5,), {0.5}, iter([0.5]), Decimal("0.5")])
def test_scores_may_be_any_iterable_or_one_number(scores):
    tracker = ScoreDistributionTracker()
    tracker.update(scores)

    assert tracker.get_distribution()["score_counts"] == {"0.5": 1}


def test_boolean_scores_and_minus_zero_are_numbers():
    tracker = ScoreDistributionTracker()
    tracker.update([-0.0, False, True])

    assert tracker.get_distribution()["score_counts"] == {"0.0": 2, "1.0": 1}


def test_distribution_without_scores_has_no_mean_score():
    tracker = ScoreDistributionTracker()
    tracker.update([])
    found = tracker.get_distribution()

    assert (found["total"], found["score_counts"]) == (0, {})
    assert math.isnan(found["invalid_rate"]) and math.isnan(found["mean_score"])


def test_number_of_different_scores_is_bounded():
    tracker = ScoreDistributionTracker()
    tracker.update(number / 5000 for number in range(5000))
    found = tracker.get_distribution()

    assert len(found["score_counts"]) == 1000
    assert found["other_scores"] == 4000
    assert found["valid_count"] == 5000


def test_logger_writes_checkpoints_and_the_whole_experiment(tmp_path):
    logger = TrainingLogger(log_dir=tmp_path / "logs", experiment_name="verifier_iter1")
    for step in range(3):
        logger.log_step(step=step, metrics={"loss": 0.5 - step / 10, "reward": float("nan")}, scores=[1.0, None])
    first = json.loads(logger.save_checkpoint_metrics("step_100").read_text())
    body = json.loads(logger.export_all().read_text())

    assert first["checkpoint"] == "step_100"
    assert body["experiment_name"] == "verifier_iter1"
    assert body["metric_summaries"]["loss"]["mean"] == pytest.approx(0.4)
    assert body["metric_summaries"]["reward"]["mean"] is None
    assert body["score_distribution"]["mean_score"] == 1.0
    assert body["raw_metrics"]["loss"] == pytest.approx([0.5, 0.4, 0.3])
    assert sorted(one.name for one in (tmp_path / "logs").iterdir()) == [
        "verifier_iter1_metrics.json",
        "verifier_iter1_step_100.json",
    ]


@pytest.mark.parametrize("name", ["", "..", "../run", "a/b", "a\0b"])
def test_name_that_could_leave_the_folder_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match="must be a name"):
        TrainingLogger(tmp_path, name)


def test_deviation_of_values_near_the_largest_float_is_a_number():
    moments = Moments()
    moments.add_all([1e200, 1e200])
    assert (moments.mean, moments.std) == (1e200, 0.0)
