"""The estimates of ``effllm fit`` against the counted tensors that are kept in benchmarks/results."""

import json
from pathlib import Path

import pytest

from benchmarks.memory.configurations import Configuration
from benchmarks.memory.judged import covered, judge, limits, quantile, summary
from effllm.memory.estimate import ACTIVATION_LIMITS

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*-memory-seed-15.json"))


@pytest.fixture(scope="module")
def found():
    rows = json.loads(RESULTS[-1].read_text())["counted"]
    return [judge(Configuration(**row["configuration"]), row["bytes"]) for row in rows]


def test_weights_gradients_and_states_are_exact(found):
    assert len({one.configuration for one in found}) >= 200
    assert [one.configuration.name for one in found if not one.exact] == []


def test_activations_are_within_10_percent_for_nine_of_ten(found):
    assert summary(found)["activations_within_10_percent"] >= 0.9


def test_intervals_learnt_from_others_cover_nine_of_ten(found):
    assert 0.85 <= covered(found) <= 0.95
    assert 0.85 <= summary(found)["covered_leave_one_architecture_out"] <= 0.95


def test_limits_of_the_estimate_are_those_of_the_counted_tensors(found):
    assert pytest.approx(limits([one.ratio for one in found]), abs=0.01) == ACTIVATION_LIMITS


def test_a_quantile_is_taken_outwards():
    values = list(range(1, 101))

    assert (quantile(values, 0.05), quantile(values, 0.95)) == (5, 96)
