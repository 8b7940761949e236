"""The two maps between a training process and its agent: the ring of records and the board of results.

Both are memfds that the agent inherits, so that nothing has a name, nothing is left behind, and the
last iteration of a killed trainer can still be read.  Neither side ever waits for the other: a reader
that meets a half-written record sees a wrong checksum (ARM may reorder stores, and Python has no
fences) and looks again later.  Standard library alone, because the training process imports it.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from effllm.records.counters import FIELDS, NUM_FREQUENT, Counters

MAGIC = b"EFFLRNG2"
ITERATION, PHASE, LOSS, RESET, END, PROFILE, DEVICE_TIME, OWN_TIME = 1, 2, 3, 4, 5, 6, 7, 8
#: How a loop may end: the record END has an index into these.
STATUSES = ("completed", "failed", "killed", "interrupted")

#: What a PROFILE tells of, where it is not an index into timeline.KINDS.
WHOLE, COMPUTING = -1, -2
_KINDS = 12  # of timeline.KINDS

STARTUP, BETWEEN, STEP, PHASE_STATE, FINISHED = 0, 1, 2, 3, 4
STATE_NAMES = ("startup", "between iterations", "in an iteration", "in a marked phase", "finished")

_PHASES = 4  # of records.rank.MARKED_PHASES: a record has a total of each
#: What a record may tell of, by its kind: from the first number to below the second.
_WHAT = {
    ITERATION: (0, 1),
    PHASE: (0, _PHASES),
    LOSS: (0, 2),
    RESET: (0, 1),
    END: (0, 4),
    PROFILE: (COMPUTING, _KINDS),
    DEVICE_TIME: (0, 1),
    OWN_TIME: (0, 1),
}

_HEADER = struct.Struct("<8sIII")
# What is written in every iteration has native longs: from 2**30 on, a "q" takes CPython 3.11 three times as long.
_STATUS = struct.Struct("@llll")  # state, ordinal, since_ns, what (index of the phase)
_STATUS_AT = 64
_NEWEST = struct.Struct("@L")
_NEWEST_AT = _STATUS_AT + _STATUS.size
_STATUS_AND_NEWEST = struct.Struct("@llllL")
_PAGE = 4096
_FACTS_AT = _PAGE
_FACTS_BYTES = 64 * 1024
_DOCUMENT = struct.Struct("<QII")  # version, length, checksum
_ADDRESS_AT = _FACTS_AT + _FACTS_BYTES
_ADDRESS_BYTES = 4 * 1024
_SLOTS_AT = _ADDRESS_AT + _ADDRESS_BYTES
_SLOT_BYTES = 192
_BOARD_BYTES = 32 * 1024


class Slot(NamedTuple):
    """One record of the ring: times of the monotonic clock, and running totals."""

    sequence: int
    kind: int
    # PHASE: index into records.rank.MARKED_PHASES; END: into STATUSES; PROFILE: into timeline.KINDS, or see above;
    # LOSS: 1 where none was given.
    what: int
    ordinal: int
    # ITERATION: own time in ns, 0 unknown; LOSS: the iteration as the caller numbers it; PROFILE: ns; DEVICE_TIME and
    # OWN_TIME: iterations that were timed.
    number: int
    start_ns: int
    end_ns: int
    # ITERATION: when it came to its sync point, in ns; LOSS: the loss; PROFILE: seconds of it exposed, or of cost;
    # DEVICE_TIME and OWN_TIME: their seconds.
    value: float
    step_ns: int
    wait_ns: int
    phases_ns: tuple[int, ...]  # in the order of records.rank.MARKED_PHASES
    generation_ns: int  # wherever it lay; the phase of that name is only a part of it
    counts: tuple[int, ...]  # in the order of the fields of `Counters`


# A record consists of what changes in every iteration, what it is about, and the totals that seldom change.  The last
# two are packed only when they change.  Their checksum is the start of the checksum of the first, so that one checksum
# covers all three and is computed over the first alone.
_OFTEN = struct.Struct(f"@L{5 + NUM_FREQUENT}l")  # sequence, ordinal, start and end, step and wait, counters
_ABOUT = struct.Struct("@hhld")  # kind, what, number, value
_SELDOM = struct.Struct(f"@{_PHASES + 1 + len(FIELDS) - NUM_FREQUENT}l")  # phases, generation, the other counters
_SEALED = struct.Struct(f"@{_OFTEN.size}s{_ABOUT.size}s{_SELDOM.size}sI")
if _SEALED.size > _SLOT_BYTES or _NEWEST.size != 8:  # pragma: no cover - a mistake in this file, or no 64-bit machine
    raise AssertionError(_SEALED.size)


class RingError(OSError):
    """The maps could not be made, so there can be no metrics; the message says why."""


def make_memory(name: str, size: int) -> int:
    """Return the descriptor of a memfd whose pages are all reserved.

    Without the reservation, a full tmpfs would be a SIGBUS at some later store: a dead trainer.

    Raises:
        RingError: there is no memory for it.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        raise RingError(f"no shared memory for metrics: {error}") from error
    try:
        os.posix_fallocate(descriptor, 0, size)
        # From now on nobody can shrink it, which would be a SIGBUS at the next store of whoever maps it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise RingError(f"no room for {size} bytes of shared memory: {error}") from error
    return descriptor


def ring_bytes(slots: int) -> int:
    """Return the size of a ring of ``slots`` records."""
    return _SLOTS_AT + slots * _SLOT_BYTES


# Bound here because looking a method up costs as much as the checksum.
_pack_often, _pack_about, _pack_status = _OFTEN.pack, _ABOUT.pack, _STATUS.pack_into
_seal, _publish, _crc32 = _SEALED.pack_into, _STATUS_AND_NEWEST.pack_into, zlib.crc32

_seldom_counts = attrgetter(*FIELDS[NUM_FREQUENT:])
_PLAIN = _ABOUT.pack(ITERATION, 0, 0, 0.0)  # an iteration without a sync point


class RingWriter:
    """The training process's end of the ring: `state` and `iteration` are the hot path."""

    __slots__ = ("_map", "_plain_checksum", "_seldom", "_seldom_checksum", "_sequence", "_slots", "descriptor")

    def __init__(self, slots: int) -> None:
        self.descriptor = make_memory("effllm-ring", ring_bytes(slots))
        self._map = mmap.mmap(self.descriptor, ring_bytes(slots))
        self._slots = slots
        self._sequence = 0
        _HEADER.pack_into(self._map, 0, MAGIC, slots, _SLOT_BYTES, _FACTS_BYTES)
        self.take((0,) * _PHASES, 0, Counters())

    def take(self, phases_ns: Sequence[int], generation_ns: int, counters: Counters) -> None:
        """Replace the totals that seldom change; every later record has them.

        Args:
            phases_ns: of each marked phase.
            generation_ns: of all generation.
            counters: all; those that change often are left out.
        """
        self._seldom = _SELDOM.pack(*phases_ns, generation_ns, *_seldom_counts(counters))
        self._seldom_checksum = zlib.crc32(self._seldom)
        self._plain_checksum = zlib.crc32(_PLAIN, self._seldom_checksum)

    def iteration(
        self,
        ordinal: int,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        wait_ns: int,
        counters: Counters,
        own_ns: int = 0,
        arrival_ns: int = 0,
    ) -> None:
        """Write the record of an iteration, as `put` would, and the state after it."""
        self._sequence = sequence = self._sequence + 1
        often = _pack_often(
            sequence, ordinal, start_ns, end_ns, step_ns, wait_ns,
            counters.tokens, counters.tokens_processed, counters.tokens_loss, counters.samples,
        )  # fmt: skip
        if own_ns:
            about = _pack_about(ITERATION, 0, own_ns, arrival_ns)
            checksum = _crc32(often, _crc32(about, self._seldom_checksum))
        else:
            about, checksum = _PLAIN, _crc32(often, self._plain_checksum)
        _seal(self._map, _SLOTS_AT + sequence % self._slots * _SLOT_BYTES, often, about, self._seldom, checksum)
        _publish(self._map, _STATUS_AT, BETWEEN, ordinal, end_ns, 0, sequence)

    def put(
        self,
        kind: int,
        what: int,
        ordinal: int,
        number: int,
        start_ns: int,
        end_ns: int,
        value: float,
        step_ns: int,
        wait_ns: int,
        counters: Counters,
    ) -> None:
        """Write one record of any kind."""
        self._sequence = sequence = self._sequence + 1
        often = _pack_often(
            sequence, ordinal, start_ns, end_ns, step_ns, wait_ns,
            counters.tokens, counters.tokens_processed, counters.tokens_loss, counters.samples,
        )  # fmt: skip
        about = _pack_about(kind, what, number, value)
        checksum = _crc32(often, _crc32(about, self._seldom_checksum))
        _seal(self._map, _SLOTS_AT + sequence % self._slots * _SLOT_BYTES, often, about, self._seldom, checksum)
        _NEWEST.pack_into(self._map, _NEWEST_AT, sequence)

    def state(self, state: int, ordinal: int, since_ns: int, what: int = 0) -> None:
        """Publish the training loop's position, which the agent reads while the loop does not move."""
        _pack_status(self._map, _STATUS_AT, state, ordinal, since_ns, what)

    def write_facts(self, facts: dict[str, Any]) -> bool:
        """Replace the facts; ``False`` where they are too large for their area, which then keeps the old."""
        return _write_document(self._map, _FACTS_AT, _FACTS_BYTES, facts)

    def write_address(self, record: dict[str, str]) -> bool:
        """Say where the aggregator is; apart from the facts, because another thread may find it."""
        return _write_document(self._map, _ADDRESS_AT, _ADDRESS_BYTES, record)

    def close(self) -> None:
        """Give up the map and the descriptor; may be called twice."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1


class RingReader:
    """The agent's end of the ring."""

    def __init__(self, descriptor: int) -> None:
        self._room = os.fstat(descriptor).st_size - _SLOTS_AT
        if self._room < 0:
            raise RingError("this is not a ring of effllm: it is too short")
        self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        magic, self._slots, slot_bytes, _ = _HEADER.unpack_from(self._map, 0)
        if magic != MAGIC or slot_bytes != _SLOT_BYTES or not 0 < ring_bytes(self._slots) - _SLOTS_AT <= self._room:
            self._map.close()
            raise RingError("this is not a ring of this version of effllm")
        self._next = 1
        self._facts_version = self._address_version = 0
        self._look: tuple[int, int, int, int] = (STARTUP, 0, 0, 0)
        self.overrun = 0  # records that were overwritten before they were read, or say what cannot be

    def read(self) -> list[Slot]:
        """Return the records since the last call, oldest first.

        Records that were overwritten in the meantime are counted in `overrun`; their totals are in
        every later record.
        """
        newest = int(_NEWEST.unpack_from(self._map, _NEWEST_AT)[0])
        if newest - self._next >= self._slots:
            self.overrun += newest - self._slots + 1 - self._next
            self._next = newest - self._slots + 1
        records = []
        while self._next <= newest:
            slot = self._slot(self._next)
            if slot is None or slot.sequence < self._next:
                break  # not whole yet: next time
            if slot.sequence > self._next or not _is_possible(slot):  # overtaken while reading, or no record of ours
                self.overrun += 1
            else:
                records.append(slot)
            self._next += 1
        return records

    def skip_torn(self) -> None:
        """Give up the record that never becomes whole: its writer died in the middle of it."""
        newest = int(_NEWEST.unpack_from(self._map, _NEWEST_AT)[0])
        if self._next <= newest and self._slot(self._next) is None:
            self.overrun += 1
            self._next += 1

    def _slot(self, sequence: int) -> Slot | None:
        at = _SLOTS_AT + sequence % self._slots * _SLOT_BYTES
        often, about, seldom, checksum = _SEALED.unpack_from(self._map, at)
        if zlib.crc32(often, zlib.crc32(about, zlib.crc32(seldom))) != checksum:
            return None
        sequence, ordinal, start_ns, end_ns, step_ns, wait_ns, *frequent = _OFTEN.unpack(often)
        kind, what, number, value = _ABOUT.unpack(about)
        totals = _SELDOM.unpack(seldom)
        return Slot(
            sequence, kind, what, ordinal, number, start_ns, end_ns, value, step_ns, wait_ns,
            totals[:_PHASES], totals[_PHASES], (*frequent, *totals[_PHASES + 1 :]),
        )  # fmt: skip

    def state(self) -> tuple[int, int, int, int]:
        """Return (state, ordinal, since_ns, phase), the same in two looks, or the last of four that can be."""
        look: tuple[int, int, int, int] = _STATUS.unpack_from(self._map, _STATUS_AT)
        for _ in range(3):
            again: tuple[int, int, int, int] = _STATUS.unpack_from(self._map, _STATUS_AT)
            if again == look:
                break
            look = again
        state, ordinal, since_ns, what = look
        if 0 <= state < len(STATE_NAMES) and 0 <= what < _PHASES and ordinal >= 0 and since_ns >= 0:
            self._look = look
        return self._look

    def facts(self) -> dict[str, Any] | None:
        """Return the facts if they changed since the last call and are whole, else ``None``."""
        version, facts = _read_document(self._map, _FACTS_AT, _FACTS_BYTES, self._facts_version)
        if facts is not None:
            self._facts_version = version
        return facts

    def address(self) -> dict[str, Any] | None:
        """Return what was found out about the aggregator's address since the last call, else ``None``."""
        version, record = _read_document(self._map, _ADDRESS_AT, _ADDRESS_BYTES, self._address_version)
        if record is not None:
            self._address_version = version
        return record

    def close(self) -> None:
        """Give up the map; may be called twice."""
        self._map.close()


class Board:
    """The map in the other direction: one JSON document, written by the agent, read by the trainer."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = make_memory("effllm-board", _BOARD_BYTES) if descriptor is None else descriptor
        if os.fstat(self.descriptor).st_size < _BOARD_BYTES:
            raise RingError("this is not a board of effllm: it is too short")
        self._map = mmap.mmap(self.descriptor, _BOARD_BYTES)
        self._version = 0
        self._document: dict[str, Any] = {}

    def write(self, document: dict[str, Any]) -> bool:
        """Replace the document; ``False`` where it is too large."""
        return _write_document(self._map, 0, _BOARD_BYTES, document)

    def read(self) -> dict[str, Any]:
        """Return the newest whole document, at once; empty before the first."""
        version, document = _read_document(self._map, 0, _BOARD_BYTES, self._version)
        if document is not None:
            self._version, self._document = version, document
        return self._document

    def welcome(self) -> str:
        """Return the endpoint at which the agent has been welcomed, or an empty string; any thread may ask.

        Raises:
            ValueError: the map is closed.
        """
        _, document = _read_document(self._map, 0, _BOARD_BYTES, 0)
        return str((document or {}).get("welcome", ""))

    def close(self) -> None:
        """Give up the map and the descriptor; may be called twice."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1


def _write_document(memory: mmap.mmap, at: int, room: int, document: dict[str, Any]) -> bool:
    payload = json.dumps(document, separators=(",", ":")).encode()
    if len(payload) > room - _DOCUMENT.size:
        return False
    version = int(_DOCUMENT.unpack_from(memory, at)[0]) + 1
    start = at + _DOCUMENT.size
    memory[start : start + len(payload)] = payload
    _DOCUMENT.pack_into(memory, at, version, len(payload), _checksum(version, payload))
    return True


def _is_possible(slot: Slot) -> bool:
    """Whether a record is one that a recorder writes: its kind, its indices, and counts that are not negative."""
    least, end = _WHAT.get(slot.kind, (0, 0))
    if not least <= slot.what < end or not slot.start_ns <= slot.end_ns or slot.start_ns < 0:
        return False
    if slot.kind in (ITERATION, PROFILE, DEVICE_TIME, OWN_TIME) and not (
        slot.number >= 0 and 0 <= slot.value < math.inf
    ):
        return False
    return min(slot.ordinal, slot.step_ns, slot.wait_ns, *slot.phases_ns, slot.generation_ns, *slot.counts) >= 0


def _read_document(memory: mmap.mmap, at: int, room: int, seen: int) -> tuple[int, dict[str, Any] | None]:
    version, length, checksum = _DOCUMENT.unpack_from(memory, at)
    if version == seen or length > room - _DOCUMENT.size:
        return seen, None
    payload = memory[at + _DOCUMENT.size : at + _DOCUMENT.size + length]
    if _checksum(version, payload) != checksum:
        return seen, None  # being written at this moment: the caller looks again
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError):
        return seen, None
    return (version, document) if isinstance(document, dict) else (seen, None)


def _checksum(version: int, payload: bytes) -> int:
    # The version and the length are in it, for a header is stored field by field: half of a first one,
    # its version with no length and no checksum yet, is what an empty payload would look like.
    return zlib.crc32(payload, zlib.crc32(version.to_bytes(8, "little") + len(payload).to_bytes(4, "little")))
