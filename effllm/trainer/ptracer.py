"""Lets the agent read its trainer's stack where the kernel only lets a parent read it (Yama's ptrace_scope 1).

The agent is a child of the trainer.
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
            import ctypes  # takes 10 ms, so imported only if needed

            return bool(ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False
