"""A job of eight ranks continues with seven, then again with eight ranks: one run with correct totals."""

import struct

import jobs
import pytest

pytestmark = [pytest.mark.faults, pytest.mark.fault("elastic-restart")]


class World:
    """The ranks of one attempt, with mpirun's variables."""

    def __init__(self, launch, number, size, *options):
        folder = launch._folder
        self._meeting = folder / f"meeting-{number}"
        self._meeting.write_bytes(bytes(8 * size))
        self.size = size

        def start(rank):
            launched = {"PMIX_NAMESPACE": f"launch-{number}", **jobs.long_timeouts()}
            arguments = (self._meeting, folder / "checkpoint", *options)
            return launch.python(
                "elastic_loop.py", *arguments, environ=jobs.openmpi_environ(rank, size) | launched, run_name="elastic"
            )

        self.jobs = [start(rank) for rank in range(size)]

    @property
    def begun(self):
        """Return the current iteration of each rank."""
        return struct.unpack(f"<{self.size}q", self._meeting.read_bytes())

    def end(self):
        """End all ranks and wait for them, as a launcher does after a rank has left or joined."""
        for job in self.jobs:
            job.process.terminate()
        for job in self.jobs:
            job.wait()
        assert [job.left() for job in self.jobs] == [set()] * self.size


def test_job_of_eight_then_seven_then_eight_ranks_is_one_run(launch):
    eight = World(launch, 1, 8, "--kill-rank", 5, "--at", 34)
    jobs.until(lambda: eight.jobs[5].process.poll() is not None)
    jobs.until(lambda: eight.begun == (35, 35, 35, 35, 35, 34, 35, 35))
    eight.end()

    seven = World(launch, 2, 7, "--stop-rank", 0, "--at", 55)
    jobs.until(lambda: seven.begun == (55, 56, 56, 56, 56, 56, 56))
    seven.end()

    again = World(launch, 3, 8, "--last", 80)
    for job in again.jobs:
        job.wait()
        assert job.code == 0, job.stderr
    assert [job.left() for job in again.jobs] == [set()] * 8
    ledger = again.jobs[0].ledger  # all ranks have the same folder
    summary, goodput = ledger.summary, ledger.summary.goodput

    # Jobs continue from the checkpoints of iterations 20 and 40, so the iterations are 1 to 34 with eight ranks, 21 to
    # 55 with seven ranks, and 41 to 80 with eight ranks.
    assert (summary.status, summary.attempts) == ("completed", 3)
    assert summary.iterations == 34 + 35 + 40
    assert summary.tokens == 100 * (8 * 34 + 7 * 35 + 8 * 40)
    assert sum(row.tokens for row in ledger.ranks) == summary.tokens
    assert [attempt.world_size for attempt in goodput.attempts] == [8, 7, 8]
    assert [(attempt.first, attempt.last) for attempt in goodput.attempts] == [(1, 34), (21, 55), (41, 80)]
    assert [attempt.redone_iterations for attempt in goodput.attempts] == [34 - 20, 55 - 40, 0]
    assert goodput.redone_iterations == 14 + 15
    assert goodput.seconds["redone"] > 0.0 < goodput.seconds["restart_gap"]
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.elapsed_s, rel=1e-6)
    assert (summary.coverage.ranks_expected, summary.coverage.reports_lost) == (8, 0)
