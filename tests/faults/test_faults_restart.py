"""Jobs that are started again: by torchrun, by hand, with fewer and with more ranks."""

import json
from itertools import groupby

import jobs
import pytest

pytestmark = [pytest.mark.faults, *jobs.needs_torch]

LOOP = "resuming_loop.py"


@pytest.fixture(autouse=True)
def a_store_for_each_start(monkeypatch):
    """Make torchrun create a new store per start: gloo of torch 2.13 finds addresses of ended ranks in an old store."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def adds_up(goodput):
    assert min(goodput.seconds.values()) >= 0.0
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.elapsed_s, rel=1e-6)
    return True


def progress(folder):
    """Return the number of iterations before the newest start, and the number of the last iteration."""
    path = folder / "progress"
    done, _, last = (path.read_text() if path.exists() else "").partition(" ")
    return (int(done), int(last)) if last else (-1, 0)


def starts(folder, rank=0):
    path = folder / f"starts-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.fault("worker-killed")
def test_restarted_job_counts_redone_iterations(launch):
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--local-addr=127.0.0.1"]
    job = launch.torchrun(
        options, LOOP, "--kill-rank", 1, "--at", 34, "--step-s", 0.06, environ=jobs.long_timeouts()
    ).wait()
    assert job.code == 0, job.stderr
    assert not job.left()
    summary = job.ledger.summary
    goodput = summary.goodput

    # The checkpoint is from iteration 20: iterations 21 to 34 of the first attempt were lost.
    assert (summary.status, summary.attempts, summary.iterations) == ("completed", 2, 34 + 40)
    assert summary.tokens == 2 * 100 * (34 + 40)
    assert goodput.redone_iterations == 14
    first, second = goodput.attempts
    assert first.status in ("failed", "killed"), "failed if rank 0 lost its peer first"
    assert (first.first, first.last) == (1, 34)
    assert (second.status, second.first, second.last) == ("completed", 21, 60)
    assert goodput.seconds["restart_gap"] == pytest.approx(second.gap_before_s, rel=1e-6)
    assert second.gap_before_s > 0.0
    assert goodput.joules["restart_gap"] is None
    assert adds_up(goodput)
    # The lost reports are those of two windows: iterations 21 to 30 and iterations 31 to 34.
    lost = [row for row in job.ledger.ranks if row.attempt == 1 and row.iteration_first > 20]
    # A rank's step also has its wait for the other rank's data, which is not repeated work.
    assert goodput.rank_seconds["redone"] == pytest.approx(sum(row.busy_s for row in lost), rel=0.02)
    assert goodput.joules["redone"] > 0.0
    assert sum(row.tokens for row in job.ledger.ranks) == summary.tokens
    assert {report.attempt for report in job.ledger.windows} == {1, 2}


@pytest.mark.fault("elastic-restart")
def test_job_whose_world_size_changes_is_one_run(launch, tmp_path):
    quick = "last_call_timeout=1,keep_alive_interval=2,keep_alive_max_attempt=5,join_timeout=120"
    port = jobs.unused_port()
    options = [
        "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5", "--rdzv-backend=c10d", "--rdzv-id=elastic",
        f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={quick}", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    there = tmp_path / "shared"
    there.mkdir()
    one = launch.torchrun(options, LOOP, "--folder", there, "--until", there / "enough")
    # The first process hosts the store; the test kills another process.
    jobs.until(lambda: port in jobs.listening_ports(one.process.pid))
    two = launch.torchrun(options, LOOP, "--folder", there, "--until", there / "enough")

    def trained(world_size):
        begun = starts(there)
        done, last = progress(there)
        return begun and done == begun[-1]["first"] - 1 and begun[-1]["world_size"] == world_size and last >= done + 24

    jobs.until(lambda: trained(2))
    two.end()
    jobs.until(lambda: trained(1))
    again = launch.torchrun(options, LOOP, "--folder", there, "--until", there / "enough")
    jobs.until(lambda: trained(2))
    (there / "enough").touch()
    assert (one.wait().code, again.wait().code) == (0, 0), one.stderr + again.stderr
    assert not one.left() and not again.left()
    summary = one.ledger.summary  # all ranks have the same folder
    attempts, begun = summary.goodput.attempts, starts(there)

    assert (summary.status, summary.attempts) == ("completed", len(attempts))
    # On a busy machine torchrun may start a world more than once, or a world without a late process. It may end such a
    # world before the first iteration.
    attempts = [attempt for attempt in attempts if attempt.first is not None]
    assert [size for size, _ in groupby(attempt.world_size for attempt in attempts)][-3:] == [2, 1, 2]
    assert [(one.world_size, one.first) for one in attempts] == [(one["world_size"], one["first"]) for one in begun]
    # After a restart before the first checkpoint, the loop begins at iteration 1 and passes no first iteration. Redone
    # iterations are known only for the attempts that follow.
    known_from = max((i + 1 for i, start in enumerate(begun) if i and start["first"] == 1), default=0)
    redone = [
        max(attempt.last - start["first"] + 1, 0) if i >= known_from else None
        for i, (attempt, start) in enumerate(zip(attempts, begun[1:], strict=False))
    ]
    assert [attempt.redone_iterations for attempt in attempts] == [*redone, 0]
    assert summary.goodput.seconds["restart_gap"] > 0.0
    assert adds_up(summary.goodput)
    assert summary.coverage.ranks_expected == 2
