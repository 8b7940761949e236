"""Jobs that are ended from outside: by the scheduler, or by killing all processes at once."""

import os
import signal
import struct
import time

import jobs
import pytest
from after_fault import assert_readable, assert_whole
from run_lines import read_ranks

from effllm.agent.conversation import REPORT_EVERY_S
from effllm.job.ledger import restore
from effllm.server.process import TICK_S

pytestmark = pytest.mark.faults

LOG_INTERVAL, STEP_S = 10, 0.03
#: The files lag by at most the open window, the agent's delay for the previous window, and the write of a window.
FRESH = 2 * LOG_INTERVAL + REPORT_EVERY_S / STEP_S
FRESH_SUMMARY = FRESH + TICK_S / STEP_S  # after SIGTERM, each tick rewrites the summary

#: A script that continues to train after SIGTERM, like a trainer that saves a checkpoint; its progress is in a file.
SAVES = """
import itertools, os, signal, struct, sys, time
import effllm.efficientllm_metrics as effllm

signal.signal(signal.SIGTERM, lambda *_: None)
progress = os.open("progress", os.O_CREAT | os.O_WRONLY)
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in itertools.count(1):
    collector.record_iteration_start()
    time.sleep(0.03)
    collector.record_iteration_end(100, 2)
    os.pwrite(progress, struct.pack("q", iteration), 0)
    if os.path.exists("enough"):
        break
"""


def progress(job):
    path = job.folder / "progress"
    return struct.unpack("q", path.read_bytes())[0] if path.exists() and path.stat().st_size else 0


def send(job, number):
    """Signal all processes of a job at once, as a scheduler does through a control group."""
    pids = list(jobs.processes(job.token))
    for pid in pids:
        os.kill(pid, number)
    return pids


def fresh(job, ledger, reached, most):
    """Wait until the files lag by at most `most` iterations; this can take a while on a busy machine."""
    return jobs.until(lambda: (written := reached(ledger)) and progress(job) - written <= most and written)


def written(ledger):
    rows = list(read_ranks(ledger.folder))
    return rows[-1].iteration_last if rows else 0


def summarized(ledger):
    return ledger.summary.iterations if (ledger.folder / "summary.json").exists() else 0


def state(ledger):
    """Return the saved state of a run, or None."""
    path = ledger.folder / "state.json"
    return restore(path.read_bytes()) if path.exists() else None


def closed(ledger):
    """Return the last iteration in the saved state."""
    return LOG_INTERVAL * state(ledger).closed


def kill(job):
    """Stop, then kill all processes of a job; no process runs between the kills."""
    for pid in send(job, signal.SIGSTOP):
        os.kill(pid, signal.SIGKILL)
    job.wait()
    assert not job.left()


@pytest.mark.fault("scheduler-stop")
def test_job_ended_by_sigterm_has_all_iterations_and_status_killed(launch):
    job = launch.python("loop.py", "--until", "enough", environ=jobs.long_timeouts())
    jobs.until(lambda: job.num_windows >= 5)
    send(job, signal.SIGTERM)
    job.wait()

    assert job.code == -signal.SIGTERM
    assert not job.left()
    summary = job.ledger.summary
    assert_whole(job.ledger, {0: summary.iterations}, status="killed")
    assert "[EfficientLLM] Run killed" in job.stdout


@pytest.mark.fault("scheduler-stop")
def test_files_are_up_to_date_at_a_sigkill_after_a_sigterm(launch):
    job = launch.code(SAVES, log_interval=LOG_INTERVAL)
    jobs.until(lambda: job.num_windows >= 5)
    ledger = job.ledger
    send(job, signal.SIGTERM)
    asked = progress(job)
    time.sleep(5.0)
    jobs.until(lambda: progress(job) > asked + 100)
    last = fresh(job, ledger, written, FRESH)
    summed = fresh(job, ledger, summarized, FRESH_SUMMARY)
    kill(job)

    assert_readable(ledger.folder, unfinished=True)
    assert ledger.ranks[-1].iteration_last >= last
    assert ledger.summary.status == "killed"
    assert ledger.summary.iterations >= summed


@pytest.mark.fault("scheduler-stop")
def test_job_that_survives_sigterm_has_the_status_completed(launch):
    job = launch.code(SAVES + "effllm.finalize_efficientllm_metrics()\n", log_interval=LOG_INTERVAL)
    jobs.until(lambda: job.num_windows >= 5)
    send(job, signal.SIGTERM)
    windows = job.num_windows
    jobs.until(lambda: job.num_windows >= windows + 5)
    (job.folder / "enough").touch()
    job.done()

    assert_whole(job.ledger, {0: progress(job)})


@pytest.mark.fault("everything-killed")
def test_files_are_complete_after_all_processes_are_killed(launch):
    job = launch.code(SAVES, log_interval=LOG_INTERVAL, run_name="one")
    jobs.until(lambda: job.num_windows >= 10 and state(job.ledger))
    first = job.ledger
    last, was_closed = fresh(job, first, written, FRESH), fresh(job, first, closed, FRESH)
    kill(job)
    rows, windows = first.ranks, first.windows
    assert_readable(first.folder, unfinished=True)
    assert rows[-1].iteration_last >= last
    # A window's line is written before the lines of its ranks.
    assert [report.iteration_last for report in windows][: len(rows)] == [row.iteration_last for row in rows]
    assert len(windows) <= len(rows) + 1
    # The state may lack the last frame of reports, and no process is left to send this frame again.
    kept = sum(row.tokens for row in rows if row.iteration_last <= closed(first))
    assert closed(first) >= was_closed

    job = launch.python("loop.py", "--iterations", 100, run_name="one").done()
    summary = job.ledger.summary

    assert (summary.status, summary.attempts) == ("completed", 2)
    assert_readable(job.ledger.folder)
    assert summary.measured_tokens == 10_000 + kept
    assert [row.tokens for row in job.ledger.ranks][: len(rows)] == [row.tokens for row in rows]


@pytest.mark.fault("everything-killed")
def test_attempt_killed_before_its_first_window_is_counted(launch):
    def is_known(job, attempt):
        kept = job.runs() and state(job.ledger)
        return kept and kept.attempt == attempt

    for attempt in (1, 2):
        job = launch.code(SAVES, log_interval=100_000, run_name="one")
        jobs.until(lambda: is_known(job, attempt))  # noqa: B023
        kill(job)

    summary = launch.python("loop.py", "--iterations", 100, run_name="one").done().ledger.summary

    assert (summary.status, summary.attempts, summary.measured_tokens) == ("completed", 3, 10_000)
