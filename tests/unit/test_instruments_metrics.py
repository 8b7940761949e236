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


def tracked(*values, name="loss", **options):
    tracker = MetricTracker(**options)
    for step, value in enumerate(values):
        tracker.update(name, value, step=step)
    return tracker


def test_mean_and_deviation_cover_all_values():
    chance = random.Random(1)
    values = [chance.gauss(1e6, 1.0) for _ in range(30_000)]
    tracker = tracked(*values, max_recent=100)

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
        known.add_value(value)
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
    tracker = tracked(*range(1, 6), max_recent=2)
    found = tracker.get_summary("loss")

    assert (found["percentiles_of"], found["percentiles_are"], found["p50"]) == expected
    assert tracker.get_summary("loss", window=2)["percentiles_are"] == "exact"


def test_window_covers_the_newest_values():
    tracker = tracked(*range(1000))

    assert tracker.get_mean("loss", window=100) == pytest.approx(949.5)
    found = tracker.get_summary("loss", window=100)
    # Percentiles are NumPy's: the value at position 99 x percent / 100 of the sorted values.
    expected = {"min": 900, "p5": 904.95, "p25": 924.75, "p75": 974.25, "p95": 994.05, "p99": 998.01}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    for window in (0, -1, 11):
        with pytest.raises(ValueError, match="1 to 10"):
            tracked(1.0, max_recent=10).get_mean("loss", window=window)


def test_nan_and_infinite_values_are_counted_and_not_averaged():
    tracker = tracked(1.0, math.nan, math.inf, -math.inf, math.nan, -(10**400))  # beyond floats: infinite

    assert tracker.get_mean("loss") == 1.0
    assert tracker.get_summary("loss")["not_finite"] == {"nan": 2, "inf": 1, "-inf": 2}
    assert tracker.get_summary("other")["count"] == 0
    assert math.isnan(tracker.get_mean("other"))
    assert math.isnan(tracker.get_std("other", window=3))


def test_tensor_on_a_gpu_gives_one_warning_and_is_not_read(recwarn):
    class OnGpu:
        device = SimpleNamespace(type="cuda")

        def __float__(self):
            raise AssertionError("a synchronisation")

    tracker = tracked(OnGpu(), OnGpu())

    assert [str(one.message) for one in recwarn] == [
        "metric loss: OnGpu is not a number in CPU memory; pass loss.item()",
    ]
    assert tracker.get_summary("loss")["count"] == 0


class RaisesAsANumber:
    def __float__(self):
        raise RuntimeError("of the script")


@cases("value", [None, "0.5", b"0.5", 1j, [0.5], RaisesAsANumber(), Decimal("sNaN")])
def test_value_that_is_no_number_is_left_out_with_a_warning(value):
    with pytest.warns(UserWarning, match="metric loss"):
        tracker = tracked(value)

    assert (tracker.names, tracker.last_step) == ([], None)


@cases("metrics", [None, 0.5, ["loss"]])
def test_collection_that_is_no_dictionary_is_left_out_with_a_warning(metrics):
    tracker = GRPOMetricsTracker()
    with pytest.warns(UserWarning, match="a dictionary"):
        tracker.update_batch(metrics, step=1)
    if metrics is not None:
        with pytest.warns(UserWarning, match=f"reward_components is {type(metrics).__name__}"):
            tracker.update_grpo_step(step=1, policy_loss=0.5, reward_components=metrics)

    assert tracker.names == ([] if metrics is None else ["policy_loss"])


@cases("value", [True, 1, Decimal(1), Fraction(1), 1.0])
def test_every_type_of_number_is_accepted(value):
    assert tracked(value).get_mean("loss") == 1.0


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
    for rewards in ([0.3, 0.9, 0.5, 0.7], [0.5, 0.1, 0.3, 0.7]):
        tracker.update_group_rewards(rewards)
    found = tracker.get_reward_distribution()

    assert found["reward_mean"] == pytest.approx(0.5)
    assert found["reward_std"] == pytest.approx(statistics.stdev([0.3, 0.9, 0.5, 0.7, 0.5, 0.1, 0.3, 0.7]))
    assert found["rank_distribution"] == pytest.approx({"1": 0.8, "2": 0.6, "3": 0.4, "4": 0.2})
    assert (found["groups"], found["empty_groups"], found["equal_groups"]) == (2, 0, 0)


def test_odd_groups_are_counted(recwarn):
    tracker = GRPOMetricsTracker()
    for rewards in ([], [math.nan], [1.0, 1.0], [None, 1.0, None], ["good", "bad", 1.0]):
        tracker.update_group_rewards(rewards)
    found = tracker.get_reward_distribution()

    assert (found["groups"], found["empty_groups"], found["equal_groups"]) == (3, 2, 1)
    assert (found["not_finite"], found["missing_rewards"], found["reward_mean"]) == ({"nan": 1}, 4, 1.0)
    assert [str(one.message) for one in recwarn] == ["a reward of type str is not a number in CPU memory"]


def test_single_reward_is_a_group_of_one_completion():
    tracker = GRPOMetricsTracker()
    tracker.update_group_rewards(0.5)

    assert tracker.get_reward_distribution()["rank_distribution"] == {"1": 0.5}
    assert math.isnan(tracker.get_reward_distribution()["group_std_mean"])


def distribution_of(*updates, **limits):
    tracker = ScoreDistributionTracker(**limits)
    for scores in updates:
        tracker.update(scores)
    return tracker.get_distribution()


@cases(
    ("scores", "counts"),
    [
        ([1.0, 0.5, 1.0, 0.0], {"0.0": 1, "0.5": 1, "1.0": 2}),
        ([-0.0, False, True], {"0.0": 2, "1.0": 1}),
        *((one, {"0.5": 1}) for one in (0.5, [0.5], (0.5,), {0.5}, iter([0.5]), Decimal("0.5"))),
    ],
)
def test_scores_are_counted_by_value(scores, counts):
    assert distribution_of(scores)["score_counts"] == counts


def test_invalid_scores_are_counted_by_reason():
    with pytest.warns(UserWarning, match="type str is not a number"):
        found = distribution_of([None, "high", math.nan, 7.0, -0.1], [0.5] * 5, minimum=0.0, maximum=1.0)

    assert (found["missing_count"], found["not_finite_count"], found["out_of_range_count"]) == (2, 1, 2)
    assert (found["total"], found["valid_count"], found["invalid_count"], found["invalid_rate"]) == (10, 5, 5, 0.5)
    assert found["mean_score"] == 0.5
    assert math.isnan(distribution_of([None])["mean_score"])


def test_distribution_without_scores_has_no_mean_score():
    found = distribution_of([])

    assert (found["total"], found["score_counts"]) == (0, {})
    assert math.isnan(found["invalid_rate"]) and math.isnan(found["mean_score"])


def test_number_of_different_scores_is_bounded():
    found = distribution_of(number / 5000 for number in range(5000))

    assert (len(found["score_counts"]), found["other_scores"], found["valid_count"]) == (1000, 4000, 5000)


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
    moments.add_value(1e200)
    moments.add_value(1e200)
    assert (moments.mean, moments.std) == (1e200, 0.0)
