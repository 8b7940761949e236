"""The host as a device, for training without a GPU: the rank's process tree, and the CPUs' RAPL energy counters."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from effllm.devices import DeviceUnavailable, Site
from effllm.devices.node.rapl import POWERCAP, SENSOR, Rapl, open_rapl
from effllm.records.rank import COUNTER, CPU, Device, Sample, Sensor

_LIST_EVERY_S = 10.0
_THREAD_CHILDREN = Path("/proc/thread-self/children")
#: Errors of a process that has ended, or is of another user where /proc has the option hidepid.
_UNREADABLE = (FileNotFoundError, ProcessLookupError, PermissionError)
_PAGE_BYTES, _TICKS_PER_S = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """The usage of one process; ``reaped_s`` is the CPU time of ended children that the process has waited for."""

    has_ended: bool  # the process has ended, but its parent has not waited for it: its times are still readable
    cpu_s: float
    reaped_s: float
    rss_bytes: int
    shared_bytes: int


class Process:
    """A process, read through open files in /proc, which never refer to a later process with the same pid.

    A read once a second takes 0.09 ms of CPU time; psutil, which opens the files each time, takes 0.30 ms.
    """

    def __init__(self, pid: int) -> None:
        with ExitStack() as files:
            paths = Path(f"/proc/{pid}/stat"), Path(f"/proc/{pid}/statm")
            self._stat, self._statm = (files.enter_context(path.open("rb", buffering=0)).fileno() for path in paths)
            self.close = files.pop_all().close
        self.inherited_bytes = 0  # of a descendant; see the function of this name

    def read_usage(self) -> Usage | None:
        """Return the usage, or ``None`` if the process is gone."""
        try:
            stat, statm = os.pread(self._stat, 2048, 0), os.pread(self._statm, 256, 0).split()
        except OSError:
            return None
        fields = stat[stat.rindex(b")") + 2 :].split()  # the name before may contain spaces and brackets
        user, system, reaped_user, reaped_system = (int(ticks) / _TICKS_PER_S for ticks in fields[11:15])
        rss_bytes, shared_bytes = (int(pages) * _PAGE_BYTES for pages in statm[1:3])
        return Usage(fields[0] in b"ZX", user + system, reaped_user + reaped_system, rss_bytes, shared_bytes)

    def own_bytes(self, usage: Usage) -> int:
        """Return the private bytes of a descendant; its shared bytes are counted with the trainer."""
        unshared_bytes = usage.rss_bytes - usage.shared_bytes
        # After exec a process has no inherited pages, so the inherited bytes are limited to the unshared bytes.
        self.inherited_bytes = min(self.inherited_bytes, unshared_bytes)
        return unshared_bytes - self.inherited_bytes


def _child_pids(pid: int) -> list[int]:
    # psutil would read the stat file of every process of the host: thousands of files, 16 microseconds each.
    if not _THREAD_CHILDREN.exists():  # a kernel without CONFIG_PROC_CHILDREN
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
    children: list[int] = []
    with suppress(PermissionError):  # the process of another user, where /proc has the option hidepid
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                children += map(int, (thread / "children").read_text().split())
    return children


def _descendant_pids(pid: int, excluded: frozenset[int]) -> Iterator[int]:
    for child in _child_pids(pid):
        if child not in excluded:
            yield child
            yield from _descendant_pids(child, excluded)


def _inherited_bytes(pid: int, usage: Usage) -> int:
    """Return the bytes that a forked process still shares, copy-on-write, with its parent.

    These are counted for the parent.  Only smaps_rollup has them, and its pages are walked (0.16 ms for 14 MB), so the
    file is read once per process. It does not name the parent: a page that only two descendants share is not counted.
    """
    try:
        return max(0, usage.rss_bytes - psutil.Process(pid).memory_full_info().uss - usage.shared_bytes)
    except psutil.Error:
        return 0  # the process has ended


class ProcessTree:
    """A trainer and its descendants, without effllm's own processes.

    Descendants are listed every ten seconds; their usage is read at every call of `read_usage`.
    """

    def __init__(self, pid: int, excluded: frozenset[int], clock: Callable[[], float]) -> None:
        self._pid = pid
        self._excluded = excluded
        self._clock = clock
        self._processes: dict[int, Process] = {}  # a parent is before its children
        self._next_list_s = clock()
        self._last_usages: dict[int, Usage] = {}  # by pid
        with suppress(*_UNREADABLE):
            self._processes[pid] = Process(pid)

    def read_usage(self) -> tuple[float, float | None]:
        """Return the bytes in use, and the CPU seconds since the last read.

        Raises:
            ProcessLookupError: the trainer has ended.
        """
        if self._pid in self._processes and self._clock() >= self._next_list_s:
            self._list_processes()
        now = self._read_usages()
        if self._pid not in now or now[self._pid].has_ended:
            raise ProcessLookupError("the trainer has ended")
        memory_bytes = float(now[self._pid].rss_bytes)
        memory_bytes += sum(self._processes[pid].own_bytes(usage) for pid, usage in now.items() if pid != self._pid)
        last, self._last_usages = self._last_usages, now
        return memory_bytes, _cpu_s_between(last, now) if last else None

    def close(self) -> None:
        while self._processes:
            self._processes.popitem()[1].close()

    def _read_usages(self) -> dict[int, Usage]:
        """Return the usages; if a process ends, read all again, because its CPU time moves to its parent."""
        while True:
            usages = {pid: process.read_usage() for pid, process in self._processes.items()}
            present = {pid: usage for pid, usage in usages.items() if usage is not None}
            if len(present) == len(usages):
                return present
            for pid in usages.keys() - present.keys():
                self._processes.pop(pid).close()

    def _list_processes(self) -> None:
        self._next_list_s = self._clock() + _LIST_EVERY_S
        pids = dict.fromkeys([self._pid, *_descendant_pids(self._pid, self._excluded)])  # each once, in this order
        for pid in self._processes.keys() - pids.keys():
            self._processes.pop(pid).close()
        for pid in [pid for pid in pids if pid not in self._processes]:
            with suppress(*_UNREADABLE):
                process = self._processes[pid] = Process(pid)
                if (usage := process.read_usage()) is not None:
                    process.inherited_bytes = _inherited_bytes(pid, usage)


def _cpu_s_between(last: dict[int, Usage], now: dict[int, Usage]) -> float:
    """Return the CPU seconds that a process tree used between two reads.

    The CPU time of an ended child moves to the parent that waits for the child: the sum over the tree stays complete.
    If no parent waits, the child's time is lost and the sum may decrease.  Then the CPU seconds of the running
    processes are returned, as a lower bound.
    """
    total = sum(usage.cpu_s + usage.reaped_s for usage in now.values())
    total_before = sum(usage.cpu_s + usage.reaped_s for usage in last.values())
    running_s = sum(usage.cpu_s - last[pid].cpu_s for pid, usage in now.items() if pid in last)
    return max(total - total_before, running_s, 0.0)


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()  # on ARM, cpuinfo has no model name


class HostReader:
    """The host as the open device of one rank."""

    def __init__(self, device: Device, tree: ProcessTree, rapl: Rapl | None) -> None:
        self.device = device
        self._tree = tree
        self._rapl = rapl
        self._num_cpus = psutil.cpu_count() or 1
        self._last_ns = 0  # time of the last successful read of the process tree

    def read(self) -> tuple[Sample, dict[str, str]]:
        failures: dict[str, str] = {}
        memory_bytes = cpu_s = utilization = energy_j = None
        before_ns = time.monotonic_ns()
        try:
            memory_bytes, cpu_s = self._tree.read_usage()
        except (OSError, ValueError) as error:
            failures["memory_bytes"] = failures["utilization"] = str(error)
        try:
            energy_j = self._rapl.energy_j() if self._rapl is not None else None
        except (OSError, ValueError) as error:
            failures["energy_j"] = f"RAPL: {error}"
        time_ns = (before_ns + time.monotonic_ns()) // 2
        if cpu_s is not None:
            utilization = min(1.0, cpu_s / ((time_ns - self._last_ns) / 1e9 * self._num_cpus))
        if memory_bytes is not None:
            self._last_ns = time_ns
        return Sample(time_ns=time_ns, memory_bytes=memory_bytes, utilization=utilization, energy_j=energy_j), failures

    def close(self) -> None:
        self._tree.close()


def open_device(
    site: Site,
    *,
    clock: Callable[[], float] = time.monotonic,
    powercap: Path = POWERCAP,
    pause: Callable[[float], None] = time.sleep,
) -> HostReader:
    """Open the host; only local rank 0 reads the energy counters, if there are any."""
    rapl, why_not = None, ""
    if site.local_rank == 0:
        try:
            rapl = open_rapl(clock, powercap, pause)
        except DeviceUnavailable as error:
            why_not = str(error)
    device = Device(
        key=f"host:{site.host}",
        kind="host",
        name=_cpu_name(),
        is_gpu=False,
        shared=True,
        memory_total_bytes=psutil.virtual_memory().total,
        energy_method=COUNTER if rapl else None,
        power_scope=CPU if rapl else None,
        not_measured=(why_not,) if why_not else (),
        # The node's CPU sensor has the same key, so no joule is counted twice.
        energy_key=f"cpu:{site.host}" if rapl else "",
        energy_note=rapl.note if rapl else "",
        sensor=SENSOR if rapl else Sensor(),
    )
    tree = ProcessTree(site.trainer_pid, site.excluded_pids | {os.getpid()}, clock)
    return HostReader(device, tree, rapl)
