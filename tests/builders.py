"""Objects that tests build: a training loop with a clock that the test sets, devices, and the messages of an agent.

The default is a window of ten iterations of one second each, on a GPU with a power of 100 W.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import Ledger, restore
from effllm.records import ring
from effllm.records.clock import Now
from effllm.records.counters import FIELDS
from effllm.records.energy import EnergyAmount
from effllm.records.job import ClusterReport, Summary
from effllm.records.rank import Device, DeviceWindow, Event, Integrals, ParameterCount, RankReport
from effllm.records.ring import RingReader, RingWriter
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Hello, Reports
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
        return [slot for slot in self.reader.read_new() if kind in (None, slot.kind)]

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


class Job:
    """An aggregator, its clock, and agents whose messages the test chooses; unix times are 1000 s larger."""

    def __init__(self, world_size: int = 2, ledger: Ledger | None = None, name: str = "job", **settings: Any) -> None:
        self.world_size, self.name, self.now_s = world_size, name, 0.0
        attempt = ledger.attempt if ledger else 1
        self.aggregator = Aggregator(Config(**settings), name, attempt, 1000.0, ledger)

    @property
    def now(self) -> Now:
        return Now(self.now_s, self.now_s + 1000.0)

    def hello(self, rank: int, **changes: Any) -> str:
        """Send a HELLO; return the reason of a refusal."""
        known = {"world_size": self.world_size, "job": self.name, **changes}
        return self.aggregator.hello(hello(rank, **known), self.now)

    def join(self, *ranks: int, **changes: Any) -> Job:
        for rank in ranks or range(self.world_size):
            assert self.hello(rank, **changes) == ""
        return self

    def send(self, *rows: RankReport, **changes: Any) -> bool:
        return self.aggregator.reports(reports(*rows, **changes), self.now)

    def event(self, rank: int, kind: str, text: str, time_s: float = 1000.0, **changes: Any) -> None:
        agent = changes.pop("agent", f"agent-{rank}")
        self.aggregator.agent_event(AgentEvent(agent, rank, Event(time_s, kind, text, **changes)), self.now)

    def beat(self, rank: int, lost: int = 0) -> None:
        self.aggregator.heartbeat(Heartbeat(f"agent-{rank}", rank, 10, "in an iteration", 0.0, lost), self.now)

    def bye(self, rank: int, status: str = "completed", last_ordinal: int = 10, **changes: Any) -> bool:
        return self.aggregator.bye(Bye(f"agent-{rank}", rank, status, last_ordinal, **changes), self.now)

    def wait(self, seconds: int, *alive: int) -> Job:
        """Advance the clock second by second; the ``alive`` ranks send a heartbeat in each second."""
        for _ in range(seconds):
            self.now_s += 1.0
            for rank in alive:
                self.beat(rank)
            self.tick()
        return self

    def tick(self, seconds: float = 0.0) -> Job:
        self.now_s += seconds
        self.aggregator.tick(self.now)
        return self

    def closed(self) -> list[ClusterReport]:
        return [one.report for one in self.aggregator.closed_windows.take_windows()]

    def events(self, kind: str = "") -> list[Event]:
        return [event for event in self.aggregator.events.take_events() if kind in ("", event.kind)]

    def summary(self, ended: bool = False) -> Summary:
        return self.aggregator.summary(self.now.unix_s, ended)

    def ledger(self) -> Ledger:
        """Return the state that another aggregator continues."""
        return restore(self.aggregator.snapshot())

    def next_ledger(self, job: str) -> Ledger:
        """Return the state that another aggregator continues, for the next attempt."""
        ledger = self.ledger()
        ledger.begin_next_attempt(job)
        return ledger
