"""Reads a GPU as densely as its driver allows, and keeps the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from effllm.devices import Reader
from effllm.profiling.load import Loader
from effllm.profiling.nvml_facts import Facts, timed
from effllm.profiling.record import DriverCall, LoadEdge
from effllm.records.rank import Sample

NS = 1e-9

READS_APART_S = 0.002
FULL_READS_APART_S = 0.5


class Timer(Protocol):
    """As much of the module ``time`` as is used."""

    def monotonic_ns(self) -> int:
        """Return the monotonic time."""

    def sleep(self, seconds: float, /) -> None:
        """Wait."""


class Record(NamedTuple):
    """What was read in one stretch."""

    samples: list[Sample]
    full: list[Sample]  # those with all quantities
    calls_s: list[float]
    beside: dict[str, list[tuple[int, float]]]  # what else was read densely

    @property
    def origin_ns(self) -> int:
        """Where its seconds begin."""
        return self.samples[0].time_ns

    @property
    def end_s(self) -> float:
        """When the last sample was taken."""
        return (self.samples[-1].time_ns - self.origin_ns) * NS if self.samples else 0.0

    @property
    def apart_s(self) -> float:
        """By how much samples are apart on average."""
        return self.end_s / max(len(self.samples) - 1, 1)

    def series(self, name: str) -> list[tuple[float, float]]:
        """Return the moments at which a quantity was read, and its values."""
        if name in self.beside:
            return [((time_ns - self.origin_ns) * NS, value) for time_ns, value in self.beside[name]]
        values = ((sample.time_ns, getattr(sample, name, None)) for sample in self.samples)
        return [((time_ns - self.origin_ns) * NS, value) for time_ns, value in values if value is not None]


def watch(
    reader: Reader,
    clock: Timer,
    tell: Callable[[float], None],
    seconds: float,
    beside: Mapping[str, Callable[[], float | None]],
    until: Loader | None = None,
    edges: list[LoadEdge] | None = None,
) -> Record:
    """Read densely for so long, or until the load is over, whose edges are put into ``edges``."""
    read_energy = getattr(reader, "read_energy", reader.read)
    began_ns = full_ns = shown_ns = clock.monotonic_ns()
    record = Record([], [], [], {name: [] for name in beside})
    while True:
        now_ns = clock.monotonic_ns()
        if now_ns >= shown_ns:
            tell(min((now_ns - began_ns) * NS / seconds, 1.0))
            shown_ns = now_ns + round(0.1 / NS)
            if until is not None and edges is not None and (taken := until.take()) is not None:
                edges.extend(taken)
                return record
        if until is None and now_ns >= began_ns + seconds / NS:
            return record
        is_full = now_ns >= full_ns
        sample, _ = reader.read() if is_full else read_energy()
        if is_full:
            record.full.append(sample)
            full_ns = now_ns + round(FULL_READS_APART_S / NS)
        else:
            record.calls_s.append((clock.monotonic_ns() - now_ns) * NS)
        if not record.samples or sample.time_ns > record.samples[-1].time_ns:
            record.samples.append(sample)
        for name, ask in beside.items():
            before_ns = clock.monotonic_ns()
            value = ask()
            if value is not None:
                record.beside[name].append(((before_ns + clock.monotonic_ns()) // 2, value))
        clock.sleep(READS_APART_S)


def call_costs(reader: Reader, facts: Facts | None, clock: Timer) -> list[DriverCall]:
    """Return what reads of the agent take, and single calls of the driver."""
    asked = [("a sample of the agent", reader.read)]
    if hasattr(reader, "read_energy"):
        asked.append(("the agent's read at an edge", reader.read_energy))
    own = [call for name, ask in asked if (call := timed(name, ask, clock.sleep)) is not None]
    return own + (facts.calls(clock.sleep) if facts else [])
