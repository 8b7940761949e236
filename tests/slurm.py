"""A Slurm cluster on one machine, with its own daemons and keys; needs Debian's slurm-wlm and munge, and root.

The fixture ``slurm`` starts the cluster once for all tests and removes it afterwards. Without the packages the tests
are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import until, unused_port

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=effllm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """A cluster whose daemons run; srun and scancel need the variables in ``environ``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until the node is idle."""
        folder = self._folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        ports = {"port": unused_port(), "node_port": unused_port()}
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, host=os.uname().nodename.split(".")[0], cpus=os.cpu_count(), **ports)
        )
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        until((folder / "munge.socket").exists)
        self._run("slurmctld", "-D", "-i", "-f", self.environ["SLURM_CONF"])
        self._run("slurmd", "-D", "-f", self.environ["SLURM_CONF"])
        until(lambda: "idle" in self.command("sinfo", "--noheader", "--format=%T"), within_s=30)

    def _run(self, daemon: str, *arguments: str) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TESTS_OF_")}
        with (self._folder / f"{daemon}.out").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [daemon, *arguments],
                    env={**environ, **self.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def command(self, *command: str) -> str:
        """Run a Slurm command, and return its output."""
        environ = {**os.environ, **self.environ}
        return subprocess.run(command, env=environ, check=False, capture_output=True, text=True, timeout=30).stdout

    def job_id(self) -> str:
        """Return the id of the only running job."""
        return until(lambda: self.command("squeue", "--noheader", "--format=%A", "--states=running").strip())

    def close(self) -> None:
        """Kill the running jobs, and end the daemons."""
        self.command("scancel", "--signal=KILL", "--state=RUNNING")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        deadline_s = time.monotonic() + 10
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Return a Slurm cluster on this machine."""
    missing = [daemon for daemon in (*DAEMONS, "srun") if not shutil.which(daemon)]
    if missing:
        pytest.skip(f"there is no {missing[0]}: Debian's slurm-wlm and munge are not installed")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short path, because a socket's path has at most 107 bytes
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)
