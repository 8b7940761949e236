"""Hosts without IPv4, and folders whose names are not UTF-8."""

import shutil
import sys

import jobs
import pytest

pytestmark = pytest.mark.faults

needs_namespaces = pytest.mark.skipif(
    not shutil.which("unshare") or not shutil.which("ip"), reason="there is no unshare, or no ip"
)

BODY = """
import os, runpy, sys
sys.argv += ["--step-s", "0.3"]  # so long that its aggregator is there before it ends
os.mkdir(b"caf\\xe9")
os.chdir(b"caf\\xe9")
runpy.run_path({loop!r}, run_name="__main__")
"""


def test_folder_name_that_is_not_utf8_disables_only_the_run_folder(launch):
    job = launch.code(BODY.format(loop=str(jobs.SCRIPTS / "loop.py")), run_dir="runs").done()

    assert len(job.blocks) == 2
    assert job.stderr.count("no run folder: the name of the current folder is not UTF-8") == 1
    assert len(job.our_errors) == 1


def in_a_network_namespace(launch, script, *command):
    """Run a command with a shell script in a separate network namespace."""
    job = launch._job()
    job.start(["unshare", "--net", "sh", "-c", script, "sh", *command], launch.environ({})).wait()
    if "unshare:" in job.stderr:
        pytest.skip("no network namespaces here")
    return job


@needs_namespaces
def test_loopback_without_ipv4_is_used(launch):
    script = 'ip link set lo up && ip -4 addr flush dev lo && exec "$@"'
    job = in_a_network_namespace(launch, script, sys.executable, str(jobs.SCRIPTS / "loop.py"))

    assert job.done().ledger.summary.tokens == 2000


@needs_namespaces
def test_missing_loopback_disables_metrics_and_is_reported(launch):
    job = in_a_network_namespace(launch, 'exec "$@"', sys.executable, str(jobs.SCRIPTS / "loop.py")).done()

    assert len(job.output()["steps"]) == 20
    assert job.our_errors == [
        f"[EfficientLLM] {when}: the loopback interface of this host is down: `ip link set lo up` (as root) sets it up"
        for when in ("no metrics, training goes on", "this job ran without metrics")
    ]
    assert job.runs() == []
    assert job.find("effllm.agent.agent") == []
