"""The aggregator as a child process of rank 0's agent, which starts, watches and replaces it."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable

import msgspec

from effllm.config.spawn import pidfd, spawn
from effllm.records.orders import Orders
from effllm.records.rank import Event


class AggregatorChild:
    """The aggregator process of rank 0's agent; a dead aggregator is replaced.

    Args:
        orders: the orders for each aggregator.
        report: receives an event when an aggregator dies or cannot be started.
    """

    def __init__(self, orders: Orders, report: Callable[[Event], None]) -> None:
        self._orders = orders
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._again_s = 0.0
        self.descriptor = -1  # pidfd of the aggregator; readable after its end
        self.done = False

    def start(self) -> None:
        """Start an aggregator on the listening socket; the agent keeps the socket open for a replacement."""
        body = msgspec.json.encode(self._orders)
        memory = os.memfd_create("effllm-orders", 0)
        os.write(memory, body)
        orders = self._orders
        passed = (memory, orders.listen_descriptor, orders.stdout_descriptor, orders.trainer_descriptor)
        try:
            self._process = spawn("effllm.server.process", [str(memory)], passed)
        except OSError as error:
            self._report(Event(time.time(), "aggregator", f"the aggregator cannot be started: {error}"))
            self._again_s = time.monotonic() + 5.0
            return
        finally:
            os.close(memory)
        self._started += 1
        self.descriptor = pidfd(self._process.pid)

    @property
    def due_s(self) -> float:
        """Time of the next start of an aggregator; infinite while an aggregator runs or the job is over."""
        return math.inf if self.done or self._process is not None else self._again_s

    def look(self, now_s: float) -> None:
        """Replace an aggregator that died before the end of the job; the delay grows with each replacement."""
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            self._process = None
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1
            if code == 0:
                self.done = True
                return
            delay_s = min(0.1 * 2 ** (self._started - 1), 5.0)
            self._again_s = now_s + delay_s
            text = f"the aggregator died (exit {code}); another aggregator is started"
            self._report(Event(time.time(), "aggregator", text))
        if not self.done and now_s >= self._again_s:
            self.start()
