"""The answers to requests for spans, from the same samples and ledgers as the windows.

A chain is a series of adjacent spans. The agent keeps the samples since the end of the chain's last span, at most for
`ROLL_S`. After this time the samples are summed up, and the answer for the chain's next span includes these sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import asdict

from effllm.agent.rank_devices import RankDevices
from effllm.agent.series import Series
from effllm.energy.readings import NS
from effllm.job.joining import join_devices, largest
from effllm.records.board import Board
from effllm.records.rank import DeviceWindow, Gauge
from effllm.records.ring import Slot
from effllm.records.spans import ALONE, NAN, SpanPart

ROLL_S = 60.0
SETTLED_S = 3.0  # sums end this many seconds before now, so that the energy at their end is final
MAX_PENDING = 1024  # maximum number of unanswered requests; during a hanging device call, older ones are dropped


@dataclass
class _Chain:
    """The end of a chain's last span, and the sums since then."""

    start_ns: int
    from_ns: int  # end of the sums; the samples after this time are kept
    sums: dict[str, _Sums] = field(default_factory=dict)  # sums of each device, by its key


@dataclass(frozen=True)
class _Sums:
    """The sums of one device's readings in a span."""

    window: DeviceWindow
    min_w: float | None
    max_w: float | None
    num_readings: int

    def then(self, later: _Sums) -> _Sums:
        """Return the sums over this span and the next span."""
        min_w = min((watts for watts in (self.min_w, later.min_w) if watts is not None), default=None)
        max_w = largest((self.max_w, later.max_w))
        window = join_devices((self.window, later.window))
        return _Sums(window, min_w, max_w, self.num_readings + later.num_readings)


class Spans:
    """The requests of one training process.

    Args:
        board: receives the answers.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._pending: deque[Slot] = deque(maxlen=MAX_PENDING)  # unanswered requests, the oldest first
        self._chains: dict[int, _Chain] = {}
        self._devices: list[str] = []  # keys of the devices; a device keeps its position
        self._written: dict[str, Any] = {}

    def add(self, request: Slot) -> None:
        """Add a request; an empty span begins a chain and has no answer."""
        self._pending.append(request)

    @property
    def edges_ns(self) -> list[int]:
        """Ends of the requested spans without an answer, oldest first."""
        return [request.end_ns for request in self._pending]

    @property
    def moments_ns(self) -> list[int]:
        """Times at which the sums of a later answer may begin or end."""
        known = [moment for request in self._pending for moment in (request.start_ns, request.end_ns)]
        return known + [chain.from_ns for chain in self._chains.values()]

    def answer(self, devices: RankDevices, now_s: float, is_end: bool = False) -> None:
        """Answer the requests whose samples are complete; at the end of the trainer, answer all requests."""
        patience_s = devices.patience_s
        while self._pending:
            request = self._pending[0]
            if request.end_ns > request.start_ns:
                is_late = is_end or now_s - request.end_ns * NS > patience_s
                if not is_late and not devices.is_settled(request.end_ns):
                    break
                self._answer(request, devices)
            if request.what != ALONE:
                self._chains[request.what] = _Chain(request.end_ns, request.end_ns)
            self._pending.popleft()
        self._roll(devices, now_s)
        held_ns = min(self.moments_ns, default=None)
        for one in devices.series:  # they keep the samples that a later answer may need
            one.held_ns = held_ns

    def _answer(self, request: Slot, devices: RankDevices) -> None:
        self._write_devices(devices)
        chain = self._chains.get(request.what)
        if chain is None or chain.start_ns != request.start_ns:  # the previous request is lost, or there is no chain
            chain = _Chain(request.start_ns, request.start_ns)
        found = list(self._sums(chain, request.end_ns, devices.series))
        about = (request.number, len(found), request.start_ns, request.end_ns)
        for device, sums in found:
            self._board.spans.write(_part(about, device, sums))
        if not found:
            self._board.spans.write(SpanPart(request.number, -1, 0, request.start_ns, request.end_ns))

    def _sums(self, chain: _Chain, end_ns: int, series: Sequence[Series]) -> Iterator[tuple[int, _Sums]]:
        """Yield each device's position, and the sums of its readings from the start of the chain."""
        for one in series:
            window = one.span(chain.from_ns, end_ns)
            sums = _Sums(window, *one.energy.readings.power_range_w(chain.from_ns, end_ns))
            before = chain.sums.get(one.device.key)
            yield self._devices.index(one.device.key), before.then(sums) if before else sums

    def _roll(self, devices: RankDevices, now_s: float) -> None:
        """Sum up the readings of chains that have had no request for `ROLL_S`."""
        until_ns = int((now_s - SETTLED_S) / NS)
        for number, chain in self._chains.items():
            is_asked = any(request.what == number for request in self._pending)
            if not is_asked and (now_s - chain.from_ns * NS) > ROLL_S:
                self._write_devices(devices)
                found = dict(self._sums(chain, until_ns, devices.series))
                chain.sums |= {self._devices[device]: sums for device, sums in found.items()}
                chain.from_ns = until_ns

    def _write_devices(self, devices: RankDevices) -> None:
        known = {one.device.key: one.device for one in devices.series}
        self._devices += [key for key in known if key not in self._devices]
        facts = [
            {
                "name": device.name,
                "is_gpu": device.is_gpu,
                "torch_index": devices.torch_indices.get(key),
                "only_power": device.only_power,
                "simulated": device.simulated,
                "energy_method": device.energy_method,
                "not_measured": device.not_measured,
            }
            if (device := known.get(key)) is not None
            else {}
            for key in self._devices
        ]
        document = {"devices": facts, "unavailable": devices.unavailable}
        if document != self._written:
            self._written = document
            if not self._board.devices.write(document):  # too long
                self._board.devices.write({"devices": [{**fact, "not_measured": ()} for fact in facts]})


def _part(about: tuple[int, int, int, int], device: int, sums: _Sums) -> SpanPart:
    number, num_devices, start_ns, end_ns = about
    wall, energy = sums.window.wall, sums.window.wall.energy
    heat = sums.window.gauges.get("temperature_c") or Gauge(NAN, 0.0, NAN, NAN)
    return SpanPart(
        number,
        device,
        num_devices,
        start_ns,
        end_ns,
        **asdict(energy) | {"joules": _number(energy.joules)},
        power_min_w=_number(sums.min_w),
        power_max_w=_number(sums.max_w),
        temperature_c_seconds=heat.value_seconds,
        temperature_covered_s=heat.covered_s,
        temperature_max_c=heat.most,
        utilization_seconds=_number(wall.utilization_seconds),
        utilization_covered_s=wall.utilization_covered_s,
        memory_byte_seconds=_number(wall.memory_byte_seconds),
        memory_covered_s=wall.memory_covered_s,
        memory_max_bytes=_number(sums.window.memory_peak_bytes),
        num_readings=sums.num_readings,
    )


def _number(value: float | None) -> float:
    return NAN if value is None else value
