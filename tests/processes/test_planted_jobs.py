"""Verdicts on short real jobs with a planted cause: real ranks, agents, sockets and aggregator; simulated devices."""

import pytest

from benchmarks.planted.job import THRESHOLDS
from benchmarks.planted.real import run_real
from benchmarks.planted.timeline import planned, timeline

#: Causes that run in make test with one seed; the other causes and seeds are long.
SHORT = ("data_loading", "restarts", "hang")
LONG = tuple(cause for cause in THRESHOLDS if cause not in SHORT)


@pytest.mark.parametrize(
    ("cause", "seed"),
    [
        *((cause, 0) for cause in SHORT),
        *(pytest.param(cause, 1, marks=pytest.mark.long) for cause in SHORT),
        *(pytest.param(cause, seed, marks=pytest.mark.long) for cause in LONG for seed in (0, 1)),
    ],
)
def test_verdict_on_a_real_job_is_the_planted_cause(cause, seed, tmp_path, library):
    summary = run_real(timeline(planned(cause, seed, is_short=True)), tmp_path, library)

    assert summary.verdict.cause == cause, summary.verdict
    assert (summary.attempts > 1) == (cause == "restarts")
