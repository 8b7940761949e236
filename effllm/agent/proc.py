"""What Linux shows of a training process in /proc: its state and its end, its memory, and its wait for a core."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import sys
from contextlib import suppress
from pathlib import Path

from effllm.energy.readings import NS

INSTALL_PY_SPY = "pip install 'effllm[forensics]'"
ENDED = "ended"  #: the process has ended, and its exit status is not visible

# linux/pidfd.h, from Linux 6.15 on: struct pidfd_info begins with `mask` and ends with `exit_code`.
_PIDFD_GET_INFO, _PIDFD_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, struct.Struct("<Q52xi"), 1 << 3
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49  # positions in /proc/PID/stat, after the program's name
_PRIVATE = re.compile(r"^RssAnon:\s*(\d+) kB$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s*(\d+) kB$", re.MULTILINE)
_CGROUP_PATH = re.compile(r"^0::(/.*)$", re.MULTILINE)
_FILE_PAGES = re.compile(r"^(?:inactive|active)_file (\d+)$", re.MULTILINE)


def short_file(path: str | Path) -> str:
    """Return the content of a short file of the kernel; empty if it cannot be read.

    Some of these files are read for every heartbeat, and Path.read_bytes() takes three times as long.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 16_384).decode(errors="replace")
        finally:
            os.close(descriptor)
    return ""


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; all are empty if there is no such process."""
    # The process name in parentheses may be any text, also one with a parenthesis.
    return short_file(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""] * (_EXIT_CODE + 1)


def process_state(pid: int) -> str:
    """Return the letter of a process's state, or an empty string if the process does not exist."""
    return _stat_fields(pid)[_STATE]


class ExitStatus:
    """How the trainer, which runs now, has ended.  Its agent is its child, and cannot wait for it as a parent does."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid, self._descriptor = pid, descriptor
        self._start_time = _stat_fields(pid)[_START_TIME]

    def final_status(self) -> str:
        """Return the final status of the ended process: completed, failed, interrupted, killed, or `ENDED`."""
        status = self._wait_status()
        if status is None:
            return ENDED
        if os.WIFEXITED(status):
            return "failed" if os.WEXITSTATUS(status) else "completed"
        return "interrupted" if os.WTERMSIG(status) == signal.SIGINT else "killed"

    def runs_other_program(self) -> bool:
        """Whether the process runs another program now (exec): then the ring is not in its memory."""
        try:
            maps = Path(f"/proc/{self._pid}/maps").read_bytes()
        except OSError:
            return False
        return bool(maps) and b"/memfd:effllm-ring" not in maps  # an ending process has no memory

    def _wait_status(self) -> int | None:
        """Return the status as in `os.wait`: until the parent has waited, from /proc, afterwards from newer kernels."""
        stat = _stat_fields(self._pid)
        if stat[_STATE] in ("Z", "X") and stat[_START_TIME] == self._start_time:
            return int(stat[_EXIT_CODE])
        info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except (OSError, ValueError):  # an older kernel, or no pidfd
            return None
        mask, status = _PIDFD_INFO.unpack(info)
        return status if mask & _PIDFD_INFO_EXIT else None


class CoreWait:
    """The wait of a process's main thread for a core since this object was made.

    The second number of ``/proc/PID/task/TID/schedstat`` is the time on a run queue in ns
    (https://docs.kernel.org/scheduler/sched-stats.html).
    """

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/task/{pid}/schedstat"
        self._first_ns = self._newest_ns = self._read_ns()

    def seconds(self) -> float | None:
        """Return the wait so far; ``None`` if the kernel does not count it."""
        if self._first_ns is None or self._newest_ns is None:
            return None
        self._newest_ns = self._read_ns() or self._newest_ns  # after the thread's end, the last value
        return (self._newest_ns - self._first_ns) * NS

    def _read_ns(self) -> int | None:
        with suppress(ValueError):  # the thread has ended
            run_ns, wait_ns, _ = map(int, short_file(self._path).split())
            return wait_ns if run_ns else None  # a kernel that does not count has zeros
        return None


def py_spy_path() -> str:
    """Return the path of py-spy, which reads the stacks of a process; "" if it is not installed."""
    beside = Path(sys.executable).parent / "py-spy"
    return shutil.which("py-spy") or (str(beside) if beside.exists() else "")


def py_spy_error(messages: bytes, scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> str:
    """Return why py-spy has failed, in one line, from its messages and from Yama's setting."""
    lines = [" ".join(line.split()) for line in messages.decode(errors="replace").splitlines() if line.strip()]
    message = next((line for line in lines if "rror" in line), lines[0] if lines else "no message")[:200]
    if "permission denied" not in message.lower():
        return f"py-spy failed: {message}"
    setting = short_file(scope).strip()
    if setting in ("", "0"):
        return "Linux does not permit py-spy to read the process; a container needs --cap-add=SYS_PTRACE"
    return f"Linux does not permit py-spy to read the process (kernel.yama.ptrace_scope={setting})"


def private_bytes(pid: int) -> float | None:
    """Return the private memory of a process: without files and libraries; ``None`` if it has ended."""
    match = _PRIVATE.search(short_file(f"/proc/{pid}/status"))
    return None if match is None else float(match[1]) * 1024


def available_bytes(pid: int, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the host memory by which a process can still grow: of the machine, or of a cgroup; ``None`` if unknown.

    The pages of files in a cgroup (version 2) count as available, because the kernel can drop them.
    """
    available = []
    if (match := _AVAILABLE.search(short_file(proc / "meminfo"))) is not None:
        available.append(float(match[1]) * 1024)
    path = _CGROUP_PATH.search(short_file(proc / str(pid) / "cgroup"))
    group = groups / path[1].lstrip("/") if path is not None else groups
    while group.is_relative_to(groups):
        limit, current = short_file(group / "memory.max").strip(), short_file(group / "memory.current").strip()
        if limit.isdigit() and current.isdigit():  # "max" without a limit
            file_bytes = sum(int(size) for size in _FILE_PAGES.findall(short_file(group / "memory.stat")))
            available.append(float(int(limit) - int(current) + file_bytes))
        if group == groups:
            break
        group = group.parent
    return min(available, default=None)
