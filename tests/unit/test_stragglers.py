"""effllm/job/health/stragglers.py and its imported modules, with a seeded model of synchronous training."""

import math
import re

import pytest
from cases import cases, repeats
from msgspec.structs import replace
from synchronous_job import COMMUNICATION_S, ITERATION_S, SynchronousJob, gpu_window, ranks_of

from effllm.job.health.straggler_reasons import (
    CLOCK,
    NO_REASON,
    THROTTLED,
    UNKNOWN,
    ComparedReadings,
    Reason,
    ranks_text,
)
from effllm.job.iteration_losses import IterationMatrix
from effllm.records.rank import Profile

#: Times of iterations are rounded to 16 bits, so a small difference of two of them has this error.
ROUNDING = 5e-3


def slowed(ranks, by=1.1, first=6, last=10**9):
    """Return a function of rank and window: the slowdown is `by` for these ranks from window `first` to `last`."""
    return lambda rank, window: by if rank in ranks and first <= window <= last else 1.0


# --- the three sentences -------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [4, 8, 64])
def test_only_a_rank_10_percent_slower_is_named_in_many_runs(ranks):
    jobs = [SynchronousJob(ranks, seed=seed, slow=slowed({ranks // 2})).run(24) for seed in range(repeats(6, 20))]

    assert [job.named_ranks for job in jobs] == [{ranks // 2}] * len(jobs)


def test_slow_rank_of_1024_is_named_within_110_iterations():
    job = SynchronousJob(1024, slow=slowed({17}), jitter=0.03).run(16)

    (verdict,) = job.stragglers.verdicts
    assert (verdict.ranks, verdict.peers, verdict.since_iteration) == ((17,), 1023, 51)
    assert verdict.slowdown == pytest.approx(0.1, abs=0.03)


def pipeline(has_groups=True, **changes):
    """Return a job with a light last stage; compared with it, all other stages would be slow."""
    groups = {"group": lambda rank: f"trainer stage {rank // 8}"} if has_groups else {}
    return SynchronousJob(32, weight=lambda rank: 0.4 if rank >= 24 else 1.0, **groups, **changes)


@cases("seed", range(5))
def test_no_rank_is_named_for_a_light_pipeline_stage(seed):
    assert pipeline(seed=seed).run(30).named_ranks == set()


def test_slow_rank_of_a_light_stage_is_named_among_its_peers():
    (verdict,) = pipeline(slow=slowed({30}, by=1.4)).run(20).stragglers.verdicts
    assert (verdict.ranks, verdict.peers) == ((30,), 7)


def test_no_rank_is_named_for_a_light_stage_without_groups():
    assert pipeline(has_groups=False).run(30).named_ranks == set()  # most ranks are equally slow, and near the median


@pytest.mark.parametrize(("ranks", "windows"), [(8, 40), (64, 20), pytest.param(1024, 12, marks=pytest.mark.long)])
def test_no_rank_is_named_for_noise_in_many_runs(ranks, windows):
    jobs = (SynchronousJob(ranks, seed=seed, jitter=0.01 + 0.02 * (seed % 2)) for seed in range(repeats(5, 50)))

    assert {rank for job in jobs for rank in job.run(windows).named_ranks} == set()


def test_no_rank_is_named_for_heavy_tailed_noise():
    jobs = [SynchronousJob(16, seed=seed, jitter=0.03, iterations=1, tail=0.02) for seed in range(repeats(10, 30))]

    assert [job.run(40).named_ranks for job in jobs] == [set()] * len(jobs)


# --- which ranks ---------------------------------------------------------------------------------------


def test_two_slow_ranks_are_both_named():
    job = SynchronousJob(8, slow=lambda rank, window: {2: 1.1, 5: 1.2}.get(rank, 1.0)).run(20)

    assert ranks_of(job.stragglers.verdicts) == [2, 5]
    slower, faster = job.stragglers.verdicts
    assert (slower.ranks, faster.ranks) == ((5,), (2,)), "the costliest first"


def test_ranks_of_a_slow_node_are_named_in_one_line():
    job = SynchronousJob(32, slow=slowed(set(range(8, 16)))).run(20)

    assert job.named_ranks == set(range(8, 16))
    (line,) = job.events("straggler")
    assert line.text.startswith("straggler: node node1 (all of its ranks: 8-15) 1")
    assert " % slower than its 24 peers since iteration 51, last in 100 % of the iterations: " in line.text


@pytest.mark.parametrize("ranks", [2, 4, 6, 16])
def test_half_of_a_group_is_named_if_it_is_slow(ranks):
    slow = set(range(ranks // 2, ranks))
    assert SynchronousJob(ranks, slow=slowed(slow)).run(30).named_ranks == slow


@cases(
    "job",
    [
        SynchronousJob(4, group=lambda rank: f"stage {rank}", slow=slowed({2}, 1.5)),  # a single rank of a group
        SynchronousJob(8, slow=slowed({3}, by=1.3, first=6, last=6)),  # slow in a single window
    ],
)
def test_rank_without_peers_or_slow_in_a_single_window_is_not_named(job):
    assert job.run(40).named_ranks == set()


def test_waits_for_slow_ranks_are_unknown_without_peers():
    alone = SynchronousJob(2, group=lambda rank: f"trainer stage {rank}").run(3)
    both = SynchronousJob(4, group=lambda rank: f"trainer stage {rank // 2}").run(3)

    assert {one.seconds for one in alone.seen} == {None}
    assert {one.seconds for one in both.seen} == {0.0}


def test_recovery_ends_the_verdict_and_keeps_its_cost():
    job = SynchronousJob(8, slow=slowed({3}, last=20)).run(40)

    assert [event.kind for event in job.events("straggler", "recovered")] == ["straggler", "recovered"]
    assert job.stragglers.verdicts == ()
    (total,) = job.totals
    assert total.ranks == (3,) and total.gpu_seconds > 0


@cases("every", [3, 5, 10])
def test_rank_that_is_slow_in_some_windows_is_named_for_its_mean_excess(every):
    job = SynchronousJob(8, slow=lambda rank, window: 1.0 + 0.1 * every * (rank == 3 and window % every == 0)).run(400)

    (verdict,) = job.stragglers.verdicts
    assert verdict.ranks == (3,)
    assert verdict.slowdown == pytest.approx(0.1, abs=0.05)


def test_slow_data_loader_is_named_by_its_waits():
    waits = {3: 0.08}
    job = SynchronousJob(8, has_sync_point=False, waits=lambda rank, window: waits.get(rank, 0.002)).run(20)

    (verdict,) = job.stragglers.verdicts
    assert (verdict.ranks, verdict.evidence) == ((3,), "data wait")
    assert verdict.slowdown == pytest.approx(0.08 / (ITERATION_S + 0.08 + COMMUNICATION_S), abs=0.03)
    (line,) = job.events("straggler")
    assert "makes its 7 peers wait for 1" in line.text and " ms per iteration, peers 2." in line.text


def test_rank_is_not_named_if_its_waits_delay_no_other_rank():
    # Only the iterations of the rank with data waits are longer, so the ranks do not train together.
    job = SynchronousJob(8)
    for _ in range(12):
        job.close([replace(row, wait_s=2.0) if row.rank == 3 else row for row in job.rows()])

    assert job.named_ranks == set()


def test_ranks_that_wait_for_each_other_are_named_together():
    # Eight replicas of two ranks: with tensor parallelism both ranks of a replica take as long as the slower rank.
    ranks = {"replica": lambda rank: f"replica {rank // 2}", "group": lambda rank: f"tensor {rank % 2}"}
    job = SynchronousJob(16, slow=slowed({6, 7}), **ranks).run(20)

    (verdict,) = job.stragglers.verdicts
    assert verdict.ranks == (6, 7)
    (line,) = job.events("straggler")
    assert line.text.startswith("straggler: one of ranks 6-7, which wait for each other (node node0), 1")
    assert line.rank is None


# --- reasons ---------------------------------------------------------------------------------------


def hot(rank, window, wall_s):
    if rank == 17 and window >= 6:
        return gpu_window(rank, wall_s, clock_hz=1.1e9, celsius=88.0, throttled={"sw_thermal": 0.9, "any": 0.9})
    return gpu_window(rank, wall_s)


def test_line_of_a_straggler_has_rank_start_reason_and_cost():
    job = SynchronousJob(64, slow=slowed({17}), device=hot, tail=0.0).run(20)

    (line,) = job.events("straggler")
    assert line.rank == 17
    assert re.match(r"straggler: rank 17 \(node node2, GPU-17\) \d+\.\d % slower", line.text)
    assert (
        " % slower than its 63 peers since iteration 51, last in 100 % of the iterations: "
        "SM clock 1.10 GHz against 1.70, thermal slowdown, " in line.text
    )
    assert "88 degC against 65; cost " in line.text and " GPU-s, " in line.text


WALL_S = 10.0
PEERS = [gpu_window(rank, WALL_S) for rank in range(1, 8)]


def explain(own, peers, node=(), slowdown=0.0):
    """Return the reason from one window."""
    readings = ComparedReadings()
    readings.add_windows(own, peers, node)
    return readings.reason(slowdown=slowdown)


@cases(
    ("own", "why"),
    [
        ({"clock_hz": 1.1e9}, "SM clock 1.10 GHz against 1.70"),
        ({"throttled": {"power_cap": 0.5}}, "power cap"),
        ({"throttled": {"hw_thermal": 0.2}, "celsius": 90.0}, "thermal slowdown by hardware, 90 degC against 65"),
        ({"throttled": {"vr_thermal": 0.2}}, "vr thermal"),
        ({"utilization": 0.8}, "slow host: the GPU is busy 80 % of the time, GPUs of peers 100 %"),
        ({"celsius": 90.0}, UNKNOWN),
        ({"throttled": {"power_cap": 0.05}}, UNKNOWN),
        ({"watts": 300.0}, UNKNOWN),
        ({}, UNKNOWN),
    ],
)
def test_reading_that_differs_from_the_peers_is_the_reason(own, why):
    assert explain(gpu_window(0, WALL_S, **own), PEERS).text == why


def wavy(rank, window, wall_s):
    """Clocks that swing by 6 % with a period of 20 windows; the phases of the ranks are different."""
    return gpu_window(rank, wall_s, clock_hz=1.7e9 * (1 + 0.06 * math.sin(2 * math.pi * (window / 20 + rank / 8))))


def low_on_rank_1(rank, window, wall_s):
    found = wavy(rank, window, wall_s)
    if rank == 1:
        clock = found.gauges["sm_clock_hz"]
        found.gauges["sm_clock_hz"] = replace(clock, value_seconds=0.9 * clock.value_seconds)
    return found


@pytest.mark.parametrize(("device", "by", "is_throttled"), [(wavy, 1.1, False), (low_on_rank_1, 1 / 0.9, True)])
def test_slow_rank_is_throttled_only_by_a_low_clock_despite_swinging_clocks(device, by, is_throttled):
    for seed in range(repeats(6, 20)):
        rank = 1 if is_throttled else seed % 4
        job = SynchronousJob(4, seed=seed, slow=slowed({rank}, by, first=1 + seed), device=device).run(45 + seed)

        (verdict,) = job.totals
        assert (CLOCK in verdict.differences) == is_throttled, (seed, verdict)


def test_reason_of_one_window_is_forgotten():
    """A clocks event reason is active in the first of many windows."""

    def device(rank, window, wall_s):
        return gpu_window(rank, wall_s, throttled={"power_cap": float(rank == 1 and window <= 5)})

    job = SynchronousJob(8, slow=slowed({1}, first=1), device=device)

    assert job.run(5).totals[0].differences == (THROTTLED,)
    assert job.run(55).totals[0].differences == ()


def test_reading_shared_with_the_peers_is_not_a_reason():
    capped = [gpu_window(rank, WALL_S, throttled={"power_cap": 0.5}) for rank in range(1, 8)]

    assert explain(gpu_window(0, WALL_S, throttled={"power_cap": 0.55}), capped) == NO_REASON


def test_reason_of_a_slow_rank_includes_its_slow_node():
    node = [gpu_window(rank, WALL_S, clock_hz=1.2e9) for rank in (8, 9)]

    assert explain(gpu_window(0, WALL_S, clock_hz=1.1e9), PEERS, node) == Reason(
        "SM clock 1.10 GHz against 1.70 (also low on other GPUs of the node)", (CLOCK,)
    )


@pytest.mark.parametrize(("clock_hz", "kinds"), [(1.6e9, ()), (1.45e9, (CLOCK,))])
def test_small_difference_of_clocks_is_not_the_kind_of_a_large_slowdown(clock_hz, kinds):
    """A slowdown of 30 % at a clock that is 6 % or 17 % lower; the text has the clocks in both cases."""
    found = explain(gpu_window(0, WALL_S, clock_hz=clock_hz), PEERS, slowdown=0.3)

    assert (found.kinds, found.text[:8]) == (kinds, "SM clock")


def test_reason_is_unknown_without_readings():
    assert explain(gpu_window(0, WALL_S), []) == ComparedReadings().reason() == NO_REASON


# --- costs --------------------------------------------------------------------------------


def test_cost_is_time_and_energy_of_the_waiting_ranks():
    watts = {"device": lambda rank, _, s: gpu_window(rank, s, watts=300.0)}
    steady = SynchronousJob(8, jitter=0.0, tail=0.0, slow=slowed({3}, 1.2, first=1), **watts).run(10)

    # In each of the window's ten iterations, the rank takes 0.1 s more than the median: seven ranks wait for 1 s.
    assert steady.seen[-1].seconds == pytest.approx(1.0, rel=ROUNDING)
    assert steady.seen[-1].rank_seconds == pytest.approx(7.0, rel=ROUNDING)
    assert steady.seen[-1].joules == pytest.approx(2100.0, rel=ROUNDING)
    (total,) = steady.totals
    assert total.gpu_seconds == pytest.approx(70.0, rel=ROUNDING), "with the cost before it was named"
    assert total.joules == pytest.approx(21_000.0, rel=ROUNDING)
    by_window = {}
    for lost in (lost for seen in steady.seen for lost in seen.lost):
        known = by_window.get(lost.window, (0.0, 0.0))
        by_window[lost.window] = known[0] + lost.straggling_s, known[1] + lost.uneven_s
    whole = pytest.approx(8.0, rel=ROUNDING), pytest.approx(0.0, abs=0.1)
    assert by_window == dict.fromkeys(range(1, 11), whole), "of all ranks, also before the rank was named"


@pytest.mark.parametrize("profiled_s, named", [(0.6, {3}), (1.0, set())])
def test_profiles_of_long_iterations_name_no_rank(profiled_s, named):
    """A rank may be slow with the period of the profiles: then its mean excess is much smaller."""
    job = SynchronousJob(8, has_sync_point=False)
    for _ in range(20):
        exposed = {rank: 0.0 if rank == 3 else 0.45 * profiled_s for rank in range(8)}
        job.close([replace(row, profile=Profile(1, profiled_s, exposed_s=exposed[row.rank])) for row in job.rows()])

    assert job.named_ranks == named


def uneven_profiles(job, slow=()):
    """Profile an iteration of 1 s in each of 20 windows; a rank in turn takes 0.3 s longer, these ranks always."""
    for window in range(20):
        longer = {rank: 0.3 * (rank in slow or rank == window % 4) for rank in range(job.ranks)}
        exposed = {rank: max(longer.values()) - one for rank, one in longer.items()}
        rows = [replace(row, profile=Profile(1, 1.0, exposed_s=exposed[row.rank])) for row in job.rows()]
        job.close(rows)
    return job.stragglers.waits.last_ranks


def test_waits_of_the_ranks_for_each_other_are_counted_in_profiles():
    """In each of 20 iterations of 1 s, 7 of 8 ranks wait for 0.3 s."""
    last = uneven_profiles(SynchronousJob(8, has_sync_point=False))

    assert (last.profiled_s, last.profiled_uneven_s) == (20 * 8, pytest.approx(20 * 7 * 0.3))


def test_waits_in_long_profiled_iterations_are_not_counted():
    job = SynchronousJob(4, has_sync_point=False)
    rows = [replace(row, profile=Profile(1, 5.0, exposed_s=4.0 * (row.rank > 0))) for row in job.rows()]
    job.close(rows)
    job.run(3)

    assert job.stragglers.waits.last_ranks.profiled_s == 0.0


def test_one_unusual_profile_does_not_raise_the_cost():
    job = SynchronousJob(8, jitter=0.0, tail=0.0, slow=slowed({3}, 1.2, first=1)).run(10)
    rows = [replace(row, profile=Profile(1, 0.5 + 2.0 * (row.rank == 3))) for row in job.rows()]

    assert job.close(rows).seconds == pytest.approx(1.0, rel=ROUNDING)


def test_waits_of_windows_are_judged_later_if_the_next_window_has_no_times():
    job, events = SynchronousJob(8, jitter=0.0, tail=0.0, slow=slowed({3}, 1.2, first=1)), []
    for window in range(20):
        matrix = IterationMatrix.of(job.rows())
        job.stragglers.judge_window(matrix.rows, matrix)
        rows = [replace(row, times=None) for row in job.rows()]
        found = job.stragglers.judge_window(rows, None, job.losses.add_window(matrix))
        events += [one.window for one in found.lost if window > 10]

    assert set(range(23, 41, 2)) <= set(events)


def test_two_stragglers_share_the_waited_time():
    job = SynchronousJob(8, jitter=0.0, tail=0.0, slow=lambda rank, _: {2: 1.1, 5: 1.3}.get(rank, 1.0)).run(30)

    # The slower rank takes 0.15 s more in each of ten iterations: six ranks wait for 1.5 s. The two stragglers share
    # this cost in the ratio 0.05 : 0.15.
    assert job.seen[-1].seconds == pytest.approx(1.5, rel=ROUNDING)
    assert job.seen[-1].rank_seconds == pytest.approx(9.0, rel=ROUNDING)
    before = {verdict.ranks: verdict.gpu_seconds for verdict in job.stragglers.verdicts}
    job.run(1)
    after = {verdict.ranks: verdict.gpu_seconds for verdict in job.stragglers.verdicts}
    assert after[5,] - before[5,] == pytest.approx(6.75, rel=ROUNDING)
    assert after[2,] - before[2,] == pytest.approx(2.25, rel=ROUNDING)


def test_cost_in_joules_is_none_with_an_energy_gap():
    def device(rank, window, wall_s):
        return gpu_window(rank if rank != 1 else 99, wall_s)  # the device of rank 1 is not read

    job = SynchronousJob(8, slow=slowed({3}), device=device).run(20)

    (total,) = job.totals
    assert total.joules is None and total.gpu_seconds > 0


def test_cost_is_zero_without_stragglers_and_none_without_own_times():
    assert SynchronousJob(8).run(3).seen[-1][:2] == (0.0, 0.0)
    assert SynchronousJob(8, has_sync_point=False).run(3).seen[-1].seconds is None


# --- the arithmetic below ----------------------------------------------------------------------------


def test_ranks_are_written_as_ranges():
    assert ranks_text((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
