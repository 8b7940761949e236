"""GPUs of the allocation that no rank uses: counted only when all ranks have joined and no process uses them."""

import pytest
from builders import gpu, hello

from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.job.unused import SETTLED_S, EmptyNode
from effllm.job.unused_time import MAX_PERIODS, NOT_STATED, UNUSED, UnusedTime
from effllm.records.allocation import Allocation
from effllm.records.clock import Now


def allocated(count=4, free=(2, 3), known=True, nodes=1, why=""):
    keys = [f"GPU-{number}" for number in range(count)] if known else []
    labels = [str(number) for number in range(len(keys))]
    return Allocation("SLURM_JOB_GPUS", count, tuple(keys), tuple(labels), tuple(keys[n] for n in free), why, nodes)


class Job:
    """An aggregator whose time passes in seconds."""

    def __init__(self, world_size=2):
        self.aggregator = Aggregator(Config(log_interval=10), "job", 1, 1000.0)
        self.world_size, self.now_s = world_size, 0.0

    def join(self, rank, allocation=None, host="a"):
        device = gpu(f"GPU-{rank}")
        job = self.aggregator.ledger.job
        message = hello(rank, self.world_size, job=job, host=host, devices=(device,), allocation=allocation)
        assert self.aggregator.hello(message, self.now) == ""

    def wait(self, seconds):
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for rank in self.aggregator.roster.hellos:
                self.aggregator.presence.hear(rank, self.now_s)
            self.aggregator.tick(self.now)

    @property
    def now(self):
        return Now(self.now_s, 1000.0 + self.now_s)

    @property
    def seconds(self):
        ledger = self.aggregator.ledger
        return ledger.unused.total(*ledger.goodput.span(is_over=False))

    @property
    def unknown(self):
        return self.aggregator.ledger.unused.why_unknown

    def restart(self, world_size=2):
        self.world_size = world_size
        ledger = restore(self.aggregator.snapshot()).next_attempt("again")
        self.aggregator = Aggregator(Config(log_interval=10), "again", 2, 1000.0 + self.now_s, ledger)

    def texts(self):
        return [event.text for event in self.aggregator.events.take() if event.kind == "gpus_unused"]


def test_unused_gpus_count_from_the_start_of_the_attempt():
    job = Job()
    job.join(0, allocated())
    job.wait(20)
    job.join(1)
    job.wait(SETTLED_S - 1)
    assert (job.texts(), job.seconds) == ([], 0.0)
    assert job.unknown == f"{UNUSED}: GPUs are judged 60 s after all ranks have joined"

    job.wait(20)

    (text,) = job.texts()
    assert text == "host a: GPUs 2-3 are allocated (SLURM_JOB_GPUS) and used by no rank and no other process"
    assert job.seconds == pytest.approx(2 * job.now_s, abs=1e-6)
    assert (job.unknown, job.aggregator.ledger.unused.evidence) == ("", text)
    job.wait(100)
    assert (job.texts(), job.seconds) == ([], pytest.approx(2 * job.now_s))


def test_job_of_30_seconds_does_not_know_its_unused_gpus():
    job = Job()
    job.join(0, allocated())
    job.wait(1)
    assert job.unknown == f"{UNUSED}: 1 of 2 ranks have joined"
    job.join(1)
    job.wait(29)

    found = job.aggregator.summary(1000.0 + job.now_s, True).waterfall
    assert "unused" not in {part.name for part in found.parts}
    assert f"{UNUSED}: GPUs are judged 60 s after all ranks have joined" in found.unknown


def test_attempt_that_was_too_short_stays_unknown():
    job = Job()
    job.join(0, allocated())
    job.wait(10)
    job.join(1)
    job.wait(20)
    job.restart()
    assert job.unknown == f"{UNUSED}: no rank of this attempt has joined"
    job.join(0, allocated())
    job.join(1)
    job.wait(100)

    assert (job.seconds > 100, job.unknown) == (True, f"{UNUSED}: unknown in 1 earlier attempt")


@pytest.mark.parametrize(
    "allocation",
    [
        allocated(2, free=(0, 1)),
        allocated(4, free=()),
        allocated(4, free=(0, 1)),
        allocated(2, free=(), known=False, why="NVML lists 1 of 2 allocated GPUs"),
    ],
    ids=["all used by ranks", "other processes", "free only at the moment", "each rank sees its own GPU"],
)
def test_job_that_uses_its_allocation_is_silent(allocation):
    job = Job()
    job.join(0, allocation)
    job.join(1)
    job.wait(2 * SETTLED_S)

    assert (job.texts(), job.seconds, job.unknown) == ([], 0.0, "")


def test_missing_rank_delays_the_judgement_of_unused_gpus():
    job = Job(world_size=3)
    job.join(0, allocated(4, free=(2, 3)))
    job.join(1)
    job.wait(5 * SETTLED_S)
    assert (job.texts(), job.seconds) == ([], 0.0)

    job.join(2)
    job.wait(SETTLED_S + 1)
    assert [text.partition(" is ")[0] for text in job.texts()] == ["host a: GPU 3"]


def test_host_that_a_rank_has_left_is_not_judged():
    """The state does not grow with the names of hosts in HELLOs."""
    job = Job(world_size=1)
    for number in range(50):
        job.join(0, allocated(4, free=(2, 3)), host=f"h{number}")
    job.join(0, allocated(1, free=()), host="b")
    job.wait(2 * SETTLED_S)

    assert (job.texts(), job.seconds, job.unknown) == ([], 0.0, "")


def test_gpu_of_a_process_that_starts_late_stops_counting():
    job = Job()
    job.join(0, allocated(3, free=(2,)))
    job.join(1)
    job.wait(100)
    job.join(0, allocated(3, free=()))
    job.wait(1)
    counted = job.seconds
    job.wait(100)
    assert counted == job.seconds == pytest.approx(100.0, abs=2.0)

    job.join(0, allocated(3, free=(2,)))
    job.wait(50)
    assert job.seconds == pytest.approx(counted + 50.0, abs=2.0), "a GPU that was busy counts from its next check"


def test_host_without_a_statement_makes_the_class_unknown():
    job = Job()
    job.join(0)
    job.join(1)
    job.wait(2 * SETTLED_S)
    assert job.unknown == NOT_STATED

    job.join(0, allocated(4, known=False, free=(), why="MIG is enabled"))
    job.wait(1)
    assert job.unknown == "allocated GPUs that no rank used: host a: MIG is enabled"
    assert job.texts() == []


def test_gpus_of_nodes_without_ranks_count():
    job = Job()
    job.join(0, allocated(1, free=(), nodes=3), host="a.cluster")
    job.join(1, allocated(1, free=(), nodes=3), host="b")
    job.wait(10)
    watch = job.aggregator.unused
    assert not watch.needs_nodes
    job.wait(SETTLED_S)
    assert watch.needs_nodes
    assert job.unknown.endswith("1 nodes of the allocation have no rank: scontrol has not answered yet")

    watch.set_nodes([EmptyNode("c", 8)])
    job.wait(1)

    assert job.texts() == ["node c: 8 GPUs are allocated, and no rank and no step of the job runs there"]
    assert (job.seconds, job.unknown, watch.needs_nodes) == (pytest.approx(8 * job.now_s), "", False)


def test_nodes_that_are_not_known_are_not_counted():
    job = Job(world_size=1)
    job.join(0, allocated(1, free=(), nodes=2))
    job.wait(SETTLED_S + 1)
    job.aggregator.unused.set_nodes([], "other steps of the job run on 1 of these nodes")
    job.wait(1)

    assert job.seconds == 0.0
    assert job.unknown.endswith("other steps of the job run on 1 of these nodes")


def test_restarted_aggregator_continues_the_time_of_unused_gpus():
    job = Job()
    job.join(0, allocated())
    job.join(1)
    job.wait(100)

    ledger = restore(job.aggregator.snapshot())

    assert ledger.unused == job.aggregator.ledger.unused
    assert ledger.unused.since_s.keys() == {"a/GPU-2", "a/GPU-3"}


def test_time_of_unused_gpus_is_added_over_attempts():
    time = UnusedTime()
    time.update({"a/GPU-1", "a/GPU-2"}, 10.0, 80.0)
    time.end_attempt(5.0, 105.0)
    time.update({"a/GPU-1"}, 200.0, 270.0)

    assert (time.seconds, time.total(200.0, 300.0)) == (200.0, 300.0)


def test_time_after_the_end_of_the_attempt_does_not_count():
    """The GPU is used from second 100 on; then the last report shows that the attempt ended after 30 s."""
    time = UnusedTime()
    time.update({"a/GPU-1"}, 0.0, 60.0)
    time.update(set(), 0.0, 100.0)

    assert (time.total(0.0, 200.0), time.total(0.0, 30.0)) == (100.0, 30.0)
    time.end_attempt(0.0, 30.0)
    assert time.total(500.0, 600.0) == 30.0


def test_second_period_of_a_gpu_does_not_count_from_the_start():
    """A rank uses the GPU from second 60 to 90."""
    time = UnusedTime()
    time.update({"a/GPU-1"}, 0.0, 60.0)
    time.update(set(), 0.0, 60.0)
    time.update({"a/GPU-1"}, 0.0, 90.0)

    assert time.total(0.0, 100.0) == 70.0


def test_number_of_ended_periods_is_bounded():
    time = UnusedTime()
    time.note_busy({"GPU-1"})
    for second in range(0, 4 * MAX_PERIODS, 2):
        time.update({"a/GPU-1"}, 0.0, second)
        time.update(set(), 0.0, second + 1.0)

    assert len(time.periods) == MAX_PERIODS
    assert time.total(0.0, 4.0 * MAX_PERIODS) == 2 * MAX_PERIODS
