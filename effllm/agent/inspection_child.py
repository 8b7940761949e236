"""The inspection process as a child of the agent: started at the aggregator's request, read after its end."""

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
    """Runs at most one inspection at a time, without blocking."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._found = -1  # memfd for the result
        self._until_s = math.inf
        self.descriptor = -1  # pidfd of the inspection; readable after its end

    def start(self, orders: InspectionOrders, now_s: float) -> str:
        """Start an inspection, unless an inspection is running; return the error of the start, or an empty string."""
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
        """Deadline of the running inspection; infinite if no inspection runs."""
        return self._until_s

    def look(self, now_s: float) -> InspectionResult | None:
        """Return the result if the inspection has ended or its deadline has passed, else ``None``."""
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
        if self._process is not None:
            self._kill()

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # the process group includes py-spy
            self._process.wait()
