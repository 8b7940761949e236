"""A stall in the aggregator: an event, requests for stacks, and stalled time in the summary."""

import pytest
from builders import gpu, hello, row

from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.records.clock import Now
from effllm.records.wire import Bye, Heartbeat, Reports, Stack

UNIX_S = 1_700_000_000.0
STEP, BETWEEN = "in an iteration", "between iterations"


class Job:
    """An aggregator and the heartbeats of its ranks; ten iterations have ended by 100 s."""

    def __init__(self, ranks: int = 4, **changes) -> None:
        self.aggregator = Aggregator(Config(), "job", 1, UNIX_S)
        for rank in range(ranks):
            self.aggregator.hello(hello(rank, ranks, devices=(gpu(f"GPU-{rank}"),), **changes), Now(0.0, UNIX_S))
        self.heartbeat(dict.fromkeys(range(ranks), (0, "startup")), 0.0, 0.0)
        for rank in range(ranks):
            reported = row(rank, 1, iteration_shown=1010, agent=f"agent-{rank}", devices=())
            self.aggregator.reports(Reports((reported,)), Now(100.0, UNIX_S + 100))
        self.events()

    def heartbeat(self, positions, since_s: float, now_s: float, **changes) -> None:
        for rank, (ordinal, state) in positions.items():
            heartbeat = Heartbeat(f"agent-{rank}", rank, ordinal, state, now_s - since_s, **changes)
            self.aggregator.heartbeat(heartbeat, Now(now_s, UNIX_S + now_s))

    def stall(self, positions, since_s: float = 100.0, until_s: float = 141.0, from_s=None, **changes) -> None:
        now_s = since_s if from_s is None else from_s
        while now_s <= until_s:
            if now_s % 5 == 0:
                self.heartbeat(positions, since_s, now_s, **changes)
            self.tick(now_s)
            now_s += 0.5

    def tick(self, now_s: float) -> None:
        self.aggregator.tick(Now(now_s, UNIX_S + now_s))

    def stack(self, rank: int, now_s: float = 142.0, **changes) -> None:
        given = {"ordinal": 11, "text": f"the stack of rank {rank}\n", "top": "all_reduce (dist.py:88)", **changes}
        self.aggregator.stack(Stack(f"agent-{rank}", rank, **given), Now(now_s, UNIX_S + now_s))

    def events(self) -> list[tuple[str, str]]:
        reported = [(event.kind, event.text) for event in self.aggregator.events.take_events()]
        return [event for event in reported if event[0] not in ("joined", "not_measured", "mfu")]

    def summary(self, ended: bool = True):
        return self.aggregator.summary(UNIX_S + 200, ended)


BEHIND = {0: (11, STEP), 1: (11, STEP), 2: (10, BETWEEN), 3: (11, STEP)}


def test_stall_event_has_logged_iterations_host_and_device():
    job = Job()
    job.stall(BEHIND, utilization=1.0, power_w=210.4)

    ((kind, text),) = job.events()
    assert kind == "stalled"
    assert text.startswith("stalled: rank 2 (node node0, GPU-2) at iteration 1010 (ended) for 3")
    assert text.endswith("utilization 100 %, 210 W; 3 others at 1011")


def test_stacks_of_ranks_behind_and_another_rank_are_requested_once():
    job = Job()
    job.stall(BEHIND, until_s=500.0)
    asked = job.aggregator.stalls.take_asked()

    assert sorted(asked) == [0, 2]
    assert [kind for kind, _ in job.events()] == ["stalled", "stack", "stalled"]  # the second report after 5 min
    assert job.aggregator.stalls.take_asked() == []


def test_at_most_nine_stacks_are_requested():
    job = Job(ranks=40)
    job.stall({rank: (10, BETWEEN) if rank < 30 else (11, STEP) for rank in range(40)})

    assert sorted(job.aggregator.stalls.take_asked()) == [*range(8), 30]


def test_complete_stacks_are_written_as_files_with_one_event():
    job = Job()
    job.stall(BEHIND)
    job.events()
    job.stack(2, top="load (data.py:7)", ordinal=10)
    assert job.events() == []
    job.stack(0)

    assert [(file.name, file.text) for file in job.aggregator.stalls.take_files()] == [
        ("rank-2-iteration-1010.txt", "the stack of rank 2\n"),
        ("rank-0-iteration-1011.txt", "the stack of rank 0\n"),
    ]
    assert job.events() == [
        (
            "stack",
            "stacks are in stacks/ of the run folder: rank 2: load (data.py:7); rank 0: all_reduce (dist.py:88)",
        )
    ]
    assert job.aggregator.stalls.take_files() == []


def test_missing_stack_does_not_block_the_event():
    job = Job()
    job.stall(BEHIND)
    job.stack(2)
    job.events()
    job.stall(BEHIND, from_s=145.0, until_s=175.0)

    ((_, text),) = job.events()
    assert text.endswith("rank 2: all_reduce (dist.py:88); rank 0: the agent has not answered")


@pytest.mark.parametrize("who", [1, 3, 7])
def test_unrequested_stack_is_dropped(who):
    job = Job()
    job.stall(BEHIND)
    before = job.aggregator.garbage
    job.stack(who)

    assert job.aggregator.garbage == before + 1
    assert job.aggregator.stalls.take_files() == []


def test_stack_is_stored_once():
    job = Job()
    job.stall(BEHIND)
    job.stack(2)
    job.stack(2)

    assert len(job.aggregator.stalls.take_files()) == 1
    assert job.aggregator.garbage == 1


def test_summary_has_stalled_time_during_and_after_a_stall():
    job = Job()
    job.stall(BEHIND)
    assert job.summary(ended=False).status == "stalled"
    assert not job.summary(ended=False).is_over
    assert 40.5 <= job.summary(ended=False).metrics["health/stalled_s"].value <= 41.0
    job.heartbeat(dict.fromkeys(range(4), (12, STEP)), 150.0, 151.0)
    job.tick(151.5)

    assert [kind for kind, _ in job.events()] == ["stalled", "resumed"]
    assert job.summary(ended=False).status == "running"
    assert job.summary(ended=False).metrics["health/stalled_s"].value == pytest.approx(50.0)


def test_times_of_two_stalls_add_up_and_each_stall_requests_stacks():
    job = Job()
    job.stall(BEHIND)
    first = job.aggregator.stalls.take_asked()
    job.heartbeat(dict.fromkeys(range(4), (12, STEP)), 150.0, 150.0)
    job.tick(150.5)
    job.stall(dict.fromkeys(range(4), (12, STEP)), since_s=150.0, until_s=190.0)
    second = job.aggregator.stalls.take_asked()
    job.heartbeat(dict.fromkeys(range(4), (13, STEP)), 195.0, 195.0)
    job.tick(195.5)

    assert (sorted(first), sorted(second)) == ([0, 2], [0, 1, 2, 3])
    assert job.summary(ended=False).metrics["health/stalled_s"].value == pytest.approx(50 + 45)


def bye(job: Job, rank: int, status: str, now_s: float) -> None:
    job.aggregator.bye(Bye(f"agent-{rank}", rank, status, 10), Now(now_s, UNIX_S + now_s))


def test_job_killed_in_a_stall_has_the_status_stalled():
    job = Job()
    job.stall(BEHIND)
    for rank in range(4):
        bye(job, rank, "killed", 150.0)

    assert job.summary().status == "stalled"


def test_earlier_of_stall_and_failure_gives_the_status():
    job = Job()
    job.stall(BEHIND)
    for rank in range(4):
        bye(job, rank, "failed", 150.0)  # the collectives of this rank timed out
    assert job.summary().status == "stalled"

    job = Job()
    bye(job, 3, "failed", 100.0)
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 3})
    (stalled,) = [text for kind, text in job.events() if kind == "stalled"]
    assert stalled.endswith("; 2 others at 1011; left: rank 3 (failed)")
    for rank in range(3):
        bye(job, rank, "killed", 150.0)
    assert job.summary().status == "failed"


def test_job_that_ends_after_a_stall_has_the_status_completed():
    job = Job()
    job.stall(BEHIND)
    for rank in range(4):
        bye(job, rank, "completed", 150.0)

    assert job.summary().status == "completed"


def test_rank_without_its_agent_is_lost_not_stalled():
    job = Job()
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 2}, until_s=150.0)

    (stalled,) = [text for kind, text in job.events() if kind == "stalled"]
    assert stalled.startswith("stalled: all 3 ranks at iteration 1011 for 3")
    assert "; rank 2 (node node0, GPU-2): no heartbeat for " in stalled
    assert 2 not in job.aggregator.stalls.take_asked()


def test_rank_that_joined_again_is_not_reported_as_left():
    job = Job()
    bye(job, 3, "killed", 100.0)
    job.aggregator.hello(hello(3, 4, agent="another", devices=()), Now(101.0, UNIX_S + 101))
    job.stall({rank: place for rank, place in BEHIND.items() if rank != 3}, from_s=105.0)

    (stalled,) = [text for kind, text in job.events() if kind == "stalled"]
    assert "left:" not in stalled


def test_new_aggregator_counts_the_time_of_a_stall_once():
    job = Job()
    state = job.aggregator.snapshot()
    job.stall(BEHIND)
    assert job.summary().metrics["health/stalled_s"].value > 40
    job.aggregator = Aggregator(Config(), "job", 1, UNIX_S, restore(state))
    for rank in range(4):
        job.aggregator.hello(hello(rank, 4), Now(150.0, UNIX_S + 150))
    job.heartbeat(BEHIND, 100.0, 150.0)
    job.tick(150.5)

    ((kind, text),) = job.events()
    assert kind == "stalled"
    assert " for 50 s" in text
    assert job.summary().metrics["health/stalled_s"].value == pytest.approx(50.5)
