"""GPUs that a scheduler has allocated to the job, and that no rank uses."""

import pytest
from builders import Job, gpu

SOURCE = "SLURM_GPUS_ON_NODE"


class NodeJob(Job):
    """A job whose ranks state how many GPUs of their node are allocated to it."""

    def join(self, rank, stated=4, host="a", keys=None):
        devices = tuple(gpu(key) for key in keys or (f"GPU-{rank}",))
        super().join(rank, host=host, devices=devices, stated_gpus=stated, gpus_source=SOURCE)
        return self.wait(0)

    def wait(self, seconds):
        for rank in self.aggregator.roster.hellos:
            self.aggregator.presence.note_message(rank, self.now_s + seconds)
        return self.tick(seconds)

    @property
    def attempt(self):
        return self.aggregator.ledger.goodput.attempt

    @property
    def part(self):
        return next((part for part in self.summary().waterfall.parts if part.name == "unused"), None)

    def texts(self):
        return [event.text for event in self.events("gpus_unused")]


def test_unused_gpus_count_from_the_start_of_the_attempt():
    job = NodeJob().join(0).wait(20)
    assert (job.attempt.unused_gpus, job.texts(), job.part) == (None, [], None)

    job.join(1).wait(80)

    (text,) = job.texts()
    assert text == "host a: 4 GPUs are allocated (SLURM_GPUS_ON_NODE), and its ranks use 2"
    assert (job.part.device_seconds, job.part.evidence) == (2 * 100.0, text)
    assert job.wait(100).part.device_seconds == 2 * 200.0
    assert job.texts() == []


def test_each_node_with_unused_gpus_has_an_event():
    job = NodeJob(5).join(0, host="a").join(1, host="a").join(2, stated=1, host="b")
    job.join(3, stated=8, host="c").join(4, stated=8, host="c")

    assert [text.partition(":")[0] for text in job.texts()] == ["host a", "host c"]
    assert job.attempt.unused_gpus == 2 + 0 + 6


def test_only_process_of_a_node_may_use_gpus_that_it_does_not_show():
    job = NodeJob(1).join(0, stated=4).wait(10)
    assert (job.texts(), job.attempt.unused_gpus) == ([], None)

    job = NodeJob(1).join(0, stated=4, keys=("GPU-0", "GPU-1"))
    assert (len(job.texts()), job.attempt.unused_gpus) == (1, 2)


@pytest.mark.parametrize(
    ("stated", "keys"),
    [
        ((2, 2), None),
        ((1, 1), None),
        ((2, 4), None),
        ((2, 2), ("GPU-0",)),
        ((4, 4), ("GPU-0", "GPU-1", "GPU-2", "GPU-3")),
    ],
    ids=["one each", "one of a task", "a step of two", "one GPU on all ranks", "all GPUs on each rank"],
)
def test_job_that_uses_its_gpus_is_silent(stated, keys):
    """Ranks that have not selected their GPU all show the first GPU."""
    job = NodeJob().join(0, stated[0], keys=keys).join(1, stated[1], keys=keys)

    assert (job.texts(), job.attempt.unused_gpus) == ([], 0)


def test_job_with_a_rank_without_a_statement_is_not_compared():
    job = NodeJob().join(0).join(1, stated=0).wait(10)
    assert (job.texts(), job.attempt.unused_gpus) == ([], None)

    job.join(1)  # its GPU was opened later
    assert (len(job.texts()), job.attempt.unused_gpus) == (1, 2)


def test_gpus_are_compared_once():
    job = NodeJob().join(0).join(1)
    assert len(job.texts()) == 1

    job.join(0, stated=8).join(1, stated=8)
    assert (job.texts(), job.attempt.unused_gpus) == ([], 2)


def test_restarted_aggregator_keeps_the_number():
    job = NodeJob().join(0).join(1).wait(100)
    again = NodeJob(ledger=job.ledger())
    again.now_s = 100.0

    assert again.attempt.unused_gpus == 2
    again.join(0).join(1)
    assert again.texts() == []


def test_time_of_unused_gpus_is_added_over_attempts_and_gaps():
    """100 s with two unused GPUs, a gap of 50 s with the same GPUs, and 100 s with one unused GPU."""
    job = NodeJob().join(0).join(1).wait(100)
    ledger = job.next_ledger("again")
    again = NodeJob(name="again", ledger=ledger)
    again.now_s = 150.0
    again.join(0, stated=3).join(1, stated=3).wait(100)

    summary = again.summary()
    assert [one.unused_gpus for one in summary.goodput.attempts] == [2, 1]
    assert summary.goodput.unused_gpu_seconds == pytest.approx(2 * 150.0 + 100.0)
    assert again.part.device_seconds == pytest.approx(400.0)
