"""effllm as a measured tool: one process per GPU samples like an agent and receives the edges through a pipe.

Only `_Agent` uses effllm's code: it opens, samples and integrates a device as `effllm.agent.agent` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import replace

from benchmarks.energy_driver import Calls, Reading, Tool, drive
from effllm import __version__
from effllm.agent.sampler import Sampler
from effllm.agent.track import EDGE_WAIT_S, DeviceTrack
from effllm.config.settings import Config, cache_folder
from effllm.devices import Site, open_device
from effllm.energy.calibration import calibrate
from effllm.records.energy import EnergyAmount
from effllm.records.rank import Device, Event, Sample, Sensor

NICENESS = 5  # as in effllm.agent.agent.main
#: If this environment variable is set, the agents use the exact lag of the sensors (0), as after `effllm profile`.
PROFILED = "BENCHMARK_PROFILED"


class _Agent:
    """Samples one GPU, and measures the windows whose edges arrive."""

    def __init__(self, gpu: int, edges: int, answers: int) -> None:
        self._gpu, self._edges, self._answers = gpu, edges, answers
        self._sampled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calibrated = threading.Event()
        interval_s = Config().collection_interval_s
        self._track = DeviceTrack(
            Sampler(self._open, interval_s, _log_event, self._sampled, self._calibrate), interval_s
        )
        self._waiting: deque[int] = deque()
        self._start_ns = 0
        self._windows: list[EnergyAmount] = []

    def run(self) -> None:
        """Measure windows until the pipe is closed, then write the results of all windows."""
        os.nice(NICENESS)
        self._track.sampler.start()
        self._track.sampler.request_calibration()
        self._calibrated.wait(10.0)
        os.write(self._answers, b"ready\n")
        poller = select.poll()
        poller.register(self._sampled, select.POLLIN)
        poller.register(self._edges, select.POLLIN)
        is_open = True
        while is_open or self._waiting:
            ready = dict(poller.poll(self._timeout_ms()))
            if self._edges in ready:
                edge = os.read(self._edges, 8)
                is_open = bool(edge)
                if is_open:
                    self._waiting.append(int.from_bytes(edge, "little"))
                else:
                    poller.unregister(self._edges)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._sampled)
            self._track.take_samples()
            self._cut()
        assert self._track.series is not None
        for event in self._track.take_events(time.monotonic_ns(), time.time()):
            _log(f"GPU {self._gpu}: {event.kind}: {event.text}")
        gain_error = self._track.series.device.sensor.gain_error
        answer = {"gain_error": gain_error, "windows": [_joules_and_variance(window) for window in self._windows]}
        with os.fdopen(self._answers, "w") as answers:
            json.dump(answer, answers)

    def _open(self) -> Any:
        return open_device("nvml", Site(local_rank=self._gpu))

    def _calibrate(self, device: Device, read: Callable[[], Sample], wait: Callable[[float], None]) -> Sensor:
        sensor = calibrate(device, read, cache_folder() / "calibration", wait=wait)
        if PROFILED in os.environ:
            # The counter has no lag here, but it measures only the end of each tick (docs/calibration.md).
            sensor = replace(sensor, lag_s=-(1 - sensor.duty) * sensor.tick_s / 2, lag_error_s=0.0)
        self._calibrated.set()
        return sensor

    def _timeout_ms(self) -> int:
        if not self._waiting:
            return -1
        return max(int(self._waiting[0] / 1e6 + EDGE_WAIT_S * 1e3 - time.monotonic() * 1e3) + 1, 0)

    def _cut(self) -> None:
        """Measure the windows whose edges are settled; edges alternate between start and end."""
        for edge_ns in self._waiting:
            self._track.request_samples(edge_ns)
        while self._waiting:
            edge_ns = self._waiting[0]
            if not self._track.is_settled(edge_ns) and time.monotonic_ns() < edge_ns + EDGE_WAIT_S * 1e9:
                return
            self._waiting.popleft()
            assert self._track.series is not None, self._track.sampler.unavailable
            if self._start_ns:
                self._windows.append(self._track.series.integrals(self._start_ns, edge_ns).energy)
                self._start_ns = 0
            else:
                self._start_ns = edge_ns
            self._track.series.forget_before(edge_ns)


def _joules_and_variance(window: EnergyAmount) -> tuple[float | None, float]:
    return window.joules, window.start_j2 + window.end_j2 + window.inside_j2


def _log_event(event: Event) -> None:
    _log(event.text)


def _log(line: str) -> None:
    print(line, file=sys.stderr)


class Ours(Tool):
    """The agents of a node, one for each GPU.

    At an edge, the caller reads the clock and writes to one descriptor, as a trainer does.  The caller replaces
    the trainers of all GPUs, so a separate process forwards the edge to every agent.
    """

    name = "effllm"
    version = __version__

    def __init__(self, gpus: int) -> None:
        self._agents: list[int] = []
        self._answers: list[TextIO] = []
        self._ends: list[int] = []
        with (Path.home() / "calibrating").open("w") as lock:
            # Agents start one after the other: a test machine has fewer cores than a node with that many GPUs.
            fcntl.flock(lock, fcntl.LOCK_EX)
            for gpu in range(gpus):
                self._start_agent(gpu)
            fcntl.flock(lock, fcntl.LOCK_UN)  # close() does not unlock: the agents have the file open too
        read, self._edges = os.pipe()
        self._herald = _fork(lambda: _pass_on(read, self._ends), [self._edges])
        for end in (read, *self._ends):
            os.close(end)
        self._edge_ns: dict[int, list[int]] = {}
        self._said: list[dict[str, Any]] = []

    def _start_agent(self, gpu: int) -> None:
        edges_read, edges_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self._agents.append(_fork(_Agent(gpu, edges_read, answers_write).run, [edges_write, answers_read, *self._ends]))
        os.close(edges_read)
        os.close(answers_write)
        answers = os.fdopen(answers_read)
        assert answers.readline() == "ready\n", "an agent did not start"
        self._answers.append(answers)
        self._ends.append(edges_write)

    def begin(self, key: int) -> None:
        self._edge_ns[key] = [self._edge()]

    def end(self, key: int) -> None:
        self._edge_ns[key].append(self._edge())

    def _edge(self) -> int:
        now_ns = time.monotonic_ns()
        os.write(self._edges, now_ns.to_bytes(8, "little"))
        return now_ns

    def reading(self, key: int, calls: Calls) -> Reading:  # noqa: ARG002 - begin and end stamp the edges
        if not self._said:
            os.close(self._edges)
            self._said = [json.load(answers) for answers in self._answers]
        windows = [said["windows"][key] for said in self._said]
        return Reading(
            *self._edge_ns[key],
            [joules for joules, _ in windows],
            [variance for _, variance in windows],
            [said["gain_error"] for said in self._said],
        )

    def cpu_s(self) -> float:
        """Return the mean CPU time of the agents, from the scheduler's counters in ns (psutil: units of 10 ms)."""
        tasks = [task for pid in self._agents for task in Path(f"/proc/{pid}/task").iterdir()]
        spent_ns = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
        return spent_ns / 1e9 / len(self._agents)

    def close(self) -> None:
        for pid in (*self._agents, self._herald):
            os.waitpid(pid, 0)


def _fork(run: Callable[[], None], not_its: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for descriptor in not_its:
                os.close(descriptor)
            run()
            status = 0
        except Exception:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    return pid


def _pass_on(edges: int, ends: list[int]) -> None:
    while edge := os.read(edges, 8):
        for end in ends:
            os.write(end, edge)


if __name__ == "__main__":
    drive(Ours)
