"""A job with too few file descriptors is rejected at its start; descriptors can also run out later."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import jobs
import psutil
import pytest
from after_fault import assert_whole
from builders import hello

from effllm.network.transport import Link, make_context
from effllm.records.wire import Rejected

pytestmark = [pytest.mark.faults, pytest.mark.fault("descriptors")]

LOOP = str(jobs.SCRIPTS / "loop.py")
FLOOD = str(jobs.Path(__file__).parents[1] / "flood.py")

#: A world of 200 ranks needs 1.2 * 200 + 256 open files.
TOO_FEW = "496 open files are needed and 120 are allowed: raise the hard limit, by ulimit -Hn 496 in the shell of root"

#: A script that trains, and checks that the limits of the process did not change.
KEEPS_ITS_LIMITS = """
import resource, sys
before = resource.getrlimit(resource.RLIMIT_NOFILE)
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
assert resource.getrlimit(resource.RLIMIT_NOFILE) == before
"""


def limited(hard):
    """Return a command prefix that sets this hard limit of open files; the command cannot raise the limit."""
    if not shutil.which("prlimit") or (os.geteuid() == 0 and not shutil.which("setpriv")):
        pytest.skip("there is no prlimit or no setpriv, to drop root's right to raise limits")
    least = ["setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource"] if os.geteuid() == 0 else []
    return [*least, "prlimit", f"--nofile=60:{hard}"]


def rank_of_mpirun(launch, rank, *prefix):
    """Start one of 200 ranks, with mpirun's variables."""
    script = launch._folder / "keeps_its_limits.py"
    script.write_text(KEEPS_ITS_LIMITS)
    environ = {**jobs.openmpi_environ(rank, 200), "PMIX_NAMESPACE": "launch"}
    command = [*prefix, sys.executable, str(script), LOOP, "--iterations", "60"]
    return launch._job().start(command, {**launch.environ({}), **environ})


def test_job_without_enough_descriptors_trains_without_metrics(launch):
    first = rank_of_mpirun(launch, 0, *limited(120))
    folder = launch._folder / "runs"
    jobs.until(lambda: list(folder.glob(".address-*")))
    other = rank_of_mpirun(launch, 7)
    first.done()
    other.done()

    line, again = first.our_errors
    assert again.startswith(f"[EfficientLLM] this job ran without metrics: {TOO_FEW}")
    assert line.startswith(f"[EfficientLLM] no metrics, training goes on: {TOO_FEW}")
    assert other.our_errors == [], "only rank 0 reports it"
    assert [len(job.output()["steps"]) for job in (first, other)] == [60, 60]
    assert list(folder.iterdir()) == []
    assert max(job.max_step_s() for job in (first, other)) < 0.2


@contextmanager
def silent_connections(port):
    """Keep 300 connections open that send nothing."""
    flood = subprocess.Popen([sys.executable, FLOOD, "silent", port, "300", "120"], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        flood.terminate()
        flood.wait()


@contextmanager
def serving(launch, *prefix, **settings):
    """Run a separate aggregator during the block; yield its job and its endpoint."""
    command = [sys.executable, "-m", "effllm", "serve", "--bind", "127.0.0.1:0", "--run-name", "one"]
    job = launch._job().start([*prefix, *command], launch.environ({"security": "none", **settings}))
    yield job, jobs.until(lambda: re.search(r"ENDPOINT=(\S+)", job.stdout))[1]
    if job.process.poll() is None:
        job.process.send_signal(signal.SIGTERM)
    job.done()


def test_rejected_job_of_one_rank_ends_at_once_with_status_refused(launch):
    job = launch._job()
    loop = [sys.executable, str(jobs.SCRIPTS / "loop.py")]
    environ = launch.environ({}, **jobs.long_timeouts())
    job.start(["sh", "-c", 'ulimit -n 64 && exec "$@"', "sh", *loop], environ).wait()
    at_exit = job.ledger.summary.status

    job.done()
    assert at_exit == "refused", "the trainer waits for the summary"
    assert "99 open files are needed" in job.stderr
    assert "Run refused" in job.stdout


def test_agent_that_reads_late_receives_the_reason_of_the_rejection(launch):
    with serving(launch, *limited(70)) as (_, endpoint):
        context = make_context()
        link = Link(context, endpoint)
        link.connect()
        jobs.until(lambda: link.send(hello(0, 1)))
        time.sleep(0.5)  # as on a busy host; without a wait the aggregator ends within 0.02 s

        (answer,) = [message for message in link.receive() if isinstance(message, Rejected)]
        link.close()
        context.destroy(linger=0)

    assert answer.reason.startswith("99 open files are needed and 70 are allowed")


def test_serve_rejects_a_job_that_needs_too_many_descriptors(launch):
    with serving(launch, *limited(120)) as (aggregator, endpoint):
        ranks = [
            launch.python(LOOP, "--iterations", 100, environ=jobs.rank_environ(rank, 200), endpoint=endpoint)
            for rank in (0, 7, 199)
        ]
        for rank in ranks:
            rank.done()

    (line,) = aggregator.ledger.event_texts("descriptors")
    assert line.startswith(f"a job of 200 ranks is rejected: {TOO_FEW}")
    (line,) = ranks[0].our_errors
    assert line.startswith(f"[EfficientLLM] no metrics, training goes on: {TOO_FEW}")
    assert [rank.our_errors for rank in ranks[1:]] == [[], []]
    assert aggregator.ledger.windows == []


def train(launch, endpoint, rank):
    """Start one of two ranks, which train until the file "enough" exists."""
    arguments = (LOOP, "--step-s", 0.04, "--until", launch._folder / "enough")
    return launch.python(*arguments, environ=jobs.rank_environ(rank, 2), endpoint=endpoint)


def iterations_of(ranks):
    return {rank: len(job.output()["steps"]) for rank, job in enumerate(ranks)}


def num_joined(ledger):
    return sum(event.kind == "joined" for event in ledger.events)


def test_job_that_ends_without_free_descriptors_keeps_totals(launch):
    with serving(launch, "prlimit", "--nofile=60:120") as (aggregator, endpoint):
        ledger = jobs.Ledger(launch._folder / "runs" / "one")
        ranks = [train(launch, endpoint, rank) for rank in (0, 1)]
        jobs.until(lambda: num_joined(ledger) == 2)
        with silent_connections(endpoint.rpartition(":")[2]):
            jobs.until(lambda: [text for text in ledger.event_texts("rejected") if "connect" in text])
            (launch._folder / "enough").touch()
            for rank in ranks:
                rank.done()
            aggregator.wait()

    assert_whole(ledger, iterations_of(ranks))


def test_aggregator_without_descriptors_uses_little_cpu_and_recovers(launch):
    with serving(launch, "prlimit", "--nofile=60:120") as (aggregator, endpoint):
        ledger = jobs.Ledger(launch._folder / "runs" / "one")
        first = train(launch, endpoint, 0)
        jobs.until(lambda: num_joined(ledger) == 1)
        server = psutil.Process(aggregator.process.pid)
        with silent_connections(endpoint.rpartition(":")[2]):
            (line,) = jobs.until(lambda: [text for text in ledger.event_texts("rejected") if "connect" in text])
            second = train(launch, endpoint, 1)
            jobs.until(lambda: server.num_fds() < 120)  # the aggregator can still open files
            before, began_s = server.cpu_times(), time.monotonic()
            time.sleep(3.0)  # the measured time
            after, took_s = server.cpu_times(), time.monotonic() - began_s
            is_kept_out = num_joined(ledger) == 1
        jobs.until(lambda: num_joined(ledger) == 2)
        (launch._folder / "enough").touch()
        for rank in (first, second):
            rank.done()
        aggregator.wait()

    assert is_kept_out
    assert line == "no further rank can connect: Too many open files; the limit of open files (ulimit -n) is 120"
    # An aggregator that polled continuously used 0.77 of a core.
    assert (after.user + after.system - before.user - before.system) / took_s < 0.2
    assert_whole(ledger, iterations_of((first, second)))
    assert sum("no further rank can connect" in text for text in ledger.event_texts("rejected")) == 1


MANY_CHILDREN = """
import resource, subprocess, time
resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
children = [subprocess.Popen(["sleep", "60"]) for _ in range(60)]
try:
    import effllm
    with effllm.monitor(1000) as monitored:
        for _ in range(20):
            time.sleep(0.05)
            monitored.iteration(tokens=100)
finally:
    for child in children:
        child.kill()
"""


def test_agent_reads_more_processes_than_the_soft_limit_of_the_job_has_files(launch):
    job = launch.code(MANY_CHILDREN, device="host", collection_interval=0.2).done()

    assert job.ledger.event_texts("agent") == []
    assert job.ledger.summary.metrics["amu_gb"].value > 0
