"""effllm/job/health/comparison.py: slow ranks are named, healthy ranks are not, on many jobs with random times."""

import numpy as np
import pytest
from cases import cases, repeats
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from effllm.job.health.comparison import BLOCK_S, NUM_BLOCKS, SLOW, RankComparison, deviations, medians_of_others

WINDOW, ITERATION_S = 10, 0.3


def named(seed, ranks, sigma, slow=lambda rank, iteration: 0.0, iterations=600, drift=0.0, lasts=50):
    """Return when each rank was named in a job, by number of iterations.

    Args:
        seed: of the random times.
        ranks: number of ranks.
        sigma: standard deviation of log-normal own times.
        slow: relative excess of a rank in an iteration.
        iterations: number of iterations.
        drift: standard deviation of the loads of ranks, which change within ``lasts`` iterations.
        lasts: see ``drift``.
    """
    chance, comparison, found = np.random.default_rng(seed), RankComparison(), {}
    load, keep = np.zeros(ranks), np.exp(-1 / lasts)
    for first in range(0, iterations, WINDOW):
        own = np.empty((ranks, WINDOW))
        for at in range(WINDOW):
            load = keep * load + drift * np.sqrt(1 - keep**2) * chance.standard_normal(ranks)
            own[:, at] = ITERATION_S * np.exp(sigma * chance.standard_normal(ranks) - sigma**2 / 2 + load)
            own[:, at] *= [1 + slow(rank, first + at) for rank in range(ranks)]
        whole_s = own.max(axis=0) + 0.05
        for one in comparison.add_times(list(range(ranks)), own, np.ones(WINDOW), whole_s, first + 1):
            found.setdefault(one.rank, first + WINDOW)
    return found


@cases("sigma", [0.03, 0.1, 0.3, 0.5])
@cases("ranks", [2, 3, 4, 8, 64])
def test_no_rank_is_named_in_healthy_jobs(ranks, sigma):
    for seed in range(repeats(2, 20)):
        assert named(seed, ranks, sigma) == {}, seed


@cases("lasts", [10, 50, 300])
def test_no_rank_is_named_for_loads_that_drift(lasts):
    for seed in range(repeats(3, 20)):
        assert named(seed, 4, 0.03, drift=0.01, lasts=lasts, iterations=2000) == {}, (seed, lasts)


@cases("ranks", [2, 4, 8, 64])
@cases(("more", "every", "within"), [(0.12, 1, 120), (0.36, 3, 120), (0.3, 1, 60)])
def test_slow_rank_is_named_for_its_mean_excess(ranks, more, every, within):
    found = named(ranks, ranks, 0.02, lambda rank, at: more * (rank == 1 and at % every == 0))

    assert list(found) == [1] and found[1] <= within


@cases(("ranks", "spells"), [(2, 13), (4, 8), (8, 6), (64, 4)])
def test_rank_is_named_that_is_slow_again_and_again(ranks, spells):
    found = named(ranks, ranks, 0.05, lambda rank, at: 0.4 * (rank == 1 and at % 60 < 20), iterations=60 * spells)

    assert list(found) == [1] and found[1] > 60 * (spells - 3)


@cases("ranks", [8, 64])
def test_no_rank_is_named_if_other_ranks_are_slow_in_turn(ranks):
    for seed in range(repeats(3, 20)):
        turns = np.random.default_rng(seed).integers(0, ranks, 400)
        in_turn = lambda rank, at, turns=turns: 0.4 * (rank == turns[at // 5])  # noqa: E731
        assert named(seed, ranks, 0.05, in_turn, iterations=2000) == {}


def test_no_rank_is_named_for_a_small_cost():
    assert named(0, 8, 0.02, lambda rank, at: 0.4 * (rank == 1 and at % 200 < 20), iterations=4000) == {}
    assert named(0, 8, 0.01, lambda rank, at: 0.8 * SLOW * (rank == 3), iterations=2000) == {}


@pytest.mark.parametrize("ranks", [4, 6])
def test_half_of_the_ranks_is_named_if_it_is_slow(ranks):
    assert set(named(1, ranks, 0.02, lambda rank, at: 0.15 * (rank < ranks // 2))) == set(range(ranks // 2))


def test_rank_is_named_that_becomes_slow():
    found = named(0, 8, 0.05, lambda rank, at: 0.15 * (rank == 3 and at >= 300))

    assert list(found) == [3] and 330 <= found[3] <= 450


def compared(comparison, at, own, ranks=None, whole_s=0.7, weight=1.0):
    """Add a window with these own times of ranks; return the slow ranks."""
    count = own.shape[1]
    ranks = list(range(len(own))) if ranks is None else ranks
    return comparison.add_times(
        ranks, own, np.full(count, weight), np.full(count, whole_s), count * int(weight) * at + 1
    )


def test_blocks_of_short_iterations_last_a_quarter_of_a_second():
    comparison, times = RankComparison(), np.array([[0.001] * 100, [0.0015] * 100])
    found = [bool(compared(comparison, at, times, whole_s=0.002)) for at in range(40)]

    assert NUM_BLOCKS[0] * BLOCK_S / 0.002 == 750
    assert found.index(True) + 1 == 8


def test_means_of_windows_are_blocks_too():
    comparison = RankComparison()
    for at in range(6):
        found = compared(comparison, at, np.array([[0.5], [0.6]]), [4, 7], weight=10.0)

    (slow,) = found
    assert (slow.rank, slow.since) == (7, 1)
    assert (slow.excess_s, slow.peers_s) == (pytest.approx(0.1), pytest.approx(0.5))


def test_rank_that_is_missing_in_some_windows_is_still_compared():
    comparison, found = RankComparison(), []
    for at in range(30):
        ranks = [0, 1, 2, 3] if at % 4 else [0, 1, 3]
        found += compared(comparison, at, np.array([[0.5 + 0.1 * (rank == 1)] * WINDOW for rank in ranks]), ranks)

    assert {one.rank for one in found} == {1}


def test_rank_has_recovered_and_is_not_named_again_for_its_past():
    comparison, times = RankComparison(), np.full((4, WINDOW), 0.5)
    times[2] += 0.1
    for at in range(20):
        found = compared(comparison, at, times)
    (slow,) = found
    assert not comparison.has_recovered(2, slow.level)
    times[2] -= 0.1
    for at in range(20, 32):
        compared(comparison, at, times)
    assert comparison.has_recovered(2, slow.level)
    comparison.forget((2,))

    assert [compared(comparison, at, times) for at in range(32, 60)] == [[]] * 28


@given(arrays(np.float64, st.tuples(st.integers(2, 9), st.integers(1, 3)), elements=st.floats(0, 100)))
def test_median_of_others_leaves_out_the_value_itself(values):
    found = medians_of_others(values)

    for at in range(len(values)):
        assert found[at] == pytest.approx(np.median(np.delete(values, at, axis=0), axis=0))


def test_deviations_of_few_blocks_have_the_tail_of_a_normal_value():
    """Student's t of 5 degrees of freedom exceeds 9.68 with a probability of 10^-4, and a normal value exceeds 3.72."""
    blocks = np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    error = blocks.std(ddof=1) / np.sqrt(6)

    assert deviations(9.68 * error, blocks) == pytest.approx(3.72, rel=0.02)
    assert deviations(0.5, np.full(6, 0.5)) == np.inf
    assert deviations(-0.1, blocks) == 0.0
