"""Agents that crash or cannot start: training continues, a line on stderr has the reason, and the job ends in time."""

import os
import signal
import sys

import jobs
import psutil
import pytest

pytestmark = pytest.mark.faults

LOOP = "loop.py"


@pytest.mark.fault("agent-killed")
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=jobs.needs_torch)])
def test_summary_is_written_without_the_agent_of_rank_0(launch, num_ranks):
    if num_ranks == 1:
        job = launch.python(LOOP, "--until", "enough")
    else:
        options = ["--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
        job = launch.torchrun(options, "torch_loop.py", "--until", "enough", environ=jobs.long_timeouts())
    jobs.until(lambda: job.num_windows)
    (server,) = job.find("effllm.server.process")
    os.kill(psutil.Process(server).ppid(), signal.SIGKILL)
    (job.folder / "enough").touch()
    job.wait()
    if num_ranks == 2:
        assert job.ledger.summary.is_over, "it is there when the launcher ends"
    assert not job.left()

    assert job.code == 0
    summary = job.ledger.summary
    assert (summary.status, summary.is_over) == ("ended", True)
    assert summary.iterations >= 10
    assert any("its agent ended without a BYE" in text for text in job.ledger.event_texts("rank_lost"))
    assert sum("the agent of rank 0 was killed by signal 9" in line for line in job.our_errors) == 1


TRAIN = """
import json, os, resource, sys, time
import effllm.efficientllm_metrics as effllm
collector = effllm.get_metrics_collector()
{}
began_s = time.monotonic()
effllm.initialize_efficientllm_metrics(1000)
start_s = time.monotonic() - began_s
for iteration in range(1, 31):
    collector.record_iteration_start()
    collector.record_iteration_end(100, 2)
    collector.log_metrics(iteration, 1.0)
effllm.finalize_efficientllm_metrics()
sys.stdout.write(f"{{start_s}}")
"""
FULL = """
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
resource.setrlimit(resource.RLIMIT_NOFILE, (files[-1] + {}, files[-1] + {}))
"""
NO_FORK = """
if os.getuid() == 0:  # no limit applies to root
    os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
"""


@pytest.mark.fault("agent-cannot-start")
@pytest.mark.parametrize(
    ("breaks", "why"),
    [
        (FULL.format(1, 1), "Too many open files"),
        (FULL.format(6, 6), "Too many open files"),
        (FULL.format(9, 9), "Too many open files"),
        (NO_FORK, "Resource temporarily unavailable"),
        ("sys.executable = '/nowhere/python'", "No such file or directory: '/nowhere/python'"),
        (
            "os.environ['PYTHONHOME'] = '/nowhere'",
            f"the agent of rank 0 ended with status 1 at start ({sys.executable})",
        ),
    ],
    ids=["no descriptors", "no more descriptors", "few descriptors", "no processes", "no interpreter", "broken one"],
)
def test_agent_that_cannot_start_is_reported_with_the_reason(launch, breaks, why):
    job = launch.code(TRAIN.format(breaks), environ=jobs.long_timeouts()).done()

    line, again = [line for line in job.stderr.splitlines() if "[EfficientLLM]" in line]
    assert line.startswith("[EfficientLLM] no metrics, training goes on: ")
    assert again.startswith("[EfficientLLM] this job ran without metrics: ")
    assert why in line
    assert "Traceback" not in job.stderr
    assert float(job.stdout) < 10.0  # the script did not wait 20 s for the crashed agent
