"""Verdicts on short real jobs with a planted cause: real ranks, agents, sockets and aggregator; simulated devices."""

import pytest

from benchmarks.planted.job import THRESHOLDS
from benchmarks.planted.real import run_real
from benchmarks.planted.timeline import planned, timeline

pytestmark = pytest.mark.long


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("cause", THRESHOLDS)
def test_verdict_on_a_real_job_is_the_planted_cause(cause, seed, tmp_path, library):
    summary = run_real(timeline(planned(cause, seed, is_short=True)), tmp_path, library)

    assert summary.verdict.cause == cause, summary.verdict
    assert (summary.attempts > 1) == (cause == "restarts")
