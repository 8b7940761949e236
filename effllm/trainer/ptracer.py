"""Lets the agent read its trainer's stack where the kernel allows this only to a parent (Yama's ptrace_scope 1).

The agent is not the parent of the trainer, but its child.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PR_SET_PTRACER = 0x59616D61  # "Yama", linux/prctl.h
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
RESTRICTED = "1"


def allow(pid: int, scope: Path = SCOPE) -> bool:
    """Allow a process and its descendants to inspect this process; return whether this was needed and done."""
    with suppress(OSError, ImportError, AttributeError, ValueError):
        if scope.read_text().strip() == RESTRICTED:
            import ctypes  # this import takes 10 ms, so it is done only if needed

            return bool(ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False
