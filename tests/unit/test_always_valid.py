"""Confidence sequences, running runs and switching inside one run."""

import math

import numpy as np
import pytest

from effllm.analysis.always_valid import (
    always_valid,
    batch_means,
    pairs,
    run_mean,
    switchback,
    these_two_runs,
    while_running,
)
from effllm.analysis.difference import RunSpread


def test_looking_after_every_value_rarely_excludes_the_truth():
    random = np.random.default_rng(1)
    false = 0
    for _ in range(400):
        values = random.normal(0.0, 1.0, 60).tolist()
        false += any(always_valid(values[:seen]).excludes_zero for seen in range(2, 61))

    assert false <= 0.05 * 400


def test_interval_is_where_the_likelihood_ratio_reaches_its_limit():
    values = [0.3, 1.1, 0.7, 0.2, 1.9]

    low = always_valid(values).low

    total, squares = sum(one - low for one in values), sum((one - low) ** 2 for one in values)
    ratio = math.sqrt(1 / 6) * (1 - total**2 / (6 * squares)) ** (-5 / 2)
    assert ratio == pytest.approx(1 / 0.05)


def test_interval_is_infinite_before_the_second_value():
    assert math.isinf(always_valid([1.0]).high)
    assert math.isinf(always_valid([]).high)


def test_pairs_are_in_the_order_of_the_runs():
    found = pairs([1.0, 2.0, 3.0, 9.0], [2.0, 3.1, 3.9])

    assert found.estimate == pytest.approx(1.0)


def test_batches_leave_out_the_incomplete_rest():
    assert batch_means([1, 3, 5, 7, 100], 2) == [2, 6]


def test_error_of_a_run_covers_correlated_windows():
    random = np.random.default_rng(2)
    missed = 0
    for _ in range(300):
        noise, values = 0.0, []
        for step in random.normal(0.0, 1.0, 200):
            noise = 0.5 * noise + step
            values.append(noise)
        low, high = run_mean(values).interval()
        missed += not low < 0 < high

    assert missed / 300 < 0.10  # 0.05 for independent windows; a test that takes windows as independent has 0.26


def test_too_few_or_constant_windows_give_no_error():
    assert run_mean([1.0, 2.0]) is None
    assert run_mean([1.0] * 50) is None
    assert these_two_runs([1.0] * 50, list(range(50))) is None


def test_running_run_is_called_only_beyond_the_spread_between_runs():
    random = np.random.default_rng(3)
    windows = random.normal(102.0, 0.1, 100).tolist()

    assert not while_running(windows, [100.0], RunSpread(1.0, 9)).excludes_zero
    assert while_running(windows, [100.0], RunSpread(0.01, 9)).excludes_zero
    assert math.isinf(while_running(windows[:10], [100.0], RunSpread(0.01, 9)).high)


def test_blocks_remove_a_linear_drift():
    arms = [arm for arm in "ABBAABBA" for _ in range(4)]
    values = [10.0 * at + (5.0 if arm == "B" else 0.0) for at, arm in enumerate(arms)]

    assert switchback(arms, values, "A", "B") == pytest.approx([5.0, 5.0])
    assert switchback(arms, values, "A", "B", settle=1) == pytest.approx([5.0, 5.0])
    assert switchback(arms, values, "B", "A") == pytest.approx([-5.0])


def test_blocks_of_alternating_stretches_remove_a_drift():
    arms = [arm for arm in "ABABA" for _ in range(6)]
    values = [10.0 * at + (5.0 if arm == "B" else 0.0) for at, arm in enumerate(arms)]

    assert switchback(arms, values, "A", "B", settle=2) == pytest.approx([5.0, 5.0])


def test_a_switch_without_a_way_back_is_no_block():
    assert switchback("AAABBB", [1.0] * 6, "A", "B") == []
    assert switchback("ABA", [1.0, 2.0, 1.0], "A", "B") == []  # one window has no two halves
    assert switchback("", [], "A", "B") == []
