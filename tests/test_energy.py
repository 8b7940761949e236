"""effllm/energy.py: joules between two samples, and the share of them that falls into a window."""

from itertools import pairwise

import pytest
from builders import NS
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.energy import joules_between, share_of
from effllm.schema import Sample

GAP_NS = 5 * NS
WATTS = st.integers(0, 1_000_000).map(lambda milliwatts: milliwatts / 1000)  # as sensors give them


def sample(at_s, power_w=None, energy_j=None):
    return Sample(int(at_s * NS), power_w=power_w, energy_j=energy_j)


def test_a_counter_is_believed_before_power():
    # Power says (100 + 300) / 2 * 2 s = 400 J, the counter 390 J.
    assert joules_between(sample(0, 100.0, 1000.0), sample(2, 300.0, 1390.0), GAP_NS) == 390.0


def test_a_counters_step_is_exact_however_long_the_gap():
    assert joules_between(sample(0, None, 10.0), sample(3600, None, 5000.0), GAP_NS) == 4990.0


def test_power_is_a_trapezoid():
    assert joules_between(sample(0, 100.0), sample(2, 300.0), GAP_NS) == pytest.approx(400.0)


def test_power_over_a_long_gap_is_not_measured():
    assert joules_between(sample(0, 100.0), sample(5, 300.0), GAP_NS) == pytest.approx(1000.0)
    assert joules_between(sample(0, 100.0), sample(5.001, 300.0), GAP_NS) is None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (sample(0), sample(1)),
        (sample(0, 100.0), sample(1)),
        (sample(0), sample(1, 100.0)),
        (sample(0, None, 5.0), sample(1, 100.0)),
        (sample(0, 100.0), sample(1, None, 5.0)),
    ],
)
def test_where_a_reading_failed_nothing_is_measured(first, second):
    assert joules_between(first, second, GAP_NS) is None


def test_a_counter_that_goes_back_is_not_believed():
    assert joules_between(sample(0, None, 500.0), sample(1, None, 10.0), GAP_NS) is None
    # ... and power, where there is some, stands in for it.
    assert joules_between(sample(0, 100.0, 500.0), sample(1, 200.0, 10.0), GAP_NS) == 150.0


def test_a_counter_that_stands_still_is_a_measurement_of_nothing():
    assert joules_between(sample(0, None, 500.0), sample(1, None, 500.0), GAP_NS) == 0.0


def test_the_share_of_rising_power_lies_under_the_line():
    # 0 W to 200 W in 2 s: 200 J, of which the first second has 1 * (0 + 100) / 2 = 50 J.
    first, second = sample(0, 0.0), sample(2, 200.0)

    assert share_of(first, second, 0, NS, 200.0) == pytest.approx(50.0)
    assert share_of(first, second, NS, 2 * NS, 200.0) == pytest.approx(150.0)


def test_the_line_is_scaled_to_the_counters_step():
    # The same, but the counter says 100 J: half of everything.
    assert share_of(sample(0, 0.0, 0.0), sample(2, 200.0, 100.0), 0, NS, 100.0) == pytest.approx(25.0)


def test_without_power_the_share_is_that_of_the_time():
    assert share_of(sample(0, None, 0.0), sample(4, None, 100.0), NS, 2 * NS, 100.0) == pytest.approx(25.0)
    assert share_of(sample(0, 0.0, 0.0), sample(4, 0.0, 100.0), NS, 2 * NS, 100.0) == pytest.approx(25.0)


@settings(deadline=None, max_examples=100)
@given(
    watts=st.tuples(WATTS, WATTS) | st.none(),
    cuts=st.lists(st.integers(1, 2 * NS - 1), max_size=5),
    joules=st.floats(0, 1e6),
)
def test_shares_add_up_to_the_whole_and_none_is_negative(watts, cuts, joules):
    first, second = (sample(0, watts[0]), sample(2, watts[1])) if watts else (sample(0), sample(2))
    edges = [0, *sorted(set(cuts)), 2 * NS]

    shares = [share_of(first, second, a, b, joules) for a, b in pairwise(edges)]

    assert sum(shares) == pytest.approx(joules, rel=1e-9, abs=1e-9)
    assert min(shares) >= 0.0
