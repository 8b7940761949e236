"""Rank 0 starts again on another host, while the earlier aggregator may still wait on the first host."""

import os
import signal

import jobs
import psutil
import pytest
from hosts import slurm_ranks

pytestmark = pytest.mark.faults

LOOP = ("--iterations", 400, "--step-s", 0.02)


def reporting(job):
    windows = job.ledger.windows if job.num_windows else []
    return windows[-1].coverage.ranks_reporting if windows else 0


def stop(job, module):
    for pid in job.find(module):
        os.kill(pid, signal.SIGSTOP)
    return [psutil.Process(pid) for pid in job.find(module)]


@pytest.mark.fault("rank-0-moves")
@pytest.mark.parametrize("first_host", ["is lost", "still has an aggregator, which waits for a rank"])
def test_rank_0_on_another_host_continues_the_run_folder(hosts, launch, first_host):
    one, two, three = hosts(3)
    first, second = slurm_ranks(launch, (one, two), *LOOP, "--until", "for ever")
    jobs.until(lambda: first.num_windows >= 5 and reporting(first) == 2)
    if first_host == "is lost":
        for job in (first, second):
            job.end()
    else:
        # Rank 1 cannot send a bye, so the aggregator still counts it as connected.
        stopped = stop(second, "effllm.agent.agent")
        for job in (first, second):
            job.process.kill()
            job.process.wait()

    again = slurm_ranks(launch, (two, three), *LOOP)  # the job has the same id after a requeue
    for job in again:
        assert job.wait().code == 0, job.stderr
    if first_host != "is lost":
        for process in stopped:
            process.kill()
    assert not again[0].left() and not first.left()
    ledger = again[0].ledger  # all ranks have the same folder
    summary = ledger.summary

    assert (summary.status, summary.attempts) == ("completed", 2)
    before, after = summary.goodput.attempts
    assert (before.first, after.first, after.last) == (1, 1, 400)
    assert summary.goodput.redone_iterations == before.last, "it logs numbers from 1 again"
    assert summary.goodput.seconds["restart_gap"] > 0.0
    assert sum(summary.goodput.seconds.values()) == pytest.approx(summary.goodput.elapsed_s, rel=1e-6)
    of_second = [row for row in ledger.ranks if row.attempt == 2]
    assert {row.rank for row in of_second} == {0, 1}
    assert {row.host for row in of_second} == {two.name, three.name}
    assert sum(row.tokens for row in of_second) == 2 * 400 * 100
