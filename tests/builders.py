"""Objects that tests build: a training loop with a clock that the test sets, devices, and the messages of an agent.

The default is a window of ten iterations of one second each, on a GPU with a power of 100 W.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from effllm.records import ring
from effllm.records.counters import FIELDS
from effllm.records.energy import EnergyAmount
from effllm.records.rank import Device, DeviceWindow, Integrals, ParameterCount, RankReport
from effllm.records.ring import RingReader, RingWriter
from effllm.records.wire import Hello, Reports
from effllm.trainer import counts as generations_module
from effllm.trainer import recorder as recorder_module
from effllm.trainer.recorder import Recorder
from effllm.trainer.value_buffer import ValueBuffer

GIB = 2**30
NS = 1_000_000_000

MADE_NS = 1000


class Loop:
    """A training loop whose clock the test sets."""

    def __init__(self, log_interval: int, offset: int, slots: int) -> None:
        self.now_ns = MADE_NS
        self.warnings = []
        self.wakes = 0
        self.writer = RingWriter(slots)
        self.reader = RingReader(self.writer.descriptor)
        self.values, self.names = ValueBuffer(), []
        about = (self.writer, log_interval, offset, self._wake, self.warnings.append)
        self.recorder = Recorder(*about, self.values, self._index_of)

    def value(self, name, value):
        self.values.add_value(name, value)

    def _index_of(self, name):
        self.names.append(name)
        return len(self.names) - 1

    def _wake(self):
        self.wakes += 1

    def clock(self):
        return self.now_ns

    def start(self, at_ns):
        self.now_ns = at_ns
        self.recorder.start(_now=self.clock)

    def end(self, at_ns, *counts, **named):
        self.now_ns = at_ns
        self.recorder.end(*counts, **named, _now=self.clock)

    def phase(self, name, from_ns, to_ns):
        self.now_ns = from_ns
        self.recorder.phase_start(name)
        self.now_ns = to_ns
        self.recorder.phase_end()

    def slots(self, kind=None):
        return [slot for slot in self.reader.read() if kind in (None, slot.kind)]

    def iterations(self):
        return self.slots(ring.ITERATION)


def counted(slot):
    """Return the counters of a record by their names."""
    return SimpleNamespace(**dict(zip(FIELDS, slot.counts, strict=True)))


@contextmanager
def looping(log_interval=10, offset=0, slots=256):
    with pytest.MonkeyPatch.context() as patch:
        loop = None
        clock = SimpleNamespace(monotonic_ns=lambda: loop.now_ns if loop else MADE_NS)
        for module in (recorder_module, generations_module):
            patch.setattr(module, "time", clock)
        loop = Loop(log_interval, offset, slots)
        try:
            yield loop
        finally:
            loop.reader.close()
            loop.writer.close()


def gpu(key: str = "GPU-0", **changes: Any) -> Device:
    """Return a GPU with an energy counter; its key is the first argument."""
    known: dict[str, Any] = {"key": key, "kind": "nvml", "energy_method": "counter", "power_scope": "gpu"}
    return Device(**{**known, **changes})


def amount(joules: float | None = None, covered_s: float = 0.0, gain: float = 0.05, **changes: float) -> EnergyAmount:
    """Return an amount of energy without a random error; its sensor is not calibrated."""
    return EnergyAmount(joules, covered_s, gain_j=gain * (joules or 0.0), **changes)


def full(wall_s: float, watts: float = 100.0, memory_bytes: float = GIB, utilization: float = 0.5) -> Integrals:
    """Return the integrals of constant readings with full coverage."""
    return Integrals(amount(watts * wall_s, wall_s), memory_bytes * wall_s, wall_s, utilization * wall_s, wall_s)


def device_window(name: str = "GPU-0", wall_s: float = 10.0, watts: float = 100.0, **changes: Any) -> DeviceWindow:
    """Return a window of one device with full coverage."""
    known: dict[str, Any] = {"wall": full(wall_s, watts), "memory_peak_bytes": GIB, "power_peak_w": watts}
    return DeviceWindow(name, **{**known, **changes})


def row(rank: int = 0, window: int = 1, **changes: Any) -> RankReport:
    """Return a window of ten iterations of one second each; a tenth of the time is data wait."""
    busy_s, wait_s = changes.get("busy_s", 9.0), changes.get("wait_s", 1.0)
    phases_s = changes.get("phases_s", {})
    wall_s = busy_s + wait_s + sum(phases_s.values())
    known: dict[str, Any] = {
        "agent": f"agent-{rank}",
        "sequence": window,
        "rank": rank,
        "window": window,
        "iteration_first": 10 * window - 9,
        "iteration_last": 10 * window,
        "iteration_shown": 10 * window,
        "start_time_s": 1000.0 + 10.0 * (window - 1),
        "end_time_s": 1000.0 + 10.0 * (window - 1) + wall_s,
        "wall_s": wall_s,
        "busy_s": busy_s,
        "wait_s": wait_s,
        "phases_s": phases_s,
        "tokens": 1000,
        "tokens_processed": 1000,
        "tokens_loss": 0,
        "samples": 10,
        "devices": (device_window(f"GPU-{rank}", wall_s),),
    }
    return RankReport(**{**known, **changes})


def hello(rank: int = 0, world_size: int = 2, **changes: Any) -> Hello:
    """Return the HELLO of a rank with one GPU."""
    known: dict[str, Any] = {
        "job": "job",
        "agent": f"agent-{rank}",
        "rank": rank,
        "local_rank": rank,
        "world_size": world_size,
        "host": "node0",
        "role": "trainer",
        "devices": (gpu(f"GPU-{rank}"),),
        "parameters": ParameterCount(total=1000),
        "log_interval": 10,
    }
    return Hello(**{**known, **changes})


def reports(*rows: RankReport, **changes: Any) -> Reports:
    """Return a message with these reports."""
    return Reports(rows, **changes)
