"""The trainings of real size that are compared on a GPU: drawn, and judged with written peaks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.memory.configurations import Configuration
from benchmarks.memory.judged import covered, judge, limits, summary
from benchmarks.memory.on_gpu import MODELS, MeasuredPeaks, RealSize, figures_of, real_sizes, rows_of
from effllm.memory.estimate import ACTIVATION_LIMITS, estimate

ONE = RealSize("llama-3.2-1b", 1, 512, "bf16", "adamw", "none", 0, 1, "sdpa")


def test_forty_different_trainings_of_all_models_fit_on_the_gpu():
    drawn = real_sizes(40, 80e9)

    assert len(set(drawn)) == 40
    assert {one.model for one in drawn} == set(MODELS)
    assert all(estimate(one.shape, one.plan).total.high < 80e9 for one in drawn)
    assert all(estimate(one.shape, one.plan).total.high < 16e9 for one in real_sizes(40, 16e9))


def test_peaks_inside_and_outside_of_the_interval_and_failed_trainings_are_counted():
    expected = estimate(ONE.shape, ONE.plan)
    inside = MeasuredPeaks(ONE, expected.allocated.expected, expected.reserved.expected, 5e8)
    outside = replace(inside, allocated=2 * expected.allocated.high)
    failed = MeasuredPeaks(ONE, failure="out of memory")

    figures = {one.name: one.value for one in figures_of([inside, outside, failed])}

    assert [figures[f"memory, {name}: inside the 90 % interval"] for name in ("allocated", "reserved", "total")] == [
        0.5,
        1.0,
        1.0,
    ]
    assert [row["failure"] for row in rows_of([failed])] == ["out of memory"]
    assert all(one.value is None for one in figures_of([failed]))


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
