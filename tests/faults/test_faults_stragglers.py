"""Real ranks, one of them slow: only the slow rank is named."""

import re
import statistics

import jobs
import pytest

pytestmark = pytest.mark.faults

RANKS = 4


def run(tmp_path, *arguments, enough=None):
    """Run a job; create the file `enough` after a straggler; return the aggregator and the own time of each rank."""
    meeting = tmp_path / "meeting"
    meeting.write_bytes(bytes(8 * (RANKS + 1)))
    with jobs.launching(tmp_path) as launcher:
        aggregator = launcher.aggregator(log_interval=10)
        ranks = launcher.ranks(aggregator, RANKS, "lockstep.py", meeting, *arguments, log_interval=10)
        events = aggregator.ledger.folder / "events.jsonl"
        if enough:
            jobs.until(lambda: events.exists() and aggregator.ledger.event_texts("straggler"), within_s=150.0)
            enough.touch()
        own_s = [statistics.median(job.done().output()["own_s"]) for job in ranks]
        aggregator.job.wait()
    return aggregator, own_s


def test_only_the_rank_that_is_ten_percent_slower_is_named(tmp_path):
    enough = tmp_path / "enough"
    options = ("--slow", 2, "--sync", "--step-s", 0.1, "--iterations", 110, "--until", enough)
    aggregator, own_s = run(tmp_path, *options, enough=enough)
    ledger, summary = aggregator.ledger, aggregator.ledger.summary

    (verdict,) = summary.stragglers
    assert (verdict.ranks, verdict.peers, verdict.evidence) == ((2,), 3, "own time")
    slow_s, others_s = own_s[2], statistics.median(own_s[:2] + own_s[3:])
    assert verdict.slowdown == pytest.approx(slow_s / others_s - 1, abs=0.05)
    assert verdict.gpu_seconds > 0 and verdict.joules > 0
    (line,) = ledger.event_texts("straggler")
    what = r"\d+\.\d % slower than its 3 peers since iteration \d+, last in \d+ % of the iterations"
    assert re.search(rf"^straggler: rank 2 \(node .*\) {what}: ", line)
    assert line in aggregator.job.stdout
    assert {one.ranks for window in ledger.windows for one in window.stragglers} == {(2,)}
    # The lost time of all ranks is a goodput class.
    lost_s = verdict.gpu_seconds + verdict.own_seconds
    assert summary.goodput.rank_seconds["straggling"] == pytest.approx(lost_s, rel=0.2)
    assert verdict.own_seconds == pytest.approx(verdict.gpu_seconds / 3)
    assert summary.metrics["straggler/waiting_gpu_seconds"].value == pytest.approx(verdict.gpu_seconds)


def test_rank_with_a_slow_data_loader_is_named_without_a_sync_point(tmp_path):
    enough = tmp_path / "enough"
    options = ("--waits", 3, "--step-s", 0.05, "--iterations", 150, "--until", enough)
    aggregator, _ = run(tmp_path, *options, enough=enough)
    (verdict,) = aggregator.ledger.summary.stragglers

    assert (verdict.ranks, verdict.evidence) == ((3,), "data wait")
    its_ms, theirs_ms = re.search(r"data wait (\d+\.\d) ms per iteration, peers (\d+\.\d) ms", verdict.why).groups()
    assert float(its_ms) >= 10.0 and float(its_ms) - float(theirs_ms) == pytest.approx(10.0, rel=0.5)


def test_rank_with_slow_steps_is_not_named_without_a_sync_point(tmp_path):
    ledger = run(tmp_path, "--slow", 2, "--by", 1.3, "--step-s", 0.05, "--iterations", 150)[0].ledger

    assert ledger.summary.stragglers == () and not ledger.event_texts("straggler")
    assert "run_straggler/named_ranks" not in ledger.summary.metrics
