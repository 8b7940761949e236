"""Real ranks, one of which is slow: it is named, and nobody else is."""

import re

import jobs
import pytest

pytestmark = pytest.mark.faults

RANKS = 4


def run(tmp_path, *arguments):
    meeting = tmp_path / "meeting"
    meeting.write_bytes(bytes(8 * RANKS))
    with jobs.launching(tmp_path) as launcher:
        aggregator = launcher.aggregator(log_interval=10)
        ranks = launcher.ranks(aggregator, RANKS, "own_times.py", meeting, *arguments, log_interval=10)
        for job in ranks:
            job.done(90.0)
        aggregator.job.wait(20.0)
    return aggregator


def test_of_four_ranks_the_one_that_is_ten_percent_slower_is_named_and_nobody_else(tmp_path):
    aggregator = run(tmp_path, "--slow", 2, "--step-s", 0.1, "--iterations", 110)
    ledger, summary = aggregator.ledger, aggregator.ledger.summary

    (verdict,) = summary.stragglers
    assert (verdict.ranks, verdict.evidence, verdict.peers) == ((2,), "own time", 3)
    assert 0.05 < verdict.slowdown < 0.2
    assert verdict.gpu_seconds > 0 and verdict.joules > 0
    (line,) = ledger.told("straggler")
    assert re.search(r"^straggler: rank 2 \(node .*\) \d+\.\d % slower than its 3 peers since iteration \d+: ", line)
    assert line in aggregator.job.stdout
    assert {one.ranks for window in ledger.windows for one in window.stragglers} == {(2,)}
    # What was lost to it is a class of the goodput, and the clocks' error is published.
    assert summary.goodput.rank_seconds["straggling"] == pytest.approx(verdict.gpu_seconds, rel=0.2)
    assert summary.metrics["straggler/waiting_gpu_seconds"].value == pytest.approx(verdict.gpu_seconds)
    assert 0 < summary.metrics["run_health/clock_error_s"].value < 1


def test_slowness_that_ends_is_taken_back(tmp_path):
    ledger = run(tmp_path, "--slow", 1, "--by", 1.3, "--until", 100, "--iterations", 200).ledger

    of_rank_1 = [event.kind for event in ledger.events if event.rank == 1]
    assert of_rank_1[of_rank_1.index("straggler") :][:2] == ["straggler", "recovered"]
    assert not any(1 in verdict.ranks for verdict in ledger.windows[-1].stragglers)
    assert (1,) in [verdict.ranks for verdict in ledger.summary.stragglers]


def test_a_slow_data_loader_is_named_though_no_rank_tells_its_own_time(tmp_path):
    (verdict,) = run(tmp_path, "--waits", 3, "--silent").ledger.summary.stragglers

    assert (verdict.ranks, verdict.evidence) == ((3,), "data wait")
    assert re.search(r"it waits 1\d\.\d ms of an iteration for data, they \d\.\d", verdict.why)


def test_without_a_sync_point_nobody_is_named_for_what_nobody_can_know(tmp_path):
    ledger = run(tmp_path, "--slow", 2, "--by", 1.3, "--silent").ledger

    assert ledger.summary.stragglers == () and not ledger.told("straggler")
    assert "run_straggler/named_ranks" not in ledger.summary.metrics
