"""Lets the agent look at its trainer's stack where the kernel allows that to parents alone (Yama's ptrace_scope 1).

The agent is the trainer's child.  Standard library alone: the training process imports it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PR_SET_PTRACER = 0x59616D61  # "Yama", linux/prctl.h
SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
RESTRICTED = "1"


def allow(pid: int, scope: Path = SCOPE) -> bool:
    """Let a process, and those that it starts, inspect this one; return whether that was needed and done."""
    with suppress(OSError, ImportError, AttributeError, ValueError):
        if scope.read_text().strip() == RESTRICTED:
            import ctypes  # 10 ms, so only where it matters

            return bool(ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False
