"""The energy of windows on a real GPU, compared with the known energy of its load.

The load is switched on and off at known times.  A window's energy is its length times the power at rest, plus its time
under load times the additional power.  Power at rest and additional power are fitted to all windows.  The residual of a
window is an upper bound of its error, because the residual includes variations of the load.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.figure import Figure, median
from effllm.agent.sampler import Sampler
from effllm.agent.track import EDGE_WAIT_S, DeviceTrack
from effllm.devices import Reader, Site, open_device
from effllm.records.rank import Device, Sample, Sensor
from effllm.sensor_profile.estimates import Load
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.record import LoadEdge

#: Number of windows by length in s.
WINDOWS, QUICK_WINDOWS = {5.0: 8, 1.0: 30, 0.2: 80}, {5.0: 3, 1.0: 5, 0.2: 10}
SETTLE_S = 3.0
OURS, BARE = "effllm", "counter read at the edges"


@dataclass(frozen=True)
class Window:
    """One window, as measured by a tool."""

    length_s: float  # requested length
    start_ns: int
    end_ns: int
    joules: float
    random_j: float | None = None  # half-width, 95 %


def windows(key: str, loader: TorchLoad, sensor: Sensor, counts: Mapping[float, int]) -> list[Figure]:
    """Return the mean error by window length, for effllm and for the bare counter.

    Args:
        key: key of the GPU.
        loader: loads the GPU.
        sensor: the sensor from the GPU's profile.
        counts: number of windows by length in s.
    """
    chance = random.Random(7)
    pauses = [[chance.uniform(0.05, 0.25) for _ in range(count)] for count in counts.values()]
    seconds = SETTLE_S + sum(length_s * count for length_s, count in counts.items()) + sum(map(sum, pauses)) + 2.0
    stretches: list[float] = []
    while sum(stretches) < seconds:
        stretches.append(chance.uniform(0.1, 0.9))
    measuring = _Measuring(key, sensor)
    try:
        measuring.start()
        loader.start_stretches(stretches)
        measuring.work_until(time.monotonic() + SETTLE_S)
        for length_s, before_s in zip(counts, pauses, strict=True):
            for pause_s in before_s:
                measuring.window(length_s, pause_s)
        measuring.settle()
        while (edges := loader.take_edges()) is None:
            time.sleep(0.1)
    finally:
        measuring.close()
    return [
        figure
        for tool, made in ((OURS, measuring.ours), (BARE, measuring.bare))
        for figure in judged(tool, made, edges)
    ]


class _Measuring:
    """Measures windows with a device track, as an agent does, and with a second reader of the counter at the edges."""

    def __init__(self, key: str, sensor: Sensor) -> None:
        self.ours: list[Window] = []
        self.bare: list[Window] = []
        self._site = Site(visible_devices=key)
        self._sensor = sensor
        self._sampled = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ready = threading.Event()
        self._track = DeviceTrack(Sampler(self._open, 1.0, lambda _event: None, self._sampled, self._calibrate), 1.0)
        self._waiting: deque[tuple[float, int, int]] = deque()
        self._reader: Reader | None = None

    def start(self) -> None:
        """Open the GPU twice."""
        self._reader = self._open()
        self._track.sampler.start()
        self._track.sampler.request_calibration()
        if not self._ready.wait(10.0):
            raise RuntimeError(f"the GPU cannot be sampled: {self._track.sampler.unavailable}")

    def close(self) -> None:
        self._track.sampler.stop(5.0)
        if self._reader is not None:
            self._reader.close()
        os.close(self._sampled)

    def window(self, length_s: float, pause_s: float) -> None:
        """Measure one window after a pause."""
        self.work_until(time.monotonic() + pause_s)
        start_ns, first = self._edge()
        self.work_until(start_ns / 1e9 + length_s)
        end_ns, last = self._edge()
        self._waiting.append((length_s, start_ns, end_ns))
        if first.energy_j is not None and last.energy_j is not None:
            self.bare.append(Window(length_s, first.time_ns, last.time_ns, last.energy_j - first.energy_j))

    def work_until(self, until_s: float) -> None:
        """Sample like an agent until this time."""
        while (left_s := until_s - time.monotonic()) > 0:
            self._cut()
            time.sleep(min(left_s, 0.005))

    def settle(self) -> None:
        """Wait until all windows are measured."""
        while self._waiting:
            self.work_until(time.monotonic() + 0.02)

    def _open(self) -> Reader:
        return open_device("nvml", self._site)

    def _calibrate(self, _device: Device, _read: Callable[[], Sample], _wait: Callable[[float], None]) -> Sensor:
        self._ready.set()
        return self._sensor

    def _edge(self) -> tuple[int, Sample]:
        assert self._reader is not None
        edge_ns = time.monotonic_ns()
        self._track.request_samples(edge_ns)
        sample, _ = getattr(self._reader, "read_energy", self._reader.read)()
        return edge_ns, sample

    def _cut(self) -> None:
        self._track.take_samples()
        while self._waiting:
            length_s, start_ns, end_ns = self._waiting[0]
            if not self._track.is_settled(end_ns) and time.monotonic_ns() < end_ns + EDGE_WAIT_S * 1e9:
                return
            self._waiting.popleft()
            assert self._track.series is not None
            cut = self._track.series.integrals(start_ns, end_ns).energy
            if cut.joules is not None:
                self.ours.append(Window(length_s, start_ns, end_ns, cut.joules, cut.error_j))


def judged(tool: str, made: Sequence[Window], edges: Sequence[LoadEdge]) -> list[Figure]:
    load = Load(edges, 0)
    spans_s = [(one.end_ns - one.start_ns) / 1e9 for one in made]
    middles_s = np.array([(one.start_ns + one.end_ns) / 2e9 for one in made])
    on_s = (load.loaded_share(middles_s, np.array(spans_s)) * spans_s).tolist()
    levels_w = two_levels(spans_s, on_s, [one.joules for one in made])
    if levels_w is None:
        return []
    rest_w, rise_w = levels_w
    truths_j = [rest_w * span_s + rise_w * loaded_s for span_s, loaded_s in zip(spans_s, on_s, strict=True)]
    figures = []
    for length_s in sorted({one.length_s for one in made}, reverse=True):
        pairs = [(one, truth_j) for one, truth_j in zip(made, truths_j, strict=True) if one.length_s == length_s]
        sizes = sorted(abs(one.joules / truth_j - 1) for one, truth_j in pairs)
        detail = {"windows": len(pairs), "median_percent": 100 * median(sizes), "worst_percent": 100 * sizes[-1]}
        if tool == OURS:
            within = [abs(one.joules - truth_j) <= (one.random_j or 0.0) for one, truth_j in pairs]
            detail["in_stated_interval"] = sum(within) / len(within)
        mean = 100 * sum(sizes) / len(sizes)
        figures.append(Figure(f"{tool}: mean error of a window of {length_s:g} s, at most", mean, "%", detail=detail))
    return figures


def two_levels(spans_s: Sequence[float], on_s: Sequence[float], joules: Sequence[float]) -> tuple[float, float] | None:
    """Return the power at rest and the additional power under load: a least-squares fit to all windows."""
    aa, bb = sum(span**2 for span in spans_s), sum(on**2 for on in on_s)
    ab = sum(span * on for span, on in zip(spans_s, on_s, strict=True))
    ay = sum(span * one for span, one in zip(spans_s, joules, strict=True))
    by = sum(on * one for on, one in zip(on_s, joules, strict=True))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return None
    return (ay * bb - by * ab) / determinant, (by * aa - ay * ab) / determinant
