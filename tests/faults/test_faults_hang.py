"""Stalls of real processes: positions are reported, stacks are saved, and no iteration is lost."""

import os
import re
import signal
import time

import jobs
import pytest
from after_fault import assert_readable, assert_whole
from jobs import needs_py_spy

from effllm.devices.simulated import waveform_of

pytestmark = pytest.mark.faults

LOCKSTEP = "lockstep.py"
LONG_STEPS = ("--step-s", 0.05)  # windows of 1 s, which contain samples also on a busy machine
STALL = re.compile(
    r"stalled: rank (?P<rank>\d+) \(node \S+, (?P<device>\S+)\) at iteration \d+( \([a-z ]+\))? "
    r"for (?P<seconds>\d+) s(?P<stopped>, stopped by a signal)?, utilization (?P<percent>\d+) %, (?P<watts>\d+) W"
    r"; (?P<others>.*)"
)


@pytest.fixture
def meeting(tmp_path):
    """Return the file through which the ranks synchronize."""
    path = tmp_path / "meeting"
    path.write_bytes(bytes(64))
    return path


def stalls(ledger):
    found = [(text, STALL.fullmatch(text)) for text in ledger.event_texts("stalled")]
    assert all(match for _, match in found), found
    return [match for _, match in found]


def in_event_file(ledger, kind):
    path = ledger.folder / "events.jsonl"
    return path.exists() and f'"kind":"{kind}"'.encode() in path.read_bytes()


def end(aggregator, ranks):
    for rank in ranks:
        rank.done()
    assert not aggregator.job.left()


@pytest.mark.fault("trainer-stopped")
def test_stopped_trainer_is_reported_and_loses_no_data(launch, meeting):
    aggregator = launch.aggregator(log_interval=20, stall_seconds=2)
    enough = meeting.with_name("enough")
    options = (*LONG_STEPS, "--until", enough)
    ranks = launch.ranks(aggregator, 3, LOCKSTEP, meeting, *options, log_interval=20, stall_seconds=2)
    ledger = aggregator.ledger
    jobs.until(lambda: ledger.num_windows)
    stopped_s = time.monotonic()
    os.kill(ranks[1].process.pid, signal.SIGSTOP)
    jobs.until(lambda: in_event_file(ledger, "stack"))
    reported_s = time.monotonic()
    os.kill(ranks[1].process.pid, signal.SIGCONT)
    jobs.until(lambda: in_event_file(ledger, "resumed"))
    resumed_s = time.monotonic()
    enough.touch()
    end(aggregator, ranks)
    steps = ranks[1].output()["steps"]

    (stall,) = stalls(ledger)
    assert (stall["rank"], stall["device"].rpartition("-")[2], bool(stall["stopped"])) == ("1", "1", True)
    assert re.fullmatch(r"2 others at \d+", stall["others"])
    device = waveform_of(1)
    between = [device.power_w(stopped_s + at / 500 * (reported_s - stopped_s)) for at in range(-100, 501)]
    assert min(between) - 2 <= int(stall["watts"]) <= max(between) + 2
    assert 60 <= int(stall["percent"]) <= 96
    assert len(ledger.event_texts("resumed")) == 1
    summary = assert_whole(ledger, dict.fromkeys(range(3), len(steps)))
    assert 1.5 <= summary.metrics["health/stalled_s"].value <= resumed_s - stopped_s + 0.5
    assert "[EfficientLLM] stalled: rank 1 " in aggregator.job.stdout
    assert "[EfficientLLM] resumed after " in aggregator.job.stdout


@needs_py_spy
@pytest.mark.fault("trainer-stopped")
def test_stacks_of_a_hanging_and_a_waiting_rank_are_saved(launch, meeting):
    pipe = meeting.with_name("pipe")
    os.mkfifo(pipe)
    aggregator = launch.aggregator(log_interval=20, stall_seconds=2)
    options = (*LONG_STEPS, "--iterations", 60, "--stand", 40, "--pipe", pipe, "--native")
    ranks = launch.ranks(aggregator, 2, LOCKSTEP, meeting, *options, log_interval=20, stall_seconds=2)
    ledger = aggregator.ledger
    jobs.until(lambda: in_event_file(ledger, "stack"))
    os.close(os.open(pipe, os.O_WRONLY))  # the rank continues
    end(aggregator, ranks)

    # Both ranks are in iteration 40; the stacks show which rank hangs.
    assert [text.partition(" for ")[0] for text in ledger.event_texts("stalled")] == [
        "stalled: all 2 ranks at iteration 40"
    ]
    stacks = {path.name: path.read_text() for path in (ledger.folder / "stacks").iterdir()}
    assert set(stacks) == {"rank-0-iteration-40.txt", "rank-1-iteration-40.txt"}
    assert "    all_reduce (lockstep.py:" in stacks["rank-0-iteration-40.txt"]
    assert "    stand (lockstep.py:" in stacks["rank-1-iteration-40.txt"]
    assert all((ledger.folder / "stacks" / name).stat().st_mode & 0o777 == 0o600 for name in stacks)
    (text,) = ledger.event_texts("stack")
    assert "rank 0: all_reduce (lockstep.py:" in text
    assert "rank 1: stand (lockstep.py:" in text
    assert_whole(ledger, dict.fromkeys(range(2), 60))
    assert_readable(ledger.folder)


@pytest.mark.fault("trainer-stopped")
def test_long_checkpoint_is_not_a_stall(launch, meeting):
    aggregator = launch.aggregator(log_interval=20, stall_seconds=3)
    options = (*LONG_STEPS, "--iterations", 60, "--stand", 40, "--seconds", 8, "--phase", "checkpoint")
    ranks = launch.ranks(aggregator, 2, LOCKSTEP, meeting, *options, log_interval=20, stall_seconds=3)
    end(aggregator, ranks)

    assert aggregator.ledger.event_texts("stalled") == []
    assert assert_whole(aggregator.ledger, dict.fromkeys(range(2), 60)).metrics["health/stalled_s"].value == 0.0


@pytest.mark.fault("trainer-stopped")
def test_job_killed_in_a_stall_has_the_status_stalled(launch, meeting):
    aggregator = launch.aggregator(stall_seconds=2)
    ranks = launch.ranks(aggregator, 2, LOCKSTEP, meeting, "--until", "for ever", stall_seconds=2)
    ledger = aggregator.ledger
    jobs.until(lambda: ledger.num_windows >= 2)
    os.kill(ranks[0].process.pid, signal.SIGSTOP)
    jobs.until(lambda: in_event_file(ledger, "stalled"))
    jobs.until(lambda: ledger.summary.status == "stalled")  # set during the stall: later, a kill may end all processes
    assert "Run stalled" not in aggregator.job.stdout
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGKILL)
        rank.wait()
    assert not aggregator.job.left()

    assert ledger.summary.status == "stalled"
    assert ledger.summary.is_over
    assert "[EfficientLLM] Run stalled" in aggregator.job.stdout
    assert ledger.event_texts("resumed") == []


@pytest.mark.fault("trainer-stopped", "aggregator-sigkill")
def test_stall_continues_when_the_aggregator_is_replaced(launch):
    job = launch.python("loop.py", "--until", "enough", stall_seconds=2)
    jobs.until(lambda: job.num_windows >= 3)
    stopped_s = time.monotonic()
    os.kill(job.process.pid, signal.SIGSTOP)
    jobs.until(lambda: in_event_file(job.ledger, "stalled"))
    (server,) = job.find("effllm.server.process")
    os.kill(server, signal.SIGKILL)
    jobs.until(lambda: len(job.ledger.event_texts("stalled")) == 2)
    os.kill(job.process.pid, signal.SIGCONT)
    stalled_at_least_s = time.monotonic() - stopped_s
    jobs.until(lambda: job.ledger.event_texts("resumed"))
    resumed_s = time.monotonic()
    count = job.finish()

    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (count, 100 * count)
    stalled_s = job.ledger.summary.metrics["health/stalled_s"].value
    assert stalled_at_least_s - 0.5 <= stalled_s <= resumed_s - stopped_s + 0.5
