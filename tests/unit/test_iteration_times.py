"""The times of iterations as 16-bit values: their error, their bounds, and the times of joined reports."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.records.iteration_times import MAX_ERROR, MAX_ITERATIONS, IterationTimes, codes_of, seconds_of_code


def decoded(codes):
    return [seconds_of_code(int.from_bytes(codes[at : at + 2], "little")) for at in range(0, len(codes), 2)]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_error_of_a_time_is_at_most_the_stated_one(times):
    assert MAX_ERROR < 0.0003
    for time, found in zip(times, decoded(codes_of(times)), strict=True):
        assert found == pytest.approx(time, rel=MAX_ERROR * 1.001)


@pytest.mark.parametrize(("time", "found"), [(0.0, 0.0), (9e-7, 0.0), (1e9, 1e6)])
def test_times_outside_the_range_have_its_bounds(time, found):
    assert decoded(codes_of([time])) == pytest.approx([found])


def test_waits_of_zero_and_incomplete_own_times_are_left_out():
    assert IterationTimes.of([0.1, 0.2], [0.0, 0.0], [0.05]) == IterationTimes(codes_of([0.1, 0.2]))
    assert IterationTimes.of([], [], []) is None
    assert IterationTimes.of([0.1] * (MAX_ITERATIONS + 1), [0.0] * (MAX_ITERATIONS + 1), []) is None


def test_joined_reports_have_the_times_of_all_iterations():
    first = IterationTimes.of([0.1, 0.2], [0.0, 0.0], [0.05, 0.1])
    second = IterationTimes.of([0.3], [0.4], [0.2])

    joined = IterationTimes.join([first, second], 3)
    assert decoded(joined.steps) == pytest.approx([0.1, 0.2, 0.3], rel=1e-3)
    assert decoded(joined.waits) == pytest.approx([0.0, 0.0, 0.4], rel=1e-3)
    assert decoded(joined.own) == pytest.approx([0.05, 0.1, 0.2], rel=1e-3)
    assert IterationTimes.join([first, IterationTimes.of([0.3], [0.4], [])], 3).own == b""
    assert IterationTimes.join([first, None], 3) is None, "a report without times"
    assert IterationTimes.join([first, None], 2) == first, "a report without iterations"
