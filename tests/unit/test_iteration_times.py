"""The times of iterations as 16-bit values: their error, their bounds, and the times of joined reports."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.records.iteration_times import (
    MAX_ERROR,
    MAX_ITERATIONS,
    MAX_JOINED,
    IterationTimes,
    codes_of,
    seconds_of_code,
)


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


def test_many_iterations_have_means():
    count = 2 * MAX_ITERATIONS + 1  # 2,730 means of 3 iterations, and one of 3
    times = IterationTimes.of([0.1 * (at + 1) for at in range(count)], [0.0] * (count - 1) + [0.3], [0.05] * count)

    assert (times.each, len(times)) == (3, count // 3)
    assert times.is_complete_for(count) and not times.is_complete_for(count - 3)
    assert decoded(times.steps)[:2] == pytest.approx([0.2, 0.5], rel=1e-3)
    assert (decoded(times.waits)[0], decoded(times.waits)[-1]) == (0.0, pytest.approx(0.1, rel=1e-3))
    assert decoded(times.own)[-1] == pytest.approx(0.05, rel=1e-3)


@given(st.lists(st.integers(1, 2 * MAX_ITERATIONS), min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_joined_reports_have_the_time_of_all_their_iterations(counts):
    parts = [(IterationTimes.of([0.001 * (at + 1)] * count, [], []), count) for at, count in enumerate(counts)]

    joined = IterationTimes.join(parts)

    assert joined.is_complete_for(sum(counts))
    rest = sum(counts) - joined.each * (len(joined) - 1)
    weights = [joined.each] * (len(joined) - 1) + [rest]
    whole_s = sum(weight * one for weight, one in zip(weights, decoded(joined.steps), strict=True))
    assert whole_s == pytest.approx(sum(0.001 * (at + 1) * count for at, count in enumerate(counts)), rel=1e-3)


def test_joined_reports_have_the_times_of_all_iterations():
    first = IterationTimes.of([0.1, 0.2], [0.0, 0.0], [0.05, 0.1])
    second = IterationTimes.of([0.3], [0.4], [0.2])

    joined = IterationTimes.join([(first, 2), (second, 1)])
    assert decoded(joined.steps) == pytest.approx([0.1, 0.2, 0.3], rel=1e-3)
    assert decoded(joined.waits) == pytest.approx([0.0, 0.0, 0.4], rel=1e-3)
    assert decoded(joined.own) == pytest.approx([0.05, 0.1, 0.2], rel=1e-3)
    assert IterationTimes.join([(first, 2), (IterationTimes.of([0.3], [0.4], []), 1)]).own == b""
    assert IterationTimes.join([(first, 2), (None, 1)]) is None, "a report without times"
    assert IterationTimes.join([(first, 2), (None, 0)]) == first, "a report without iterations"
    assert IterationTimes.join([(first, 2)] * (MAX_JOINED // 2 + 1)) is None
