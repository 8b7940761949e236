"""The difference between two sides of runs: Welch, Holm, the minimum detectable effect."""

import numpy as np
import pytest
from cases import repeats

from effllm.analysis.comparison import difference, holm_adjusted


def test_difference_is_welchs():
    found = difference([1.0, 2.0, 4.0], [3.0, 3.5, 9.0, 4.0])

    # Variances 7/3 and 7.7292 over 3 and 4 runs.
    assert found.estimate == pytest.approx(4.875 - 7 / 3)
    assert found.standard_error == pytest.approx((7 / 9 + 7.72917 / 4) ** 0.5, rel=1e-5)
    assert found.df == pytest.approx((7 / 9 + 1.9323) ** 2 / ((7 / 9) ** 2 / 2 + 1.9323**2 / 3), rel=1e-4)
    low, high = found.interval()
    assert (low + high) / 2 == pytest.approx(found.estimate)
    assert found.p > 0.05 and low < 0 < high


def test_a_side_without_repeats_gives_no_difference():
    assert difference([1.0], [2.0]) is None
    assert difference([1.0, 1.1], [2.0]) is None


def test_values_without_spread_differ_for_certain_or_not_at_all():
    assert difference([3.0, 3.0], [4.0, 4.0]).p == 0
    assert difference([3.0, 3.0], [3.0, 3.0]).p == 1


def test_holm_adjusts_the_smallest_first_and_never_reverses():
    assert holm_adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm_adjusted([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert holm_adjusted([]) == []


@pytest.mark.parametrize(("runs", "effect"), [(3, 3.52), (5, 2.10), (8, 1.52)])
def test_median_detectable_effect_is_what_80_percent_of_comparisons_find(runs, effect):
    """In standard deviations between runs; a difference of this size was found in 80 % of 200,000 simulated pairs."""
    random = np.random.default_rng(1)
    stated = [difference(*random.normal(0, 1, (2, runs))).detectable() for _ in range(repeats(300, 1000))]

    assert np.median(stated) == pytest.approx(effect, rel=0.15)
