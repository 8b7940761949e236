"""Stragglers in groups of two ranks: the difference of the ranks against its own scatter over windows."""

import re

import numpy as np
import pytest
from cases import cases, repeats
from synchronous_job import SynchronousJob

from effllm.job.health.outliers import KNOWN, PAIR, PairScatter
from effllm.records.job import DATA_WAIT

Z = 5.0


def slow_from(window, by, rank=1):
    return lambda one, now: by if one == rank and now >= window else 1.0


@cases(
    "changes",
    [
        {"jitter": 0.02},
        {"jitter": 0.05, "tail": 0.05},
        {"jitter": 0.1, "iterations": 1},
        {"jitter": 0.03, "iterations": 1, "tail": 0.1},
    ],
)
def test_no_rank_of_two_is_named_for_noise_in_many_jobs(changes):
    named = [SynchronousJob(2, seed=seed, **changes).run(60).named_ranks for seed in range(repeats(4, 100))]

    assert named == [set()] * len(named)


def test_no_rank_of_two_is_named_for_drifting_load_in_many_jobs():
    """The load of each rank's core wanders by 2 %, and is alike for ten windows; both cores share a load of 30 %."""

    def named(seed):
        luck, steps = np.random.default_rng(seed), [np.zeros(2)]
        for _ in range(60):
            steps.append(0.9 * steps[-1] + 0.02 * np.sqrt(1 - 0.9**2) * luck.standard_normal(2))
        shared = 1 + 0.3 * np.sin(np.arange(61) / 7 + seed)
        return (
            SynchronousJob(2, seed=seed, slow=lambda rank, at: shared[at] * (1 + steps[at][rank])).run(60).named_ranks
        )

    assert {rank for seed in range(repeats(4, 100)) for rank in named(seed)} == set()


def test_no_rank_of_two_is_named_for_unequal_first_windows():
    """Rank 0 compiles: its first three windows take five times, twice and 1.3 times as long."""
    first = {1: 5.0, 2: 2.0, 3: 1.3}
    jobs = (
        SynchronousJob(2, seed=seed, slow=lambda rank, now: first.get(now, 1.0) if rank == 0 else 1.0)
        for seed in range(repeats(4, 100))
    )

    assert {rank for job in jobs for rank in job.run(60).named_ranks} == set()


def test_no_rank_of_two_is_named_for_data_waits_of_both():
    """Each rank waits for data by turns, for a random time."""
    luck = np.random.default_rng(0)
    jobs = (
        SynchronousJob(2, seed=seed, waits=lambda rank, now: luck.exponential(0.1)) for seed in range(repeats(4, 100))
    )

    assert {rank for job in jobs for rank in job.run(60).named_ranks} == set()


@pytest.mark.parametrize(("first", "by"), [(1, 1.1), (40, 1.15)])
def test_rank_of_two_that_is_slower_by_some_percent_is_named(first, by):
    jobs = [SynchronousJob(2, seed=seed, slow=slow_from(first, by)).run(70) for seed in range(repeats(4, 10))]

    assert [job.named_ranks for job in jobs] == [{1}] * len(jobs)


def test_much_slower_rank_of_two_is_named_after_few_windows():
    assert SynchronousJob(2, slow=slow_from(1, 1.3)).run(8).named_ranks == {1}
    assert SynchronousJob(2, slow=slow_from(1, 1.1)).run(8).named_ranks == set()


def test_rank_of_two_is_named_by_its_data_waits():
    job = SynchronousJob(2, has_sync_point=False, waits=lambda rank, now: 0.2 if rank == 1 else 0.003).run(8)

    (verdict,) = job.stragglers.verdicts
    assert (verdict.ranks, verdict.evidence) == ((1,), DATA_WAIT)
    (line,) = job.events("straggler")
    assert "rank 1 (node node0, GPU-1) makes its peer wait for " in line.text
    assert re.fullmatch(r"data wait (19|20)\d\.\d ms per iteration, its peer (2|3)\.\d ms", verdict.why)


def test_data_wait_of_a_straggler_is_its_own_time():
    """Of two ranks, the time by which one rank is later is the time for which the other rank waits."""
    job = SynchronousJob(2, has_sync_point=False, waits=lambda rank, now: 0.2 if rank == 1 else 0.0).run(8)

    (verdict,) = job.stragglers.totals()
    assert verdict.own_seconds == pytest.approx(verdict.gpu_seconds) != 0.0


def test_deviation_of_a_pair_is_the_scatter_of_its_difference():
    """Differences of +3 % and -3 % by turns change by 6 %, which is 1.4826 * 6 % / sqrt(2) = 6.3 %."""
    scatter = PairScatter(1000)
    found = [scatter.add((0, 1), 0.03 * (-1) ** window, Z) for window in range(999)]

    assert found[0] == PAIR / Z
    assert found[-1] == pytest.approx(0.0629, rel=0.01)


def test_noisy_rank_that_is_always_slower_is_an_outlier():
    """The differences are 50 % and 150 % by turns, so their scatter is large; but one rank is slower in each window."""
    scatter = PairScatter(50)
    found = [scatter.add((0, 1), 1.0 + 0.5 * (-1) ** window, Z) for window in range(KNOWN)]

    assert found[-2] > 1.0
    assert found[-1] == PAIR / Z


def test_another_rank_in_a_pair_begins_a_new_scatter():
    scatter = PairScatter(50)
    for window in range(KNOWN):
        scatter.add((0, 1), 0.5 * (-1) ** window, Z)

    assert scatter.add((0, 2), 0.1, Z) == PAIR / Z
