"""Reads a GPU as often as the driver allows, and records the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from effllm.devices import Reader
from effllm.energy.readings import NS
from effllm.records.rank import Sample
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.nvml_facts import Facts, timed
from effllm.sensor_profile.record import DriverCall, LoadEdge

READS_APART_S = 0.002
FULL_READS_APART_S = 0.5


class Timer(Protocol):
    """The functions of the module ``time`` that are used here."""

    def monotonic_ns(self) -> int: ...

    def sleep(self, seconds: float, /) -> None: ...


class Record(NamedTuple):
    """The samples of one time span."""

    samples: list[Sample]
    full: list[Sample]  # samples with all quantities
    calls_s: list[float]
    beside: dict[str, list[tuple[int, float]]]  # readings that samples do not include, by name
    edges: Sequence[LoadEdge] = ()

    @property
    def origin_ns(self) -> int:
        """The time of the first sample, from which the record's seconds are counted."""
        return self.samples[0].time_ns

    @property
    def end_s(self) -> float:
        return (self.samples[-1].time_ns - self.origin_ns) * NS if self.samples else 0.0

    @property
    def apart_s(self) -> float:
        return self.end_s / max(len(self.samples) - 1, 1)

    def series(self, name: str) -> list[tuple[float, float]]:
        if name in self.beside:
            return [((time_ns - self.origin_ns) * NS, value) for time_ns, value in self.beside[name]]
        values = ((sample.time_ns, getattr(sample, name, None)) for sample in self.samples)
        return [((time_ns - self.origin_ns) * NS, value) for time_ns, value in values if value is not None]


def watch(
    reader: Reader,
    clock: Timer,
    progress: Callable[[float], None],
    seconds: float,
    beside: Mapping[str, Callable[[], float | None]],
    until: TorchLoad | None = None,
) -> Record:
    """Read for a duration, or until the load ends; then the record has the edges of the load."""
    read_energy = getattr(reader, "read_energy", reader.read)
    began_ns = full_ns = shown_ns = clock.monotonic_ns()
    record = Record([], [], [], {name: [] for name in beside})
    while True:
        now_ns = clock.monotonic_ns()
        if now_ns >= shown_ns:
            progress(min((now_ns - began_ns) * NS / seconds, 1.0))
            shown_ns = now_ns + round(0.1 / NS)
            if until is not None and (edges := until.take()) is not None:
                return record._replace(edges=edges)
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
    asked = [("a sample of the agent", reader.read)]
    if hasattr(reader, "read_energy"):
        asked.append(("a read of the agent at the edge of a window", reader.read_energy))
    own = [call for name, ask in asked if (call := timed(name, ask, clock.sleep)) is not None]
    return own + (facts.calls(clock.sleep) if facts else [])
