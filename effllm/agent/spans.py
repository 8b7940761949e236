"""The answers to requests for spans, from the same samples and ledgers as the windows.

A chain is a series of adjacent spans. The agent keeps the samples since the end of the chain's last span; they are
summed up like those of a long window (`Series.compact`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import asdict

from effllm.agent.rank_devices import RankDevices
from effllm.agent.series import Series
from effllm.energy.readings import NS
from effllm.records.board import Board
from effllm.records.rank import Gauge
from effllm.records.ring import Slot
from effllm.records.spans import ALONE, NAN, SpanPart

MAX_PENDING = 1024  # maximum number of unanswered requests; during a hanging device call, older ones are dropped


class Spans:
    """The requests of one training process; ``board`` receives the answers."""

    def __init__(self, board: Board) -> None:
        self._board = board
        #: Unanswered requests, the oldest first; an empty span begins a chain and has no answer.
        self.pending: deque[Slot] = deque(maxlen=MAX_PENDING)
        self._chain_ends_ns: dict[int, int] = {}  # number of the chain -> end of its last span
        self._device_keys: list[str] = []  # keys of the devices; a device keeps its position
        self._written_document: dict[str, Any] = {}  # the devices in the board

    @property
    def unanswered_ends_ns(self) -> list[int]:
        """Ends of the requested spans without an answer, oldest first."""
        return [request.end_ns for request in self.pending]

    @property
    def possible_bounds_ns(self) -> list[int]:
        """Times at which a later answer may begin or end."""
        moments = [moment for request in self.pending for moment in (request.start_ns, request.end_ns)]
        return [*moments, *self._chain_ends_ns.values()]

    def answer_requests(self, devices: RankDevices, now_s: float, is_end: bool = False) -> None:
        """Answer the requests whose samples are complete; at the end of the trainer, answer all requests."""
        patience_s = devices.patience_s
        while self.pending:
            request = self.pending[0]
            if request.end_ns > request.start_ns:
                is_late = is_end or now_s - request.end_ns * NS > patience_s
                if not is_late and not devices.is_settled(request.end_ns):
                    break
                self._write_answer(request, devices)
            if request.what != ALONE:  # the number of a chain
                self._chain_ends_ns[request.what] = request.end_ns
            self.pending.popleft()
        keep_from_ns = min(self.possible_bounds_ns, default=None)
        for series in devices.series:  # they keep the samples that a later answer may need
            series.keep_from_ns = keep_from_ns

    def _write_answer(self, request: Slot, devices: RankDevices) -> None:
        self._write_devices(devices)
        for series in devices.series:
            self._board.spans.write_part(self._span_part(request, series, len(devices.series)))
        if not devices.series:
            self._board.spans.write_part(SpanPart(request.number, -1, 0, request.start_ns, request.end_ns))

    def _span_part(self, request: Slot, series: Series, num_devices: int) -> SpanPart:
        span_ns = (request.start_ns, request.end_ns)
        window = series.window_of_span(*span_ns)
        min_w, max_w, num_readings = series.energy.readings.power_range_w(*span_ns)
        wall, energy = window.wall, window.wall.energy
        temperature = window.gauges.get("temperature_c") or Gauge(NAN, 0.0, NAN, NAN)
        return SpanPart(
            request.number,
            self._device_keys.index(series.device.key),
            num_devices,
            *span_ns,
            **asdict(energy) | {"joules": _or_nan(energy.joules)},
            power_min_w=_or_nan(min_w),
            power_max_w=_or_nan(max_w),
            temperature_c_seconds=temperature.value_seconds,
            temperature_covered_s=temperature.covered_s,
            temperature_max_c=temperature.most,
            utilization_seconds=_or_nan(wall.utilization_seconds),
            utilization_covered_s=wall.utilization_covered_s,
            memory_byte_seconds=_or_nan(wall.memory_byte_seconds),
            memory_covered_s=wall.memory_covered_s,
            memory_max_bytes=_or_nan(window.memory_peak_bytes),
            num_readings=num_readings,
        )

    def _write_devices(self, devices: RankDevices) -> None:
        open_devices = {series.device.key: series.device for series in devices.series}
        self._device_keys += [key for key in open_devices if key not in self._device_keys]
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
            if (device := open_devices.get(key)) is not None
            else {}
            for key in self._device_keys
        ]
        document = {"devices": facts, "unavailable": devices.unavailable}
        if document != self._written_document:
            self._written_document = document
            if not self._board.devices.write_document(document):  # too long
                self._board.devices.write_document({"devices": [{**fact, "not_measured": ()} for fact in facts]})


def _or_nan(value: float | None) -> float:
    return NAN if value is None else value
