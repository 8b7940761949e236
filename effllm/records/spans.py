"""The answers of an agent to its training process: the readings of each device in a requested span of time.

The newest answers are in shared memory; the oldest are overwritten. Neither process waits for the other process. A
half-written answer has a wrong checksum, and is read again later. Standard library only.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

NUM_ANSWERS = 512
ALONE = 0  # number of the chain for spans that do not follow each other
NAN = float("nan")


class SpanPart(NamedTuple):
    """The readings of one device in one span; a quantity that was not measured is ``nan`` with 0 covered seconds.

    Sums are time integrals over the covered seconds. ``start_j2``, ``end_j2``, ``inside_j2`` and ``gain_j`` have the
    meaning of the fields of `effllm.records.energy.EnergyAmount`.
    """

    number: int  # number of the request
    device: int  # position in the board's list of devices; -1: the rank has no device
    num_devices: int  # number of parts that answer the same request
    start_ns: int
    end_ns: int
    joules: float = NAN
    covered_s: float = 0.0
    start_j2: float = 0.0
    end_j2: float = 0.0
    inside_j2: float = 0.0
    gain_j: float = 0.0
    estimated_j: float = 0.0
    power_min_w: float = NAN
    power_max_w: float = NAN
    temperature_c_seconds: float = NAN
    temperature_covered_s: float = 0.0
    temperature_max_c: float = NAN
    utilization_seconds: float = NAN
    utilization_covered_s: float = 0.0
    memory_byte_seconds: float = NAN
    memory_covered_s: float = 0.0
    memory_max_bytes: float = NAN
    num_readings: float = 0.0  # number of power readings

    @property
    def error_j(self) -> float:
        """The random error of the energy: half-width of the 95 % interval."""
        return NORMAL_95 * math.sqrt(self.start_j2 + self.end_j2 + self.inside_j2)

    def then(self, later: SpanPart) -> SpanPart:
        """Return the readings in this span and the next span, which share an edge; the errors at this edge cancel.

        The rules of `effllm.records.energy.EnergyAmount.then` apply; its module needs more than the standard library.
        """
        is_shared = not math.isnan(self.joules + later.joules) and self.end_ns == later.start_ns
        merged: dict[str, Any] = {}
        for names, combine in ((_SUMS, sum), (_MIN, min), (_MAX, max)):
            merged |= {name: _combine_measured(combine, getattr(self, name), getattr(later, name)) for name in names}
        merged["inside_j2"] += 0.0 if is_shared else self.end_j2 + later.start_j2
        return later._replace(start_ns=self.start_ns, start_j2=self.start_j2, **merged)


_SUMS = (
    "joules", "covered_s", "inside_j2", "gain_j", "estimated_j", "temperature_c_seconds", "temperature_covered_s",
    "utilization_seconds", "utilization_covered_s", "memory_byte_seconds", "memory_covered_s", "num_readings",
)  # fmt: skip
_MIN, _MAX = ("power_min_w",), ("power_max_w", "temperature_max_c", "memory_max_bytes")
NORMAL_95 = 1.96  # half-width of a 95 % interval of a normal distribution, in standard deviations


def _combine_measured(combine: Callable[..., float], *values: float) -> float:
    """Combine the values that are not nan; return nan if all values are nan."""
    measured = [value for value in values if not math.isnan(value)]
    return combine(measured) if measured else NAN


_NEWEST = struct.Struct("<Q")
_BODY = struct.Struct("<Q5q18d")  # running number of the answer, then the fields of `SpanPart`
_CHECKSUM = struct.Struct("<I")
_SLOT_BYTES = 256
_SLOTS_AT = 64
ANSWERS_BYTES = _SLOTS_AT + NUM_ANSWERS * _SLOT_BYTES
if _BODY.size + _CHECKSUM.size > _SLOT_BYTES:  # pragma: no cover - a mistake in this file
    raise AssertionError(_BODY.size)


class SpanAnswers:
    """The newest answers, in `ANSWERS_BYTES` of a shared map, from ``offset`` on."""

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._memory, self._offset = memory, offset

    @property
    def newest(self) -> int:
        """Running number of the newest answer, 0 before the first."""
        return int(_NEWEST.unpack_from(self._memory, self._offset)[0])

    def write_part(self, part: SpanPart) -> None:
        """Add an answer; only the agent calls this method."""
        sequence = self.newest + 1
        body = _BODY.pack(sequence, *part)
        offset = self._slot_offset(sequence)
        self._memory[offset : offset + len(body)] = body
        _CHECKSUM.pack_into(self._memory, offset + len(body), zlib.crc32(body))
        _NEWEST.pack_into(self._memory, self._offset, sequence)

    def read_parts(self, after: int) -> tuple[list[SpanPart], int]:
        """Return the complete answers after a running number, without waiting, and the running number of the last one.

        The answers are the oldest first, without overwritten ones; ``after`` is 0 at first.
        """
        newest, parts = self.newest, list[SpanPart]()
        first = max(after + 1, newest - NUM_ANSWERS + 1)
        after = first - 1
        for sequence in range(first, newest + 1):
            offset = self._slot_offset(sequence)
            body = bytes(self._memory[offset : offset + _BODY.size])
            written_sequence, *fields = _BODY.unpack(body)
            is_complete = zlib.crc32(body) == _CHECKSUM.unpack_from(self._memory, offset + len(body))[0]
            if not is_complete or written_sequence < sequence:
                break  # half-written: read it at the next call
            after = sequence
            if written_sequence == sequence:  # not overwritten meanwhile
                parts.append(SpanPart(*fields))
        return parts, after

    def _slot_offset(self, sequence: int) -> int:
        return self._offset + _SLOTS_AT + sequence % NUM_ANSWERS * _SLOT_BYTES
