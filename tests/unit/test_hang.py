"""effllm/job/health/hang.py: stalls of a job, and no false alarms; time is an argument."""

from typing import Any

import pytest
from builders import hello, row
from hypothesis import given
from hypothesis import strategies as st

from effllm.job.health.hang import BETWEEN, FINISHED, STARTUP, STEP, WAITING, Hang, Resumed, Stall
from effllm.job.health.stalls import PositionNames, stall_text
from effllm.records.wire import Heartbeat


class Job:
    """Ranks with heartbeats chosen by the test; checks are as frequent as in the aggregator."""

    def __init__(self, ranks: int = 4, at_s: float = 0.0, earlier_iteration_s: float = 0.0, **changes: Any) -> None:
        """Let ranks join; `changes` are of their HELLOs."""
        self.hang = Hang(30.0, earlier_iteration_s=earlier_iteration_s)
        self.lost: set[int] = set()
        for rank in range(ranks):
            self.hang.join(hello(rank, ranks, **changes), is_new=True, now_s=at_s)

    def heartbeat(self, rank: int, ordinal: int, state: str, since_s: float, now_s: float, **changes: Any) -> None:
        self.hang.heartbeat(Heartbeat(f"agent-{rank}", rank, ordinal, state, since_s, **changes), now_s)

    def all_heartbeat(self, *position: Any, ranks=range(4), **changes: Any) -> None:
        for rank in ranks:
            self.heartbeat(rank, *position, **changes)

    def run(self, until_s: float, second_per_iteration: float = 1.0) -> None:
        """Let all ranks iterate until `until_s`, with a heartbeat every five seconds."""
        for now_s in range(5, int(until_s) + 1, 5):
            ordinal = int(now_s / second_per_iteration) + 1
            self.all_heartbeat(ordinal, STEP, now_s % second_per_iteration, now_s, ranks=self.hang.ranks)
            assert self.check(now_s) == []

    def check(self, now_s: float):
        return self.hang.take_verdicts(now_s, self.lost)

    def reported(
        self, from_s: float, until_s: float, positions: dict[int, tuple[int, str, float]]
    ) -> list[tuple[float, Any]]:
        """Keep the ranks at these positions, with a heartbeat every five seconds; return (time, verdict) pairs."""
        found = []
        now_s = from_s
        while now_s <= until_s:
            if now_s % 5 == 0:
                for rank, (ordinal, state, since_s) in positions.items():
                    if rank not in self.lost:
                        self.heartbeat(rank, ordinal, state, now_s - since_s, now_s)
            found += [(now_s, one) for one in self.check(now_s)]
            now_s += 0.5
        return found


def ranks_of(stall: Stall) -> list[list[int]]:
    return [list(group) for _, group in stall.groups]


def test_job_that_makes_progress_has_no_stall():
    Job().run(600)


def test_stall_is_reported_once_with_the_rank_behind_listed_first():
    job = Job()
    job.run(100)
    reported = job.reported(
        105, 300, {0: (101, STEP, 100), 1: (101, STEP, 100), 2: (100, BETWEEN, 102), 3: (101, STEP, 100)}
    )

    ((when_s, stall),) = reported
    assert 132 <= when_s <= 142  # the timeout ends at 102 s + 30 s; a heartbeat and a check follow within 10 s
    assert ranks_of(stall) == [[2], [0, 1, 3]]
    assert stall.unmoved_s == pytest.approx(when_s - 102)  # time since the last progress of any rank


def test_stall_timeout_is_at_least_three_median_iterations():
    job = Job()
    for window in (1, 2, 3):
        for rank in range(4):
            job.hang.row(row(rank, window, busy_s=190.0, wait_s=10.0), 200.0 * window)  # 20 s an iteration
    reported = job.reported(605, 720, dict.fromkeys(range(4), (31, STEP, 600)))

    assert [660 <= when_s <= 670 for when_s, _ in reported] == [True]


def test_heartbeats_give_the_iteration_time_before_the_first_window():
    job = Job()
    for now_s, ordinal in ((20, 1), (40, 2), (60, 3), (80, 4)):  # three iterations of 20 s are a minute
        job.all_heartbeat(ordinal, STEP, 0.0, now_s)
        job.check(now_s)
    reported = job.reported(85, 200, dict.fromkeys(range(4), (4, STEP, 80)))

    assert [140 <= when_s <= 150 for when_s, _ in reported] == [True]


def test_stall_timeout_of_iteration_2_follows_from_iteration_1():
    job = Job(ranks=1)
    job.heartbeat(0, 1, STEP, 0.0, 20)
    reported = [job.check(20)]
    for now_s in range(25, 80, 5):
        job.heartbeat(0, 1, STEP, now_s - 20.0, now_s)
        reported += [job.check(now_s)]
    assert not any(reported)

    assert [260 <= when_s <= 270 for when_s, _ in job.reported(80, 300, {0: (2, STEP, 80)})] == [True]  # 3 x 60 s


@pytest.mark.parametrize(("earlier_iteration_s", "unmoved_s"), [(0.0, [pytest.approx(600.5)]), (300.0, [])])
def test_new_aggregator_finds_a_stall_by_heartbeats_and_the_saved_iteration_time(earlier_iteration_s, unmoved_s):
    job = Job(ranks=1, at_s=1000, earlier_iteration_s=earlier_iteration_s)
    job.heartbeat(0, 71, STEP, 600.0, 1000.5)

    assert [stall.unmoved_s for stall in job.check(1001)] == unmoved_s


def test_end_of_a_stall_is_reported_with_its_duration():
    job = Job()
    job.run(100)
    job.reported(105, 510, dict.fromkeys(range(4), (101, STEP, 100)))
    assert job.hang.total_s(510) == pytest.approx(410), "it is counted while it lasts"
    job.heartbeat(1, 102, STEP, 1.0, 513)

    assert job.check(513) == [Resumed(412.0)]
    assert job.hang.total_s(600) == 412.0
    assert job.hang.since_s is None


@pytest.mark.parametrize(("name", "phase_s", "allowed_s"), [("checkpoint", 0, 600), ("evaluation", 120, 1200)])
def test_phase_may_take_10_minutes_or_10_times_the_longest_phase(name, phase_s, allowed_s):
    job = Job()
    for rank in range(4):
        job.hang.row(row(rank, 1, phases_s={name: phase_s}), 90)
    job.run(100)
    # Rank 0 is in the phase; the other ranks wait for rank 0.
    positions = {0: (101, name, 100)} | dict.fromkeys((1, 2, 3), (102, STEP, 100))
    reported = job.reported(105, 100 + allowed_s + 30, positions)

    assert [allowed_s <= when_s - 100 <= allowed_s + 10 for when_s, _ in reported] == [True]
    assert ranks_of(reported[0][1])[0] == [0]


def test_phase_does_not_extend_the_timeout_of_a_stopped_process():
    job = Job()
    job.run(100)
    for now_s in range(105, 145, 5):
        job.all_heartbeat(101, "checkpoint", now_s - 100, now_s, process="T")
    ((stall),) = job.check(141)

    assert ranks_of(stall) == [[0, 1, 2, 3]]


def test_start_up_may_take_half_an_hour():
    job = Job()
    reported = job.reported(0, 1850, dict.fromkeys(range(3), (0, STARTUP, 0)) | {3: (1, STEP, 20)})

    assert [1800 <= when_s <= 1830 for when_s, _ in reported] == [True]


def test_pause_after_the_last_iteration_is_not_a_stall():
    job = Job(total_iterations=101)
    job.run(100)

    assert job.reported(105, 690, dict.fromkeys(range(4), (101, BETWEEN, 100))) == []


@pytest.mark.parametrize("state", [FINISHED, "lost"])
def test_finished_and_lost_ranks_are_not_listed_in_a_stall(state):
    job = Job()
    job.run(100)
    job.lost = {0} if state == "lost" else set()
    reported = job.reported(105, 200, {0: (101, FINISHED, 100)} | dict.fromkeys((1, 2, 3), (102, STEP, 101)))

    assert [ranks_of(stall) for _, stall in reported] == [[[1, 2, 3]]]


def test_completed_rank_ends_a_stall_and_killed_rank_does_not():
    job = Job()
    job.run(100)
    job.reported(105, 200, dict.fromkeys(range(4), (101, STEP, 100)))
    job.hang.leave(0, completed=False, now_s=201)
    assert job.check(202) == []
    assert job.hang.since_s is not None

    job.hang.leave(1, completed=True, now_s=203)
    assert job.check(203) == [Resumed(103.0)]


def test_job_has_not_stalled_while_a_rank_makes_progress():
    job = Job()
    job.run(100)
    for now_s in range(105, 300, 5):
        job.all_heartbeat(now_s + 1, STEP, 0.5, now_s, ranks=(0, 1, 2))
        job.heartbeat(3, 101, STEP, now_s - 100, now_s)
        assert job.check(now_s) == []


def test_ranks_that_wait_for_a_rank_in_a_phase_have_not_stalled():
    job = Job()
    job.run(100)
    positions = dict.fromkeys((1, 2, 3), (102, STEP, 101)) | {0: (101, "checkpoint", 100)}

    assert job.reported(105, 400, positions) == []


def test_difference_of_one_iteration_in_lockstep_is_not_a_stall():
    job = Job()
    job.run(100)
    for now_s in range(105, 300, 5):
        job.heartbeat(3, 101, STEP, now_s - 100.0, now_s)
        if now_s < 110:
            job.all_heartbeat(101, STEP, now_s - 100.0, now_s, ranks=(0, 1, 2))
        else:  # ranks 0 to 2 are in a checkpoint after their step
            job.all_heartbeat(101, "checkpoint", now_s - 108.0, now_s, ranks=(0, 1, 2))
        assert job.check(now_s) == []


def test_late_window_does_not_count_as_progress():
    job = Job(ranks=2)
    job.run(100)
    # Both ranks reach iteration 105 by 104 s. Rank 0's window, which ended at 101 s, arrives at 104.5 s.
    job.heartbeat(1, 105, STEP, 0.0, 104)
    job.hang.row(row(0, 1, iteration_last=102), 104.5)
    job.heartbeat(0, 105, STEP, 0.7, 104.7)
    assert job.reported(105, 300, {0: (105, "checkpoint", 104.8), 1: (105, STEP, 104.0)}) == []


@pytest.mark.parametrize("ordinal", [0, 101])
def test_waiting_for_requests_has_no_timeout(ordinal):
    job = Job(ranks=1)

    assert job.reported(105, 20_000, {0: (ordinal, WAITING, 100)}) == []


@pytest.mark.parametrize(
    ("ordinal", "heartbeats", "since_s"),
    [
        # After a minute of suspension, all heartbeats arrive at once.
        (101, [(1.0, 105), (6.0, 165), (11.0, 165), (16.0, 165), (21.0, 165)], 100.0),
        (102, [(1.0, 110), (4.0, 106)], 102.0),  # the first one arrived eight seconds late
    ],
    ids=["late heartbeats", "delayed start"],
)
def test_iteration_start_is_the_earliest_start_of_its_heartbeats(ordinal, heartbeats, since_s):
    job = Job(ranks=1)
    job.run(100)
    for elapsed_s, now_s in heartbeats:
        job.heartbeat(0, ordinal, STEP, elapsed_s, now_s)

    assert job.hang.ranks[0].since_s == since_s


# --- the line ---


def line(job: Job, stall: Stall, now_s: float, lost_s=None, left=None, missing=0) -> str:
    names = PositionNames(lambda rank: f"node {'ab'[rank % 2]}, GPU-{rank}", 1000)
    return stall_text(stall, job.hang.ranks, names, now_s, lost_s or {}, left or {}, missing)


def test_stall_line_has_position_duration_and_device_readings():
    job = Job()
    job.run(100)
    for now_s in range(105, 135, 5):
        job.all_heartbeat(235, STEP, now_s - 103, now_s, ranks=(0, 1, 2), utilization=1.0, power_w=400.0)
        job.heartbeat(3, 234, STEP, now_s - 100, now_s, utilization=1.0, power_w=210.4)
    for now_s in (135, 140):
        job.heartbeat(3, 234, STEP, now_s - 100, now_s, utilization=1.0, power_w=210.4)
        job.all_heartbeat(235, STEP, now_s - 103, now_s, ranks=(0, 1, 2))
    (stall,) = job.check(140)

    assert line(job, stall, 140) == (
        "stalled: rank 3 (node b, GPU-3) at iteration 1234 for 40 s, utilization 100 %, 210 W; 3 others at 1235"
    )


@pytest.mark.parametrize(
    ("others", "own", "text"),
    [
        ({"process": "S"}, {"process": "T"}, "stopped by a signal"),
        ({"utilization": 1.0}, {"utilization": 0.0, "power_w": 80.0}, "utilization 0 %, 80 W"),
    ],
    ids=["stopped", "idle"],
)
def test_stall_line_names_the_rank_that_differs_at_equal_iterations(others, own, text):
    job = Job()
    job.run(100)
    for now_s in range(105, 140, 5):
        job.all_heartbeat(101, STEP, now_s - 100, now_s, ranks=(0, 2, 3), **others)
        job.heartbeat(1, 101, STEP, now_s - 100, now_s, **own)
    (stall,) = job.check(140)

    expected = f"stalled: rank 1 (node b, GPU-1) at iteration 1101 for 40 s, {text}; 3 others at 1101"
    assert line(job, stall, 140).startswith(expected)


def test_stall_line_is_short_for_8192_ranks():
    job = Job(ranks=8192)
    job.run(20)
    for now_s in (25, 55):
        job.all_heartbeat(21, STEP, now_s - 20, now_s, ranks=range(8192), utilization=1.0, power_w=200.0)
    (stall,) = job.check(56)
    reported = line(job, stall, 56, lost_s=dict.fromkeys(range(20), 31.0), left={5: "failed"}, missing=2)

    assert reported.startswith("stalled: all 8192 ranks at iteration 1021 for 36 s, utilization 100 %, 200 W; ")
    assert reported.endswith("12 more ranks without a heartbeat; left: rank 5 (failed); 2 ranks never joined")
    assert len(reported) < 1000


def test_eight_ranks_behind_are_listed_and_all_are_counted():
    job = Job(ranks=30)
    job.run(20)
    for now_s in (25, 55):
        job.all_heartbeat(20, BETWEEN, now_s - 20, now_s, ranks=range(10))
        job.all_heartbeat(21, STEP, now_s - 20, now_s, ranks=range(10, 30))
    (stall,) = job.check(56)

    assert line(job, stall, 56) == (
        "stalled: 10 ranks (0, 1, 2, 3, 4, 5, 6, 7, ...) at iteration 1020 (ended) for 36 s; 20 others at 1021"
    )


# --- no false stalls ---

MOVES = st.lists(
    st.tuples(st.integers(0, 2), st.floats(0.1, 80.0), st.sampled_from([STEP, BETWEEN, "checkpoint"])),
    min_size=1,
    max_size=60,
)


@given(MOVES, st.floats(0.0, 8.0))
def test_rank_that_moved_within_its_timeout_has_not_stalled(moves, late_s):
    job = Job(ranks=3)
    moved_s, place = [0.0, 0.0, 0.0], [(0, STARTUP)] * 3
    now_s, next_beat_s = 0.0, 0.0
    for rank, after_s, state in moves:
        until_s = now_s + after_s
        while next_beat_s < until_s:
            now_s = next_beat_s
            for one in range(3):
                job.heartbeat(one, *place[one], now_s - moved_s[one], now_s + (late_s if one == 1 else 0.0))
            for stall in job.check(now_s + late_s):
                if isinstance(stall, Stall):
                    stalled = {one for _, group in stall.groups for one in group}
                    for one in stalled:
                        assert now_s - moved_s[one] >= 30.0
            next_beat_s += 5.0
        now_s = until_s
        moved_s[rank], place[rank] = now_s, (place[rank][0] + 1, state)
