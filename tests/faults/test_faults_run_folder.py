"""Writers of a run folder: aggregators started by hand, and jobs that share a node or a name."""

import os
import re
import signal
import time
from contextlib import suppress

import jobs
import pytest
from after_fault import assert_whole
from cli_process import read_until

from effllm.config.settings import Config, secret_path

pytestmark = pytest.mark.faults

LOOP = "loop.py"


def serve(cli, bind):
    process = cli.start("serve", "--bind", bind, "--run-dir", "runs", "--run-name", "one", EFFICIENTLLM_SINKS="none")
    line = read_until(process, "EFFICIENTLLM_ENDPOINT=")[-1]
    return process, line.strip().removeprefix("export EFFICIENTLLM_ENDPOINT=")


@pytest.mark.fault("aggregator-by-hand")
def test_aggregator_restarted_by_hand_continues_the_run(cli, launch):
    process, endpoint = serve(cli, "127.0.0.1:0")
    ledger = jobs.Ledger(cli.folder / "runs" / "one")
    job = launch.python(LOOP, "--until", "enough", endpoint=endpoint, secret_file=secret_path(Config()))
    jobs.until(lambda: ledger.num_windows >= 5)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)

    process, again = serve(cli, re.sub("tcp://", "", endpoint))

    assert again == endpoint
    before = ledger.num_windows
    jobs.until(lambda: ledger.num_windows >= before + 5)
    count = job.finish()
    process.communicate(timeout=60)
    summary = assert_whole(ledger, {0: count})
    assert (process.returncode, summary.attempts, summary.coverage.reports_lost) == (0, 1, 0)
    assert sum(summary.goodput.seconds.values()) == pytest.approx(summary.goodput.elapsed_s, rel=1e-6)
    assert summary.goodput.seconds["restart_gap"] == 0.0
    assert not (ledger.folder / "lock").exists()


@pytest.mark.fault("two-jobs")
def test_second_job_with_a_used_run_name_writes_to_another_folder(launch):
    environ = {"SLURM_JOB_ID": "4711"}  # both jobs have one Slurm job id, like two attempts of a job
    one = launch.python(LOOP, "--until", "enough", "--tokens", 7, run_name="same", environ=environ)
    jobs.until(lambda: one.num_windows)
    two = launch.python(LOOP, "--until", "enough", "--tokens", 11, run_name="same", environ=environ)
    beside = jobs.Ledger(one.runs()[0].with_name("same-2"))
    jobs.until(lambda: beside.num_windows)  # the second job waits six seconds for the first job's folder
    second, first = two.finish(), one.finish()

    assert [folder.name for folder in one.runs()] == ["same", "same-2"]
    assert_whole(jobs.Ledger(one.runs()[0]), {0: first}, tokens=7)
    assert_whole(beside, {0: second}, tokens=11)
    (line,) = [line for line in two.stdout.splitlines() if "another run is writing to" in line]
    assert "same-2" in line and "EFFICIENTLLM_RUN_NAME" in line


def assert_two_folders(one, two):
    assert [folder.name for folder in one.runs()] == ["same", "same-2"]
    for folder, job, tokens in zip(one.runs(), (one, two), (7, 11), strict=True):
        assert_whole(jobs.Ledger(folder), {0: len(job.output()["steps"])}, tokens=tokens)


@pytest.mark.fault("two-jobs")
def test_jobs_that_start_together_with_one_run_name_write_two_complete_folders(launch):
    one = launch.python(LOOP, "--iterations", 200, "--tokens", 7, run_name="same")
    jobs.until(one.runs)
    two = launch.python(LOOP, "--iterations", 400, "--tokens", 11, run_name="same")

    assert_two_folders(one.done(), two.done())


@pytest.mark.fault("two-jobs")
def test_run_that_completes_while_the_next_job_waits_for_its_folder_stays_complete(launch):
    one = launch.python(LOOP, "--until", "enough", "--tokens", 7, run_name="same")
    jobs.until(lambda: one.num_windows)
    (aggregator,) = one.find("effllm.server.process")
    os.kill(aggregator, signal.SIGSTOP)  # a stalled disk at the end of the first job
    (one.folder / "enough").touch()
    two = launch.python(LOOP, "--iterations", 300, "--tokens", 11, run_name="same")
    jobs.until(lambda: two.find("effllm.server.process"))
    time.sleep(4.0)
    os.kill(aggregator, signal.SIGCONT)

    assert_two_folders(one.done(), two.done())


@pytest.mark.fault("everything-killed")
def test_job_restarted_with_the_same_run_name_is_the_next_attempt(launch):
    one = launch.python(LOOP, "--iterations", 100, "--at", 57, "--end", "kill", run_name="same").wait()
    two = launch.python(LOOP, "--iterations", 30, run_name="same").done()
    assert not one.left()
    summary = two.ledger.summary

    assert (summary.status, summary.attempts, summary.iterations) == ("completed", 2, 57 + 30)
    # The second job begins at iteration 1 again, so all 57 iterations of the first job count as redone.
    assert summary.goodput.redone_iterations == 57
    assert summary.goodput.attempts[1].gap_before_s > 0.0
    assert "attempt 2 continues" in two.stdout and "killed at iteration 57" in two.stdout
    assert summary.overhead.agents_cpu_s > 0.0
    assert summary.overhead.sent_bytes <= summary.overhead.received_bytes * 1.1


@pytest.mark.fault("exits")
def test_trainer_killed_before_its_agent_joined_is_recorded(launch):
    job = launch.python(LOOP, "--iterations", 100, "--at", 57, "--end", "kill")
    (agent,) = jobs.until(lambda: job.find("effllm.agent.agent"))
    os.kill(agent, signal.SIGSTOP)
    job.wait()
    os.kill(agent, signal.SIGCONT)
    # Wait for the aggregator; on a slow machine, all processes may have ended before this check.
    jobs.until(lambda: job.find("effllm.server.process") or not set(jobs.processes(job.token)))
    with suppress(ProcessLookupError):
        os.kill(agent, signal.SIGSTOP)
        time.sleep(2.5)  # meanwhile the aggregator checks several times whether the job has ended
        os.kill(agent, signal.SIGCONT)
    assert not job.left()

    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.tokens) == ("killed", 57, 5700)
