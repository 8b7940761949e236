"""The inspection of a trainer as its agent keeps it: started when the aggregator asks, read when it is done."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess

import msgspec

from effllm.agent.inspection import InspectionOrders, InspectionResult
from effllm.config.spawn import pidfd, spawn

LIMIT_S = 25.0


class InspectionChild:
    """At most one inspection at a time; nothing here waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._found = -1  # a file in memory, which it fills
        self._until_s = math.inf
        self.descriptor = -1  # pidfd, readable when it has ended

    def start(self, orders: InspectionOrders, now_s: float) -> str:
        """Start one, unless one runs; return why it cannot be started, or an empty string."""
        if self._process is not None:
            return ""
        given = os.memfd_create("effllm-inspection", 0)
        self._found = os.memfd_create("effllm-found", 0)
        try:
            os.write(given, msgspec.json.encode(orders))
            arguments = [str(given), str(self._found)]
            self._process = spawn("effllm.agent.inspection", arguments, (given, self._found, orders.trainer))
        except OSError as error:
            os.close(self._found)
            return f"the inspection cannot be started: {error}"
        finally:
            os.close(given)
        self.descriptor, self._until_s = pidfd(self._process.pid), now_s + LIMIT_S
        return ""

    @property
    def due_s(self) -> float:
        """When it is given up; infinite where none runs."""
        return self._until_s

    def look(self, now_s: float) -> InspectionResult | None:
        """Return what it has found, when it has ended or its time is over."""
        if self._process is None or (self._process.poll() is None and now_s < self._until_s):
            return None
        is_late = self._process.poll() is None
        self._kill()
        size = os.fstat(self._found).st_size
        body = os.pread(self._found, size, 0)
        os.close(self._found)
        self._process, self._until_s = None, math.inf
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        try:
            return msgspec.json.decode(body, type=InspectionResult)
        except msgspec.MsgspecError:
            why = f"took more than {LIMIT_S:.0f} s" if is_late else "failed"
            return InspectionResult(f"no stacks: the inspection {why}\n", f"unknown: the inspection {why}")

    def stop(self) -> None:
        """End it: its result is not needed any more."""
        if self._process is not None:
            self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and py-spy, which is of its group
            self._process.wait()
