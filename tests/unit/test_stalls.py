"""A stall in the aggregator: an event, requests for stacks, and stalled time in the summary."""

import pytest
from builders import Job, row

from effllm.records.wire import Heartbeat, Stack

STEP, BETWEEN = "in an iteration", "between iterations"


class StallingJob(Job):
    """Ranks with heartbeats that the test chooses; ten iterations have ended by 100 s."""

    def __init__(self, ranks: int = 4) -> None:
        super().__init__(ranks)
        self.join().heartbeat(dict.fromkeys(range(ranks), (0, "startup")), 0.0)
        self.tick(100.0).send(*(row(rank, 1, iteration_shown=1010, devices=()) for rank in range(ranks)))
        self.lines()

    def heartbeat(self, positions, since_s: float, **changes) -> None:
        for rank, (ordinal, state) in positions.items():
            heartbeat = Heartbeat(f"agent-{rank}", rank, ordinal, state, self.now_s - since_s, **changes)
            self.aggregator.heartbeat(heartbeat, self.now)

    def stall(self, positions, since_s: float = 100.0, until_s: float = 141.0, **changes) -> None:
        while self.now_s <= until_s:
            if self.now_s % 5 == 0:
                self.heartbeat(positions, since_s, **changes)
            self.tick(0.5)

    def resume(self, ordinal: int, at_s: float) -> None:
        self.now_s = at_s
        self.heartbeat(dict.fromkeys(range(4), (ordinal, STEP)), at_s)
        self.tick(0.5)

    def stack(self, rank: int, **changes) -> None:
        given = {"ordinal": 11, "text": f"the stack of rank {rank}\n", "top": "all_reduce (dist.py:88)", **changes}
        self.aggregator.stack(Stack(f"agent-{rank}", rank, **given), self.now)

    def lines(self, *kinds: str) -> list[tuple[str, str]]:
        found = [(event.kind, event.text) for event in self.events() if not kinds or event.kind in kinds]
        return [event for event in found if event[0] not in ("joined", "not_measured", "mfu")]

    @property
    def stalled_s(self) -> float:
        return self.summary().metrics["health/stalled_s"].value


BEHIND = {0: (11, STEP), 1: (11, STEP), 2: (10, BETWEEN), 3: (11, STEP)}


def test_stacks_of_ranks_behind_and_another_rank_are_requested_once():
    job = StallingJob()
    job.stall(BEHIND, until_s=500.0)
    asked = job.aggregator.stalls.take_ranks_to_ask()

    assert sorted(asked) == [0, 2]
    assert [kind for kind, _ in job.lines()] == ["stalled", "stack"]
    assert job.aggregator.stalls.take_ranks_to_ask() == []


def test_at_most_nine_stacks_are_requested():
    job = StallingJob(ranks=40)
    job.stall({rank: (10, BETWEEN) if rank < 30 else (11, STEP) for rank in range(40)})

    assert sorted(job.aggregator.stalls.take_ranks_to_ask()) == [*range(8), 30]


def test_complete_stacks_are_written_as_files_with_one_event():
    job = StallingJob()
    job.stall(BEHIND)
    job.lines()
    job.stack(2, top="load (data.py:7)", ordinal=10)
    assert job.lines() == []
    job.stack(0)

    assert [(file.name, file.text) for file in job.aggregator.stalls.take_files()] == [
        ("rank-2-iteration-1010.txt", "the stack of rank 2\n"),
        ("rank-0-iteration-1011.txt", "the stack of rank 0\n"),
    ]
    text = "stacks are in stacks/ of the run folder: rank 2: load (data.py:7); rank 0: all_reduce (dist.py:88)"
    assert job.lines() == [("stack", text)]
    assert job.aggregator.stalls.take_files() == []


def test_missing_stack_does_not_block_the_event():
    job = StallingJob()
    job.stall(BEHIND)
    job.stack(2)
    job.lines()
    job.stall(BEHIND, until_s=175.0)

    ((_, text),) = job.lines()
    assert text.endswith("rank 2: all_reduce (dist.py:88); rank 0: the agent has not answered")


@pytest.mark.parametrize(("ranks", "num_files"), [([1], 0), ([3], 0), ([7], 0), ([2, 2], 1)])
def test_unrequested_and_repeated_stacks_are_dropped(ranks, num_files):
    job = StallingJob()
    job.stall(BEHIND)
    for rank in ranks:
        job.stack(rank)

    assert job.aggregator.garbage == 1
    assert len(job.aggregator.stalls.take_files()) == num_files


def test_summary_has_stalled_time_during_and_after_a_stall():
    job = StallingJob()
    job.stall(BEHIND)
    assert (job.summary().status, job.summary().is_over) == ("stalled", False)
    assert 40.5 <= job.stalled_s <= 41.5
    job.resume(12, 150.0)
    lines = job.lines()

    assert [kind for kind, _ in lines] == ["stalled", "resumed"]
    assert lines[1][1] == "resumed after 50 s"
    assert job.summary().status == "running"
    assert job.stalled_s == pytest.approx(50.0)


def test_times_of_two_stalls_add_up_and_each_stall_requests_stacks():
    job = StallingJob()
    job.stall(BEHIND)
    first = job.aggregator.stalls.take_ranks_to_ask()
    job.resume(12, 150.0)
    job.stall(dict.fromkeys(range(4), (12, STEP)), since_s=150.0, until_s=190.0)
    second = job.aggregator.stalls.take_ranks_to_ask()
    job.resume(13, 195.0)

    assert (sorted(first), sorted(second)) == ([0, 2], [0, 1, 2, 3])
    assert job.stalled_s == pytest.approx(50 + 45)


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        ("killed", "stalled"),
        ("failed", "stalled"),  # the collectives of this rank timed out
        ("completed", "completed"),
    ],
)
def test_job_that_ends_in_a_stall_has_the_status_stalled(ended, status):
    job = StallingJob()
    job.stall(BEHIND)
    for rank in range(4):
        job.bye(rank, ended)

    assert job.summary(ended=True).status == status


def test_job_that_stalls_after_a_failure_has_failed():
    job = StallingJob()
    job.bye(3, "failed")
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 3})
    ((_, stalled),) = job.lines("stalled")
    assert stalled.endswith("; 2 others at 1011; left: rank 3 (failed)")
    for rank in range(3):
        job.bye(rank, "killed")

    assert job.summary(ended=True).status == "failed"


def test_rank_without_its_agent_is_lost_not_stalled():
    job = StallingJob()
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 2}, until_s=150.0)

    ((_, stalled),) = job.lines("stalled")
    assert stalled.startswith("stalled: all 3 ranks at iteration 1011 for 3")
    assert "; rank 2 (node node0, GPU-2): no heartbeat for " in stalled
    assert 2 not in job.aggregator.stalls.take_ranks_to_ask()


def test_rank_that_joined_again_is_not_reported_as_left():
    job = StallingJob()
    job.bye(3, "killed")
    job.tick(1.0).join(3, agent="another", devices=())
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 3})

    ((_, stalled),) = job.lines("stalled")
    assert "left:" not in stalled


def test_new_aggregator_counts_the_time_of_a_stall_once():
    job = StallingJob()
    ledger = job.ledger()
    job.stall(BEHIND)
    assert job.stalled_s > 40
    job.aggregator = Job(4, ledger).aggregator
    job.now_s = 150.0
    job.join().heartbeat(BEHIND, 100.0)
    job.tick(0.5)

    ((kind, text),) = job.lines()
    assert kind == "stalled" and " for 50 s" in text
    assert job.stalled_s == pytest.approx(50.5)
