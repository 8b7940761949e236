"""Agents that die or cannot start: training goes on, it is said once and why, and the end is not held up."""

import os
import signal
import sys
import time

import jobs
import pytest

pytestmark = pytest.mark.faults

LOOP = "loop.py"


@pytest.mark.fault("agent-killed")
def test_the_end_of_a_job_is_not_held_up_by_an_agent_that_was_killed(launch):
    aggregator = launch.aggregator()
    ranks = launch.ranks(aggregator, 2, LOOP, "--iterations", 150)
    jobs.until(lambda: aggregator.ledger.num_windows)
    (agent,) = ranks[1].find("effllm.agent")
    os.kill(agent, signal.SIGKILL)
    for rank in ranks:
        rank.done()
    ended_s = time.monotonic()
    assert not aggregator.job.left(within_s=8.0)

    assert time.monotonic() - ended_s < 8.0
    ledger = aggregator.ledger
    assert (ledger.summary.status, ledger.summary.is_over) == ("killed", True)
    assert ledger.told("silent") == ["rank 1: its agent has gone without a farewell"]
    assert sum(row.tokens for row in ledger.ranks if row.rank == 0) == 15_000
    assert "missing 1" in aggregator.job.blocks[-1]["rest"]
