"""Slurm clusters on one machine, with their own daemons and keys; need Debian's slurm-wlm and munge, and root.

The fixture ``slurm`` starts a cluster of one node, and ``slurm_with_gpus`` a cluster of two nodes with four GPUs each
(empty files), once for all tests, and removes it afterwards. Without the packages the tests are skipped with the
reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from jobs import until, unused_port

HOST = os.uname().nodename.split(".")[0]
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus} {gres} State=UNKNOWN"
DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """
ClusterName=effllm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
KillWait=5
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


class Slurm:
    """A cluster whose daemons run; srun and scancel need the variables in ``environ``."""

    def __init__(self, folder: Path, names: Sequence[str] = (HOST,), gpus: int = 0) -> None:
        self._folder, self._names, self._gpus = folder, names, gpus
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the daemons, and wait until the node is idle."""
        folder = self._folder
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        for name in ("state", "dev", *(f"spool-{name}" for name in self._names)):
            (folder / name).mkdir()
        gres = f"Gres=gpu:{self._gpus}" if self._gpus else ""
        nodes = "\n".join(
            NODE.format(name=name, port=unused_port(), cpus=os.cpu_count(), gres=gres, host=HOST)
            for name in self._names
        )
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=folder, host=HOST, nodes=nodes, port=unused_port())
        )
        for number in range(self._gpus):
            (folder / "dev" / f"nvidia{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-{self._gpus - 1}]\n" if gres else "")
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self._run("munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files)
        until((folder / "munge.socket").exists)
        self._run("slurmctld", "-D", "-i", "-f", self.environ["SLURM_CONF"])
        for name in self._names:
            self._run("slurmd", "-D", "-N", name, "-f", self.environ["SLURM_CONF"])
        sinfo = ("sinfo", "--Node", "--noheader", "--format=%T")
        until(lambda: self.command(*sinfo).split() == ["idle"] * len(self._names), within_s=30)

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
    yield from _cluster()


@pytest.fixture(scope="session")
def slurm_with_gpus() -> Iterator[Slurm]:
    """Return a Slurm cluster of two nodes on this machine, with four GPUs each."""
    yield from _cluster(("n1", "n2"), 4)


def _cluster(names: Sequence[str] = (HOST,), gpus: int = 0) -> Iterator[Slurm]:
    missing = [daemon for daemon in (*DAEMONS, "srun") if not shutil.which(daemon)]
    if missing:
        pytest.skip(f"there is no {missing[0]}: Debian's slurm-wlm and munge are not installed")
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons need root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short path, because a socket's path has at most 107 bytes
    cluster = Slurm(folder, names, gpus)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder)
