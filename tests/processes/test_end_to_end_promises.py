"""Training never waits for effllm and never fails because of effllm, also if processes of effllm end or are killed."""

import os
import signal
import subprocess
import sys
import time

import jobs
import psutil
import pytest

from effllm.views.text.summary import status_text

LOOP = "loop.py"
SLOWEST_STEP_S = 0.5  # a step takes 0.01 s, a call some microseconds; a wait would take longer
SOON_S = 12.0  # an aggregator without a BYE message waits for 15 s


# --- killed processes ---


@pytest.mark.fault("aggregator-sigkill")
def test_repeatedly_killed_aggregator_loses_no_token(launch):
    job = launch.python(LOOP, "--until", "enough", "--tokens", 7)
    killed, ports = [], []
    for windows in (3, 12):
        jobs.until(lambda windows=windows: job.num_windows >= windows)
        (pid,) = jobs.until(lambda: [pid for pid in job.find("effllm.server.process") if pid not in killed])
        killed.append(pid)
        ports.append(jobs.listening_ports(pid))
        os.kill(pid, signal.SIGKILL)
    jobs.until(lambda: job.num_windows >= 20)
    count = job.finish()
    summary = job.ledger.summary

    assert (summary.iterations, summary.tokens, summary.samples) == (count, 7 * count, 2 * count)
    assert summary.status == "completed"
    assert summary.coverage.reports_lost == 0
    assert ports[0] == ports[1]
    assert job.max_step_s() < SLOWEST_STEP_S
    assert [row.iteration_last for row in job.ledger.ranks] == [*range(10, count + 1, 10), count]
    assert any("aggregator died" in text for text in job.ledger.event_texts("aggregator"))


def test_aggregator_waits_for_late_ranks(launch):
    aggregator = launch.aggregator()
    jobs.until(lambda: aggregator.job.left(within_s=0.0))  # a new process has no environment for a moment
    assert aggregator.job.left(within_s=1.5), "the aggregator ended before a rank joined"
    for rank in launch.ranks(aggregator, 1, LOOP, "--iterations", 20):
        rank.done()

    assert not aggregator.job.left(within_s=20.0)
    assert aggregator.ledger.summary.status == "completed"


@pytest.fixture
def without_agent(launch):
    """Start a job of two ranks and kill the agent of the second rank; return the aggregator and the ranks."""
    aggregator = launch.aggregator()
    ranks = launch.ranks(aggregator, 2, LOOP, "--until", "enough")
    jobs.until(lambda: aggregator.ledger.num_windows)
    (agent,) = ranks[1].find("effllm.agent.agent")
    os.kill(agent, signal.SIGKILL)
    return aggregator, ranks


@pytest.mark.fault("agent-killed")
def test_rank_with_a_killed_agent_continues_and_is_reported_missing(without_agent):
    aggregator, ranks = without_agent
    ledger = aggregator.ledger
    jobs.until(lambda: any("closed without rank 1" in text for text in ledger.event_texts("missing")))
    for rank in ranks:
        (rank.folder / "enough").touch()
    count, _ = (rank.finish() for rank in ranks)
    assert all(rank.max_step_s() < SLOWEST_STEP_S for rank in ranks)
    assert not aggregator.job.left()  # the aggregator ends after three missing heartbeats

    assert ledger.windows[-1].coverage.missing_ranks == (1,)
    assert "missing 1" in aggregator.job.blocks[-1]["rest"]
    assert ledger.summary.status == "ended"
    rows = [row for row in ledger.ranks if row.rank == 0]
    assert sum(row.tokens for row in rows) == 100 * count


@pytest.mark.fault("exits")
def test_last_iteration_of_a_killed_trainer_is_recorded(launch):
    job = launch.python(LOOP, "--served", "--iterations", 100, "--at", 57, "--end", "kill").wait()

    assert job.code == -signal.SIGKILL
    assert not job.left(within_s=SOON_S)
    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.tokens, summary.samples) == ("killed", 57, 5700, 114)
    assert job.ledger.ranks[-1].iteration_last == 57
    assert job.blocks[-1]["iteration"] == "57"


@pytest.mark.fault("exits")
def test_summary_is_written_for_a_trainer_killed_before_an_iteration(launch):
    job = launch.code(
        "import os, signal, effllm\neffllm.initialize_efficientllm_metrics(5)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    ).wait()

    assert not job.left(within_s=SOON_S)
    assert (job.ledger.summary.status, job.ledger.summary.iterations) == ("killed", 0)
    assert not job.blocks


def test_stopped_agent_and_aggregator_lose_no_iterations(launch):
    job = launch.python(LOOP, "--until", "enough")
    jobs.until(lambda: job.num_windows)
    stopped = job.find("effllm.agent.agent") + job.find("effllm.server.process")
    assert len(stopped) == 2
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.0)  # a hundred iterations
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    count = job.finish()

    assert job.max_step_s() < SLOWEST_STEP_S
    assert (job.ledger.summary.iterations, job.ledger.summary.tokens) == (count, 100 * count)


# --- ends ---


@pytest.mark.parametrize(
    ("end", "code", "status"),
    [
        ("raise", 1, "failed"),
        ("exit", 3, "completed"),
        ("terminate", -signal.SIGTERM, "killed"),
        ("interrupt", -signal.SIGINT, "interrupted"),
        ("leave", 4, "failed"),
    ],
)
@pytest.mark.fault("exits")
def test_iterations_and_status_are_recorded_for_each_kind_of_exit(launch, end, code, status):
    job = launch.python(LOOP, "--served", "--at", 15, "--end", end).wait()

    assert job.code == code
    assert not job.left(within_s=SOON_S)
    summary = job.ledger.summary
    assert (summary.status, summary.iterations, summary.tokens) == (status, 15, 1500)
    assert f"[EfficientLLM] Run {status_text(status)}" in job.stdout


@pytest.mark.fault("exits")
def test_status_of_a_job_with_a_failed_rank_is_failed(launch):
    aggregator = launch.aggregator()
    endpoint = aggregator.endpoint
    first = launch.python(LOOP, environ=jobs.rank_environ(0, 2), endpoint=endpoint)
    second = launch.python(LOOP, "--at", 10, "--end", "raise", environ=jobs.rank_environ(1, 2), endpoint=endpoint)
    assert (first.wait().code, second.wait().code) == (0, 1)
    assert not aggregator.job.left()

    assert aggregator.ledger.summary.status == "failed"
    assert aggregator.ledger.summary.tokens == 3000


@pytest.mark.fault("exits")
def test_end_of_a_job_waits_only_for_the_summary(launch):
    job = launch.python(LOOP, "--served").wait()

    assert job.ledger.summary.status == "completed"  # the summary exists when the trainer has ended
    assert not job.left(within_s=SOON_S)
    assert list(job.ledger.folder.glob("lock")) == []


# --- cost ---


def test_effllm_starts_no_thread_in_the_trainer(launch):
    job = launch.python(LOOP).done()

    assert job.output()["threads"] == ["MainThread"]


def test_trainer_imports_only_the_standard_library(launch):
    job = launch.code(
        """
import json, sys
before = set(sys.modules)
import effllm
with effllm.monitor(parameters=10) as monitor:
    for _ in range(3):
        monitor.iteration(tokens=1)
ours = {name.partition(".")[0] for name in set(sys.modules) - before}
json.dump(sorted(ours - set(sys.stdlib_module_names)), open("truth.json", "w"))
"""
    ).done()

    assert job.output() == ["effllm"]


def test_log_metrics_returns_its_six_keys_without_waiting(launch):
    job = launch.python(LOOP, "--served", "--iterations", 60).done()
    truth = job.output()

    assert set(truth["values"]) == {f"efficientllm/{tag}" for tag in jobs.FORMATS}
    assert sorted(truth["logging_s"])[30] < 0.001
    assert job.max_step_s() < SLOWEST_STEP_S


@pytest.mark.alone
def test_agent_uses_less_than_a_tenth_of_a_cpu_core(launch):
    job = launch.python(LOOP, "--step-s", 0.3, "--until", "enough", collection_interval=1.0)
    (agent,) = jobs.until(lambda: job.find("effllm.agent.agent"))
    jobs.until(lambda: job.runs() and (job.ledger.folder / "run.json").exists())
    before = psutil.Process(agent).cpu_times()
    time.sleep(1.5)
    after = psutil.Process(agent).cpu_times()
    job.finish()

    assert (after.user + after.system) - (before.user + before.system) < 0.15


# --- forked children ---

FORKS = """
import os, socket, sys
import effllm.efficientllm_metrics as effllm

effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(1, 21):
    collector.record_iteration_start()
    if iteration in (5, 12):
        child = os.fork()
        if child == 0:
            collector.record_iteration_end(1_000_000, 1_000)
            for number in range(100):
                collector.record_iteration_start()
                collector.record_iteration_end(1_000_000, 1_000)
                collector.log_metrics(number, 99.0)
            with collector.phase("evaluation"):
                pass
            ports = 0
            for name in os.listdir("/proc/self/fd"):
                try:
                    with socket.socket(fileno=os.dup(int(name))) as found:
                        ports += found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                except OSError:
                    pass
            if iteration == 5:
                os._exit(40 if ports else 0)
            if ports:
                os._exit(41)
            effllm.finalize_efficientllm_metrics()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
    collector.record_iteration_end(10, 1)
effllm.finalize_efficientllm_metrics()
"""


@pytest.mark.fault("forked-worker")
def test_forked_children_record_nothing_and_open_no_port(launch):
    job = launch.code(FORKS, log_interval=5).done()
    summary = job.ledger.summary

    assert (summary.status, summary.iterations, summary.tokens, summary.samples) == ("completed", 20, 200, 20)
    assert summary.loss is None
    assert [row.iteration_last for row in job.ledger.ranks] == [5, 10, 15, 20, 20]


@pytest.mark.alone
@pytest.mark.fault("exits")
def test_pipe_of_a_killed_job_closes_within_five_seconds(launch, tmp_path):
    environ = launch.environ({})
    command = [sys.executable, str(jobs.SCRIPTS / LOOP), "--at", "15", "--end", "kill"]
    with subprocess.Popen(
        command, env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        process.wait(20)
        killed_s = time.monotonic()
        output = process.stdout.read()

    assert time.monotonic() - killed_s < 5.0
    assert b"[EfficientLLM] Run killed" in output


COUNTING_LOOP = """
import time
import effllm
effllm.initialize_efficientllm_metrics(1000)
collector = effllm.get_metrics_collector()
for iteration in range(number):
    collector.record_iteration_start()
    if sleep_s:
        time.sleep(sleep_s)
    collector.record_iteration_end(-5 if iteration == wrong else 100, 2)
effllm.finalize_efficientllm_metrics()
"""
RATES = ("tt_tokens_per_param_per_sec", "st_samples_per_param_per_sec", "run_throughput/tokens_per_second")


def counted_run(launch, number, sleep_s, wrong=-1, **settings):
    """Run a loop; the iteration ``wrong`` has an invalid count."""
    script = f"number, sleep_s, wrong = {number}, {sleep_s}, {wrong}{COUNTING_LOOP}"
    return launch.code(script, **settings).done().ledger.summary


def test_rejected_count_is_a_gap(launch):
    summary = counted_run(launch, 60, 0.005, 30, log_interval=10)

    assert (summary.iterations, summary.tokens, summary.samples) == (60, None, None)
    assert (summary.measured_tokens, summary.measured_samples) == (5900, 118)
    assert all("1 count was rejected" in summary.metrics[tag].doubt for tag in RATES)
    assert summary.metrics["al_seconds"].doubt is None
    assert any(text.startswith("total tokens and samples: 1 count was rejected") for text in summary.not_measured)


@pytest.mark.fault("late-aggregator")
@pytest.mark.parametrize(
    ("number", "sleep_s", "settings"),
    [(3000, 0.0012, {"history_size": 16, "log_interval": 1}), (1_000_000, 0.0, {"log_interval": 100})],
    ids=["sixteen reports in the buffer", "a million iterations"],
)
def test_counts_are_exact_or_have_a_gap(launch, number, sleep_s, settings):
    summary = counted_run(launch, number, sleep_s, **settings)

    assert (summary.status, summary.iterations) == ("completed", number)
    assert summary.measured_tokens == pytest.approx(100 * number * summary.measured_iterations_ratio)
    if summary.measured_iterations_ratio == 1.0:
        assert (summary.tokens, summary.samples, summary.coverage.reports_lost) == (100 * number, 2 * number, 0)
    else:
        assert (summary.tokens, summary.samples) == (None, None)
        assert any("never arrived" in text for text in summary.not_measured)
        assert all(summary.metrics[tag].doubt is None for tag in RATES), "tokens and time are of the same windows"
