"""Watches which allocated GPUs of a host no process uses; one agent per host does this, in a thread."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping

from effllm.devices.allocation import Statement, allocation, hidden_by_system, read_statement
from effllm.records.allocation import Allocation
from effllm.records.plain_text import one_line

#: A process that uses a GPU for a shorter time is not seen.
CHECK_EVERY_S = 30.0
MAX_LETTERS = 200  # of a reason


class AllocationWatch:
    """Reads the allocation of this host, and periodically the GPUs that no process uses.

    A call of NVML may hang, so a thread makes the calls; the agent never waits for this thread.

    Args:
        environ: the environment of the trainer.
        wake_descriptor: an eventfd that is written after a change.
    """

    def __init__(self, environ: Mapping[str, str], wake_descriptor: int) -> None:
        self._environ, self._wake = environ, wake_descriptor
        self._stop = threading.Event()
        self.newest: Allocation | None = None  # None without a statement of an allocation, and before the first check

    def start(self) -> None:
        threading.Thread(target=self._run, name="allocation", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        stated = read_statement(self._environ)
        while not self._stop.is_set():
            found = look(stated, self._environ)
            if found is None:
                return
            if found != self.newest:
                self.newest = found
                with contextlib.suppress(OSError):
                    os.eventfd_write(self._wake, 1)
            self._stop.wait(CHECK_EVERY_S)


def look(stated: Statement | None, environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocated GPUs of this host; ``None`` if no allocation is stated."""
    try:
        from effllm.devices.allocation import nvml

        gpus = nvml.visible_gpus()
    except Exception as error:  # noqa: BLE001 - a missing library, a broken driver, or any answer of it
        why = one_line(f"NVML does not list the GPUs: {error}")[:MAX_LETTERS]
        return None if stated is None else allocation(stated, (), environ, why)
    statement = stated or hidden_by_system(len(gpus))
    return None if statement is None else allocation(statement, gpus, environ)
