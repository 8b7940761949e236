"""Plain mpirun (Open MPI), without torchrun: the ranks find each other, on one host and on two hosts."""

import os
import shutil
import signal
import sys

import jobs
import psutil
import pytest
from after_fault import assert_whole

pytestmark = [
    pytest.mark.faults,
    pytest.mark.fault("mpirun"),
    pytest.mark.skipif(not shutil.which("mpirun"), reason="there is no mpirun: Debian's openmpi-bin is not installed"),
]

LOOP = str(jobs.SCRIPTS / "loop.py")

#: A script in place of ssh, with which mpirun starts its daemon on another host. The hosts are namespaces of this
#: machine.
SHELL = """#!/bin/sh
host=$1; shift
exec ip netns exec "{prefix}-${{host#host}}" unshare --uts sh -c "hostname $host; exec $*"
"""


@pytest.fixture
def mpirun(launch, tmp_path):
    """Start a loop with mpirun."""

    def start(count, *arguments, options=(), launcher=launch, **settings):
        (tmp_path / "mpi").mkdir(exist_ok=True)
        command = ["mpirun", "--oversubscribe", "--mca", "orte_tmpdir_base", str(tmp_path / "mpi"), "-n", str(count)]
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        script = [sys.executable, LOOP, *map(str, arguments)]
        return launcher._job().start([*command, *as_root, *options, *script], launcher.environ(settings))

    return start


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_of_plain_mpirun_share_one_run_folder(mpirun, count):
    job = mpirun(count, "--iterations", 200).done()

    assert_whole(job.ledger, dict.fromkeys(range(count), 200))
    assert job.ledger.facts["launcher"] == "openmpi"
    assert job.ledger.summary.coverage.ranks_expected == job.ledger.summary.coverage.ranks_reporting == count
    assert job.our_errors == []
    assert not list(job.ledger.folder.parent.glob(".address-*"))


def test_job_ended_by_mpirun_after_a_killed_rank_has_status_killed(mpirun):
    job = mpirun(2, "--iterations", 5000)
    jobs.until(lambda: job.num_windows >= 5)
    first = min(pid for pid in jobs.processes(job.token) if jobs.describe(pid).startswith(f"{sys.executable} {LOOP}"))
    assert psutil.Process(first).parent().name() == "mpirun"
    os.kill(first, signal.SIGKILL)
    job.wait()

    assert job.code != 0
    assert not job.left()
    assert job.ledger.summary.status == "killed"
    assert job.ledger.summary.tokens == sum(row.tokens for row in job.ledger.ranks)


def test_mpirun_ranks_on_two_hosts_report_with_keys(mpirun, launch, hosts, tmp_path):
    one, two = hosts(2)
    shell = tmp_path / "shell"
    shell.write_text(SHELL.format(prefix=one.namespace.rpartition("-")[0]))
    shell.chmod(0o700)
    over = ["--host", f"{one.name}:1,{two.name}:1", "--mca", "plm_rsh_agent", str(shell)]
    over += ["--mca", "oob_tcp_if_include", one.interface, "--map-by", "node"]
    job = mpirun(2, "--iterations", 200, options=over, launcher=launch.on(one), interface=one.interface).done()

    assert_whole(job.ledger, {0: 200, 1: 200}, local_ranks={0: 0, 1: 0})
    assert {row.host for row in job.ledger.ranks} == {one.name, two.name}
    assert job.ledger.facts["launcher"] == "openmpi"
    assert (tmp_path / "config" / "efficientllm" / "secret").exists(), "off loopback there are keys"
