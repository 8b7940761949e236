"""The difference between two sides of runs: Welch with the ledger, Holm, the minimum detectable effect."""

import math

import numpy as np
import pytest
from scipy import stats

from effllm.analysis.difference import BETTER, SAME, WORSE, RunSpread, detectable, difference, holm, spread_of, word


def test_without_a_ledger_the_test_is_welchs():
    a, b = [1.0, 2.0, 4.0], [3.0, 3.5, 9.0, 4.0]

    found = difference(a, b)

    scipys = stats.ttest_ind(b, a, equal_var=False)
    assert found.p == pytest.approx(scipys.pvalue)
    assert found.interval() == pytest.approx(tuple(scipys.confidence_interval()))


def test_one_run_a_side_is_judged_by_the_spread_in_the_ledger():
    found = difference([10.0], [11.0], RunSpread(variance=2.0, df=9))

    assert found.standard_error == pytest.approx(2.0)  # sqrt(2 + 2)
    assert found.df == pytest.approx(9)
    assert found.uses_ledger


def test_a_side_without_known_spread_gives_no_difference():
    assert difference([1.0], [2.0]) is None
    assert difference([1.0, 1.1], [2.0]) is None
    assert difference([], [1.0, 2.0], RunSpread(1.0, 9)) is None


def test_identical_values_show_no_spread_to_judge_by():
    assert difference([3.0, 3.0, 3.0], [4.0, 4.0, 4.0]) is None
    found = difference([3.0, 3.0, 3.0], [4.0, 4.0, 4.0], resolution=0.1)
    assert found.standard_error == pytest.approx(0.1 * math.sqrt(2 / 3))


def test_a_ledger_that_varies_less_than_the_runs_is_not_used():
    a, b = [0.0, 10.0, -10.0], [3.0, 13.0, -7.0]

    found = difference(a, b, RunSpread(1e-6, 20))

    assert not found.uses_ledger
    assert found == difference(a, b)


def test_the_ledger_weighs_by_its_degrees_of_freedom():
    a, b = [1.0, -1.0], [1.0, -1.0]  # squares 2 on one degree of freedom each

    found = difference(a, b, RunSpread(variance=3.0, df=3))

    variance = (3 * 3 + 2) / (3 + 1)
    assert found.standard_error == pytest.approx(math.sqrt(variance / 2 + variance / 2))


def test_spread_is_pooled_within_configurations():
    assert spread_of([[1.0, 3.0], [10.0, 10.0, 13.0], [7.0]]) == RunSpread((2 + 6) / 3, 3)
    assert spread_of([[1.0], [2.0]]) is None


def test_holm_adjusts_the_smallest_first_and_never_reverses():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("estimate", "p", "higher", "expected"),
    [(1, 0.04, True, BETTER), (1, 0.04, False, WORSE), (-1, 0.04, False, BETTER), (-1, 0.06, True, SAME)],
)
def test_words(estimate, p, higher, expected):
    assert word(estimate, p, higher_is_better=higher) == expected


@pytest.mark.parametrize(("runs", "ledger_df"), [(2, 0), (3, 0), (3, 9), (1, 9)])
def test_detectable_effect_is_found_in_80_percent(runs, ledger_df):
    effect = detectable(RunSpread(1.0, 10_000), runs, runs, ledger_df)
    random = np.random.default_rng(1)
    found = 0
    for _ in range(3000):
        ledger = RunSpread(random.chisquare(ledger_df) / ledger_df, ledger_df) if ledger_df else None
        a, b = random.normal(0, 1, runs).tolist(), random.normal(effect, 1, runs).tolist()
        found += difference(a, b, ledger).p <= 0.05

    assert found / 3000 == pytest.approx(0.8, abs=0.04)


def test_no_effect_is_detectable_without_repeats_and_ledger():
    assert detectable(RunSpread(1.0, 5), 1, 3) is None
