"""Simulated hosts: network namespaces on one switch, each with its addresses, its name and its loopback.

The fixture ``hosts`` makes the requested number of hosts, and removes them with their processes after the test. All
hosts share the file system, like the nodes of a cluster share the home folder::

    def test_two_hosts(hosts, launch):
        one, two = hosts(2)                       # host1: 10.77.0.1 and fd77::1, host2: 10.77.0.2 and fd77::2
        job = launch.on(two).python("loop.py")    # a Launcher whose commands run there
        assert one.run("ping", "-c1", two.address).returncode == 0
        two.cut()                                 # the link stays up, all frames are dropped
        two.heal()
        two.impair(delay_s=0.05, loss=0.01)       # each way; needs no sch_netem, see _slow_wire below
        two.heal()

All hosts are namespaces: they do not conflict with the network of the test machine and leave no files. The fixture
needs root and Debian's iproute2; otherwise its tests are skipped with the reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, Launcher

SLOW_WIRE = Path(__file__).parent / "slow_wire.py"


class Host:
    """One simulated host: its commands run as on a separate machine, but share the file system."""

    def __init__(self, wire: Wire, number: int) -> None:
        self._wire, self._number = wire, number
        self.namespace = f"{wire.namespace}-{number}"
        self.name = f"host{number}"
        self.address, self.address6 = f"10.77.0.{number}", f"fd77::{number}"
        self.interface = "eth0"
        self._etc = Path("/etc/netns") / self.namespace  # `ip netns exec` mounts this folder over /etc
        self._slow: subprocess.Popen[bytes] | None = None

    @property
    def prefix(self) -> list[str]:
        """Return a prefix that runs a command on this host; the pid of the started process stays the command's pid."""
        named = f'hostname {self.name}; exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh"]

    def run(self, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host; return its output when it has ended."""
        options = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run([*self.prefix, *command], check=False, **options)

    def start(self, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; the caller must end the process."""
        return subprocess.Popen([*self.prefix, *command], **options)

    def cut(self) -> None:
        """Drop all frames in both directions; the link stays up, so no process gets an error."""
        self._remove_slow_wire()
        self._wire.ip("link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo `cut` and `impair`."""
        self._remove_slow_wire()
        self._wire.ip("link", "set", self._port, "master", "br0")

    def impair(self, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Delay every frame by ``delay_s`` and drop the share ``loss`` of the frames, in both directions."""
        self.cut()
        near, far = f"slow{self._number}", f"fast{self._number}"
        self._wire.ip("link", "add", near, "type", "veth", "peer", "name", far)
        self._wire.ip("link", "set", near, "up")
        self._wire.ip("link", "set", far, "up", "master", "br0")
        command = ["ip", "netns", "exec", self._wire.namespace, sys.executable, str(SLOW_WIRE)]
        self._slow = subprocess.Popen(
            [*command, self._port, near, str(delay_s), str(loss)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self._slow.stdout and self._slow.stdout.readline() == b"ready\n"

    def resolve(self, name: str, *addresses: str) -> None:
        """Resolve a name to these addresses on this host, with lines in its /etc/hosts."""
        self._etc.mkdir(parents=True, exist_ok=True)
        with (self._etc / "hosts").open("a") as file:
            file.writelines(f"{address} {name}\n" for address in addresses)

    def _remove_slow_wire(self) -> None:
        if self._slow is not None:
            self._slow.terminate()
            self._slow.communicate(timeout=10)
            self._slow = None
            self._wire.ip("link", "del", f"slow{self._number}")

    @property
    def _port(self) -> str:
        return f"port{self._number}"

    def open(self) -> None:
        wire, own = self._wire, self.namespace
        _ip("netns", "add", own)
        self.resolve("localhost", "127.0.0.1", "::1")
        (self._etc / "resolv.conf").write_text("")  # no name server: lookups must not wait for one
        wire.ip("link", "add", self._port, "type", "veth", "peer", "name", self.interface, "netns", own)
        wire.ip("link", "set", self._port, "up", "master", "br0")
        for arguments in (
            ("link", "set", "lo", "up"),
            ("link", "set", self.interface, "up"),
            ("address", "add", f"{self.address}/24", "dev", self.interface),
            ("address", "add", f"{self.address6}/64", "dev", self.interface, "nodad"),
        ):
            _ip("-n", own, *arguments)

    def close(self) -> None:
        """End the processes of the host and remove the host."""
        with suppress(OSError, subprocess.SubprocessError):
            self._remove_slow_wire()
        for pid in _ip("netns", "pids", self.namespace, check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", self.namespace, check=False)
        shutil.rmtree(self._etc, ignore_errors=True)


class Wire:
    """The switch between the hosts; it has a separate namespace."""

    def __init__(self) -> None:
        self.namespace = f"effllm-{uuid.uuid4().hex[:8]}"
        self._hosts: list[Host] = []
        self._is_open = False

    def __call__(self, count: int) -> list[Host]:
        """Make and return ``count`` new hosts."""
        if not self._is_open:
            self._open()
        new = [Host(self, len(self._hosts) + 1 + i) for i in range(count)]
        self._hosts += new
        for host in new:
            host.open()
        for host in self._hosts:  # every host can resolve the names of all hosts
            for other in self._hosts if host in new else new:
                host.resolve(other.name, other.address, other.address6)
        return new

    def ip(self, *arguments: str) -> None:
        """Configure the switch."""
        _ip("-n", self.namespace, *arguments)

    def _open(self) -> None:
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        if not (shutil.which("ip") and shutil.which("unshare")):
            pytest.skip("there is no `ip` (iproute2), so no hosts can be made")
        try:
            _ip("netns", "add", self.namespace)
            self._is_open = True
            self.ip("link", "add", "br0", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
            self.ip("link", "set", "br0", "up")
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")

    def close(self) -> None:
        """Remove all hosts."""
        for host in self._hosts:
            host.close()
        if self._is_open:
            _ip("netns", "del", self.namespace, check=False)
            self._is_open = False


def slurm_ranks(
    launch: Launcher,
    hosts: Sequence[Host],
    *arguments: Any,
    environ: Mapping[int, dict[str, str]] = {},
    **settings: Any,
) -> list[Job]:
    """Start loop.py on each host with srun's variables, without Slurm and torch: the ranks find each other by a file.

    ``environ`` has further variables of single ranks.
    """
    step = {"JOB_ID": 4711, "STEP_ID": 0, "NTASKS": len(hosts), "LOCALID": 0}
    step |= {"STEP_TASKS_PER_NODE": f"1(x{len(hosts)})"}
    shared = {f"SLURM_{name}": str(value) for name, value in step.items()} | {"MASTER_ADDR": hosts[0].address}
    return [
        launch.on(host).python(
            "loop.py", *arguments, environ={**shared, "SLURM_PROCID": str(rank), **environ.get(rank, {})}, **settings
        )
        for rank, host in enumerate(hosts)
    ]


def _ip(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], check=check, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[Wire]:
    """Return a function that makes simulated hosts: ``one, two = hosts(2)``; see the module's docstring."""
    wire = Wire()
    try:
        yield wire
    finally:
        wire.close()
