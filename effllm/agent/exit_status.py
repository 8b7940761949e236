"""How the trainer has ended.  Its agent is its child, so the agent cannot wait for it as a parent does."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from pathlib import Path

ENDED = "ended"  #: the process has ended, and its exit status is not visible

# linux/pidfd.h, from Linux 6.15 on: struct pidfd_info begins with `mask` and ends with `exit_code`.
_PIDFD_GET_INFO, _PIDFD_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, struct.Struct("<Q52xi"), 1 << 3
_STATE, _START_TIME, _EXIT_CODE = 0, 19, 49  # positions in /proc/PID/stat, after the program's name


class ExitStatus:
    """The end of one process.

    Args:
        pid: the process, which runs now.
        descriptor: its pidfd, or -1.
    """

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid, self._descriptor = pid, descriptor
        self._start_time = _stat(pid)[_START_TIME]

    def word(self) -> str:
        """Return the final status of the ended process: completed, failed, interrupted, killed, or `ENDED`."""
        status = self._wait_status()
        if status is None:
            return ENDED
        if os.WIFEXITED(status):
            return "failed" if os.WEXITSTATUS(status) else "completed"
        return "interrupted" if os.WTERMSIG(status) == signal.SIGINT else "killed"

    def is_replaced(self) -> bool:
        """Whether the process runs another program now (exec): then the ring is not in its memory."""
        try:
            maps = Path(f"/proc/{self._pid}/maps").read_bytes()
        except OSError:
            return False
        return bool(maps) and b"/memfd:effllm-ring" not in maps  # an ending process has no memory

    def _wait_status(self) -> int | None:
        """Return the status as in `os.wait`: until the parent has waited, from /proc, afterwards from newer kernels."""
        stat = _stat(self._pid)
        if stat[_STATE] in "ZX" and stat[_START_TIME] == self._start_time:
            return int(stat[_EXIT_CODE])
        info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, 0))
        try:
            fcntl.ioctl(self._descriptor, _PIDFD_GET_INFO, info)
        except (OSError, ValueError):  # an older kernel, or no pidfd
            return None
        mask, status = _PIDFD_INFO.unpack(info)
        return status if mask & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; all are empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return [" "] * (_EXIT_CODE + 1)
