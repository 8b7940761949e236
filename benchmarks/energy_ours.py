"""effllm: for each GPU a process that does what an agent does with its device, told of the edges by a pipe.

All that knows effllm's own code is in `_Agent`; it opens, samples and integrates as `effllm.agent` does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.energy_driver import Calls, Reading, Tool, drive
from effllm import __version__
from effllm.agent import EDGE_WAIT_S, LONGEST_GAP_INTERVALS
from effllm.config import Config
from effllm.devices import Site, open_device
from effllm.sampler import Sampler
from effllm.schema import Integrals
from effllm.window import Series

NICENESS = 5  # as in effllm.agent.main


class _Agent:
    """One GPU: samples it, and cuts the windows whose edges arrive."""

    def __init__(self, gpu: int, edges: int, answers: int) -> None:
        self._gpu, self._edges, self._answers = gpu, edges, answers
        self._sampled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._interval_s = Config().collection_interval_s
        self._sampler = Sampler(self._open, self._interval_s, _log, self._sampled)
        self._series: Series | None = None
        self._waiting: deque[int] = deque()
        self._start_ns = 0
        self._windows: list[Integrals] = []

    def run(self) -> None:
        """Cut until the pipe is closed, then answer with all windows."""
        poller = select.poll()
        poller.register(self._sampled, select.POLLIN)
        self._sampler.start()
        poller.poll(10_000)
        self._take()
        os.write(self._answers, b"ready\n")
        poller.register(self._edges, select.POLLIN)
        told = True
        while told or self._waiting:
            ready = dict(poller.poll(self._timeout_ms()))
            if self._edges in ready:
                text = os.read(self._edges, 8)
                told = bool(text)
                if told:
                    self._waiting.append(int.from_bytes(text, "little"))
                else:
                    poller.unregister(self._edges)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._sampled)
            self._take()
            self._cut()
        gain_error = self._series.device.sensor.gain_error if self._series else 0.0
        answer = {"gain_error": gain_error, "windows": [_joules_and_variance(window) for window in self._windows]}
        with os.fdopen(self._answers, "w") as answers:
            json.dump(answer, answers)

    def _open(self) -> Any:
        return open_device("nvml", Site(local_rank=self._gpu))

    def _take(self) -> None:
        samples = self._sampler.take()
        if self._series is None and self._sampler.device is not None:
            self._series = Series(self._sampler.device, LONGEST_GAP_INTERVALS * max(self._interval_s, 0.2))
        for sample in samples:
            assert self._series is not None
            self._series.add(sample)

    def _timeout_ms(self) -> int:
        if not self._waiting:
            return -1
        return max(int(self._waiting[0] / 1e6 + EDGE_WAIT_S * 1e3 - time.monotonic() * 1e3) + 1, 0)

    def _cut(self) -> None:
        """Cut at every edge that a sample has passed; every other one ends a window."""
        assert self._series is not None, self._sampler.unavailable
        while self._waiting:
            edge_ns = self._waiting[0]
            if self._series.newest_ns < edge_ns:
                self._sampler.ask()
                if time.monotonic_ns() < edge_ns + EDGE_WAIT_S * 1e9:
                    return
            self._waiting.popleft()
            if self._start_ns:
                self._windows.append(self._series.integrals(self._start_ns, edge_ns))
                self._start_ns = 0
            else:
                self._start_ns = edge_ns
            self._series.forget_before(edge_ns)


def _joules_and_variance(window: Integrals) -> tuple[float | None, float]:
    return window.energy_j, window.energy_start_j2 + window.energy_end_j2 + window.energy_inside_j2


def _log(line: str) -> None:
    print(line, file=sys.stderr)


class Ours(Tool):
    """The agents of a node, one for each GPU."""

    name = "effllm"
    version = __version__

    def __init__(self, gpus: int) -> None:
        self.ranks = gpus
        self._pids: list[int] = []
        self._edges: list[int] = []
        self._answers = []
        for gpu in range(gpus):
            self._fork(gpu)
        for answers in self._answers:
            assert answers.readline() == "ready\n", "an agent did not start"
        self._edge_ns: dict[int, list[int]] = {}
        self._said: list[dict[str, Any]] = []

    def _fork(self, gpu: int) -> None:
        edges_read, edges_write = os.pipe()
        answers_read, answers_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for descriptor in (edges_write, answers_read, *self._edges):
                    os.close(descriptor)
                os.nice(NICENESS)
                _Agent(gpu, edges_read, answers_write).run()
                status = 0
            finally:
                os._exit(status)
        os.close(edges_read)
        os.close(answers_write)
        self._pids.append(pid)
        self._edges.append(edges_write)
        self._answers.append(os.fdopen(answers_read))

    def begin(self, key: int) -> None:
        """Tell every agent of an edge."""
        self._edge_ns[key] = [self._edge()]

    def end(self, key: int) -> None:
        """Tell every agent of an edge."""
        self._edge_ns[key].append(self._edge())

    def _edge(self) -> int:
        now_ns = time.monotonic_ns()
        for edges in self._edges:
            os.write(edges, now_ns.to_bytes(8, "little"))
        return now_ns

    def reading(self, key: int, calls: Calls) -> Reading:  # noqa: ARG002 - its edges are its own
        """Return what the agents answer once there are no more edges."""
        if not self._said:
            for edges in self._edges:
                os.close(edges)
            self._said = [json.load(answers) for answers in self._answers]
        windows = [said["windows"][key] for said in self._said]
        return Reading(
            *self._edge_ns[key],
            [joules for joules, _ in windows],
            [variance for _, variance in windows],
            [said["gain_error"] for said in self._said],
        )

    def cpu_s(self) -> float:
        """Return the CPU time of all agents; the scheduler counts in ns, the kernel's ticks are 10 ms."""
        tasks = [task for pid in self._pids for task in Path(f"/proc/{pid}/task").iterdir()]
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def close(self) -> None:
        """Wait for the agents."""
        for pid in self._pids:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    drive(Ours)
