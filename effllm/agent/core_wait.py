"""How long the training thread could run and had no CPU core, by the Linux scheduler."""

from __future__ import annotations

import os
from contextlib import suppress

from effllm.energy.readings import NS


class CoreWait:
    """The wait of a process's main thread for a core since this object was made.

    The second number of ``/proc/PID/task/TID/schedstat`` is the time on a run queue in ns
    (https://docs.kernel.org/scheduler/sched-stats.html).
    """

    def __init__(self, pid: int) -> None:
        self._path = f"/proc/{pid}/task/{pid}/schedstat"
        self._first_ns = self._newest_ns = self._read()

    def seconds(self) -> float | None:
        """Return the wait so far; ``None`` if the kernel does not count it."""
        if self._first_ns is None or self._newest_ns is None:
            return None
        self._newest_ns = self._read() or self._newest_ns  # after the thread's end, the last value
        return (self._newest_ns - self._first_ns) * NS

    def _read(self) -> int | None:
        with suppress(OSError, ValueError):
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                run_ns, wait_ns, _ = map(int, os.read(descriptor, 128).split())
            finally:
                os.close(descriptor)
            return wait_ns if run_ns else None  # a kernel that does not count has zeros
        return None
