"""Hosts on which something that is always there is not: IPv4, or names that are UTF-8."""

import shutil
import sys

import jobs
import pytest

pytestmark = pytest.mark.faults

BODY = """
import os, runpy
os.mkdir(b"caf\\xe9")
os.chdir(b"caf\\xe9")
runpy.run_path({loop!r}, run_name="__main__")
"""


def test_folder_whose_name_is_not_utf8_costs_the_run_folder_alone(launch):
    job = launch.code(BODY.format(loop=str(jobs.SCRIPTS / "loop.py")), run_dir="runs").done()

    assert len(job.blocks) == 2
    assert job.stderr.count("no run folder: the name of the current folder is not UTF-8") == 1
    assert len(job.our_errors) == 1


@pytest.mark.skipif(not shutil.which("unshare") or not shutil.which("ip"), reason="there is no unshare, or no ip")
def test_loopback_without_ipv4_is_used(launch):
    job = launch._job()
    script = 'ip link set lo up && ip -4 addr flush dev lo && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, str(jobs.SCRIPTS / "loop.py")]
    job.start(command, launch.environ({})).wait()
    if "unshare:" in job.stderr:
        pytest.skip("no network namespaces here")

    assert job.done().ledger.summary.tokens == 2000
