"""effllm/job/health/slowest.py: the slowest rank of a window is named if it is really slow, and not by chance."""

import numpy as np
import pytest
from cases import cases, repeats
from synchronous_job import SynchronousJob

from effllm.job.health.slowest import Slowest
from effllm.records.job import Straggler

#: (ranks, iterations per window, jitter of an iteration)
JOBS = [(2, 10, 0.02), (3, 10, 0.03), (4, 10, 0.05), (8, 1, 0.02), (16, 10, 0.05), (64, 3, 0.03)]


def named(job, windows):
    """Return the rank named in each window, or None."""
    slowest = [one.slowest for one in job.run(windows).seen]
    return [None if one is None else one.rank for one in slowest]


def job_of(ranks, iterations, jitter, **changes):
    return SynchronousJob(ranks, iterations=iterations, jitter=jitter, **changes)


@cases(("ranks", "iterations", "jitter"), JOBS)
def test_rank_ten_percent_slower_is_named_in_95_percent_of_windows(ranks, iterations, jitter):
    slow = ranks // 2
    job = job_of(ranks, iterations, jitter, seed=ranks, slow=lambda rank, _: 1.1 if rank == slow else 1.0)

    found = named(job, 200)

    assert found.count(slow) >= 0.95 * len(found)
    assert set(found) <= {slow, None}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slow_rank_is_named_after_20_windows_of_one_iteration(ranks):
    slow = ranks // 2
    found = []
    for seed in range(4):
        job = job_of(ranks, 1, 0.03, seed=seed, slow=lambda rank, _: 1.1 if rank == slow else 1.0)
        found += named(job, 200)[19:]

    assert found.count(slow) >= 0.95 * len(found)
    assert set(found) <= {slow, None}


def test_recovered_rank_is_not_named_three_windows_later():
    slowest = Slowest()
    for _ in range(20):
        slowest.add([0, 1, 2], [0.5, 0.5, 0.7])
    after = [slowest.add([0, 1, 2], [0.5, 0.5, 0.51]) for _ in range(6)]

    assert after[2:] == [None] * 4


@cases(("ranks", "iterations", "jitter"), [*JOBS, (3, 1, 0.03), (4, 1, 0.03)])
def test_at_most_one_of_1000_healthy_windows_names_a_rank(ranks, iterations, jitter):
    found = [
        rank for seed in range(repeats(2, 10)) for rank in named(job_of(ranks, iterations, jitter, seed=seed), 100)
    ]

    assert len(found) - found.count(None) <= 1


def test_no_window_names_a_rank_without_own_times():
    job = SynchronousJob(4, has_sync_point=False, slow=lambda rank, _: 1.5 if rank == 2 else 1.0)

    assert named(job, 100) == [None] * 100


def test_rank_that_becomes_slow_is_named_after_three_windows():
    job = SynchronousJob(8, slow=lambda rank, window: 1.2 if rank == 5 and window > 20 else 1.0)

    assert named(job, 30) == [None] * 22 + [5] * 8


def test_ranks_that_wait_for_each_other_are_not_distinguished():
    # Tensor parallelism: own times include waiting, so rank 4 or rank 5 is the slower rank by chance.
    job = SynchronousJob(8, replica=lambda rank: f"{rank // 2}", slow=lambda rank, _: 1.2 if rank in (4, 5) else 1.0)

    assert named(job, 40) == [None] * 40


def test_pipeline_stages_of_unequal_work_are_not_compared():
    job = SynchronousJob(8, weight=lambda rank: 1.0 + rank // 4, group=lambda rank: f"stage {rank // 4}")

    assert named(job, 40) == [None] * 40


def test_no_rank_is_named_if_half_of_the_ranks_are_slow():
    slowest = Slowest()
    assert [slowest.add(range(4), [1.0, 1.0, 2.0, 2.0]) for _ in range(20)] == [None] * 20


def test_times_of_a_straggler_are_from_the_reported_window():
    slowest = Slowest()
    for _ in range(2):
        slowest.add([0, 1, 2], [0.5, 0.5, 0.6])

    assert slowest.add([0, 1, 2], [0.5, 0.5, 0.7]) == Straggler(2, 0.7, 0.5)


def test_slow_rank_is_named_if_each_window_lacks_a_different_rank():
    slowest = Slowest()
    values = {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.6}
    found = []
    for window in range(9):
        ranks = [rank for rank in values if rank != window % 3]
        found.append(slowest.add(ranks, [values[rank] for rank in ranks]))

    assert found[2:] == [Straggler(3, 0.6, 0.5)] * 7


def test_no_rank_is_named_if_an_own_time_is_zero():
    slowest = Slowest()

    assert [slowest.add([0, 1], [0.0, 1.0]) for _ in range(5)] == [None] * 5
    assert slowest.add([], np.array([])) is None
