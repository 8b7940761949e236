"""The ring: records of a training process in memory that its agent shares; the memory outlives a killed process.

A half-written record has a wrong checksum, and the agent reads it again later.  Standard library only.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from effllm.records.counters import FIELDS, NUM_FREQUENT, Counters
from effllm.records.facts import FoundAddress, RankFacts, to_document
from effllm.records.shared_memory import RingError, SharedDocument, make_memory, map_memory

MAGIC = b"EFFLRNG3"
ITERATION, PHASE, LOSS, RESET, END, PROFILE, DEVICE_TIME, OWN_TIME = 1, 2, 3, 4, 5, 6, 7, 8
VALUES = 9  # values of instruments
SPAN = 10  # a request for the readings of a span of time; records/spans.py has the answer
MEMORY = 11  # the state of torch's allocator; a record of values, with indices into `MEMORY_FIELDS`
MAX_CHAINS = 16  # limit of the chains of consecutive spans in one ring
#: Final statuses of a loop; the record END has an index into this tuple.
STATUSES = ("completed", "failed", "killed", "interrupted")
#: Values of `Slot.what` in a PROFILE that are not an index into timeline.KINDS.
WHOLE, COMPUTING = -1, -2
_KINDS = 12  # length of timeline.KINDS
STARTUP, BETWEEN, STEP, PHASE_STATE, FINISHED = 0, 1, 2, 3, 4
STATE_NAMES = ("startup", "between iterations", "in an iteration", "in a marked phase", "finished")
MAX_VALUE_NAMES = 200  # records.rank.MAX_NAMES
MAX_VALUES = 12  # in one record
_PHASES = 4  # length of records.rank.MARKED_PHASES: a record has a total of each phase
MAX_BYTES = 2.0**53  # of a value in a MEMORY record
#: The values of a MEMORY record.  Peaks are of the whole process so far; retries and errors are running totals.
MEMORY_FIELDS = (
    "allocated", "allocated_peak", "reserved", "reserved_peak", "fragmented", "retries", "out_of_memory", "positions",
)  # fmt: skip
#: `Slot.number` of a MEMORY record: what has run since the record before: a marked phase, or one of these.
AFTER_STEPS, AFTER_STARTUP = _PHASES, _PHASES + 1
#: Kind -> range of `Slot.what`: the first value, and the last value plus 1.
_WHAT_RANGES = {
    ITERATION: (0, 1),
    PHASE: (0, _PHASES),
    LOSS: (0, 2),
    RESET: (0, 1),
    END: (0, 4),
    PROFILE: (COMPUTING, _KINDS),
    DEVICE_TIME: (0, 1),
    OWN_TIME: (0, 1),
    SPAN: (0, MAX_CHAINS),
    VALUES: (1, MAX_VALUES + 1),
    MEMORY: (len(MEMORY_FIELDS), len(MEMORY_FIELDS) + 1),
}
_HEADER = struct.Struct("<8sIII")
# Fields that change in every iteration are native longs: from 2**30 on, CPython 3.11 needs three times as long for "q".
_STATUS = struct.Struct("@llll")  # state, ordinal, since_ns, what (index of the phase)
_STATUS_AT = 64
_NEWEST = struct.Struct("@L")
_NEWEST_AT = _STATUS_AT + _STATUS.size
_STATUS_AND_NEWEST = struct.Struct("@llllL")
_PAGE = 4096
_FACTS_AT = _PAGE
_FACTS_BYTES = 64 * 1024
_ADDRESS_AT = _FACTS_AT + _FACTS_BYTES
_ADDRESS_BYTES = 4 * 1024
_SLOTS_AT = _ADDRESS_AT + _ADDRESS_BYTES
_SLOT_BYTES = 192


class RingState(NamedTuple):
    """The position of the training thread."""

    state: int  # index into STATE_NAMES
    ordinal: int
    since_ns: int
    phase: int  # index into records.rank.MARKED_PHASES


class Slot(NamedTuple):
    """One record of the ring: times on the monotonic clock, and running totals."""

    sequence: int
    kind: int
    # PHASE: index into records.rank.MARKED_PHASES; END: index into STATUSES; PROFILE: index into timeline.KINDS, WHOLE
    # or COMPUTING; LOSS: 1 if the loss is missing; VALUES, MEMORY: number of values; SPAN: number of the chain.
    what: int
    ordinal: int
    # ITERATION: own time in ns (0 if unknown); LOSS: iteration number of the caller; PROFILE: time in ns; DEVICE_TIME
    # and OWN_TIME: number of timed iterations; VALUES: number of values so far; SPAN: number of the request; MEMORY: a
    # marked phase, AFTER_STEPS or AFTER_STARTUP.
    number: int
    start_ns: int
    end_ns: int
    # LOSS: the loss; PROFILE: exposed seconds, or (COMPUTING) the cost;
    # DEVICE_TIME and OWN_TIME: seconds of the timed iterations.
    value: float
    step_ns: int
    wait_ns: int
    phases_ns: tuple[int, ...]  # in the order of records.rank.MARKED_PHASES
    generation_ns: int  # time of all generations; the phase ``generation`` has only a part of it
    counts: tuple[int, ...]  # in the order of the fields of `Counters`
    # VALUES: values, also NaN and infinite, each with its index into `RankFacts.value_names`; MEMORY: `MEMORY_FIELDS`.
    values: tuple[tuple[int, float], ...] = ()


# A record has three parts: fields that change in every iteration, fields about its kind, and totals that rarely change.
# The second and the third part are packed only when they change.  The checksum of the first part continues the checksum
# of the other parts: it covers all three parts, but only the first part is processed in every iteration.
_OFTEN = struct.Struct(f"@L{5 + NUM_FREQUENT}l")  # sequence, ordinal, start and end, step and wait, counters
_ABOUT = struct.Struct("@hhld")  # kind, what, number, value
_RARE = struct.Struct(f"@{_PHASES + 1 + len(FIELDS) - NUM_FREQUENT}l")  # phases, generation, the other counters
_SEALED = struct.Struct(f"@{_OFTEN.size}s{_ABOUT.size}s{_RARE.size}sI")
# A record of values has values and their indices in place of the times and totals.
_VALUES_SPLIT = _OFTEN.size - 16
_VALUES = struct.Struct(f"@{MAX_VALUES}d{MAX_VALUES}h{max(_VALUES_SPLIT + _RARE.size - 10 * MAX_VALUES, 0)}x")
_VALUES_OFTEN = struct.Struct(f"@LL{_VALUES_SPLIT}s")  # sequence, ordinal, first part of the values
if _VALUES.size != _VALUES_SPLIT + _RARE.size or _SEALED.size > _SLOT_BYTES or _NEWEST.size != 8:  # pragma: no cover
    raise AssertionError(_SEALED.size)  # a mistake in this file, or no 64-bit machine


def ring_bytes(slots: int) -> int:
    return _SLOTS_AT + slots * _SLOT_BYTES


# The methods are bound here, because a method lookup takes as long as the checksum.
_pack_often, _pack_about, _pack_status = _OFTEN.pack, _ABOUT.pack, _STATUS.pack_into
_seal, _publish, _crc32 = _SEALED.pack_into, _STATUS_AND_NEWEST.pack_into, zlib.crc32

_rare_counts = attrgetter(*FIELDS[NUM_FREQUENT:])
_PLAIN = _ABOUT.pack(ITERATION, 0, 0, 0.0)  # an iteration without a sync point


class RingWriter:
    """Writes the ring, in the training process; `write_state` and `write_iteration` are called in every iteration."""

    __slots__ = (
        "_address",
        "_facts",
        "_map",
        "_num_slots",
        "_plain_checksum",
        "_rare",
        "_rare_checksum",
        "_sequence",
        "descriptor",
    )

    def __init__(self, slots: int) -> None:
        self.descriptor = make_memory("effllm-ring", ring_bytes(slots))
        self._map = map_memory(self.descriptor, ring_bytes(slots))
        self._num_slots = slots
        self._sequence = 0
        self._facts = SharedDocument(self._map, _FACTS_AT, _FACTS_BYTES)
        self._address = SharedDocument(self._map, _ADDRESS_AT, _ADDRESS_BYTES)
        _HEADER.pack_into(self._map, 0, MAGIC, slots, _SLOT_BYTES, _FACTS_BYTES)
        self.replace_totals((0,) * _PHASES, 0, Counters())

    def replace_totals(self, phases_ns: Sequence[int], generation_ns: int, counters: Counters) -> None:
        """Replace the totals that rarely change, also those in ``counters``; every later record contains them."""
        self._rare = _RARE.pack(*phases_ns, generation_ns, *_rare_counts(counters))
        self._rare_checksum = zlib.crc32(self._rare)
        self._plain_checksum = zlib.crc32(_PLAIN, self._rare_checksum)

    def write_iteration(
        self,
        ordinal: int,
        start_ns: int,
        end_ns: int,
        step_ns: int,
        wait_ns: int,
        counters: Counters,
        own_ns: int = 0,
    ) -> None:
        """Write the record of an iteration, like `write_record`, and the state after it."""
        self._sequence = sequence = self._sequence + 1
        often = _pack_often(
            sequence, ordinal, start_ns, end_ns, step_ns, wait_ns,
            counters.tokens, counters.tokens_processed, counters.tokens_loss, counters.samples,
        )  # fmt: skip
        if own_ns:
            about = _pack_about(ITERATION, 0, own_ns, 0.0)
            checksum = _crc32(often, _crc32(about, self._rare_checksum))
        else:
            about, checksum = _PLAIN, _crc32(often, self._plain_checksum)
        _seal(self._map, _SLOTS_AT + sequence % self._num_slots * _SLOT_BYTES, often, about, self._rare, checksum)
        _publish(self._map, _STATUS_AT, BETWEEN, ordinal, end_ns, 0, sequence)

    def write_record(
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
        """Write a record of a kind without values; the arguments are as in `Slot`."""
        self._sequence = sequence = self._sequence + 1
        often = _pack_often(
            sequence, ordinal, start_ns, end_ns, step_ns, wait_ns,
            counters.tokens, counters.tokens_processed, counters.tokens_loss, counters.samples,
        )  # fmt: skip
        about = _pack_about(kind, what, number, value)
        checksum = _crc32(often, _crc32(about, self._rare_checksum))
        _seal(self._map, _SLOTS_AT + sequence % self._num_slots * _SLOT_BYTES, often, about, self._rare, checksum)
        _NEWEST.pack_into(self._map, _NEWEST_AT, sequence)

    def write_values(
        self, ordinal: int, number: int, indices: Sequence[int], values: Sequence[float], kind: int = VALUES
    ) -> None:
        """Write a record, VALUES or MEMORY, of at most `MAX_VALUES` values, with the index of each value's name."""
        self._sequence = sequence = self._sequence + 1
        count = len(values)
        unused = (0,) * (MAX_VALUES - count)
        packed = _VALUES.pack(*values, *unused, *indices, *unused)  # lies in the place of the first and the third part
        often = _VALUES_OFTEN.pack(sequence, ordinal, packed[:_VALUES_SPLIT])
        about, rare = _pack_about(kind, count, number, 0.0), packed[_VALUES_SPLIT:]
        checksum = _crc32(often, _crc32(about, _crc32(rare)))
        _seal(self._map, _SLOTS_AT + sequence % self._num_slots * _SLOT_BYTES, often, about, rare, checksum)
        _NEWEST.pack_into(self._map, _NEWEST_AT, sequence)

    def write_state(self, state: int, ordinal: int, since_ns: int, what: int = 0) -> None:
        """Publish the position of the training loop as a `RingState`; the agent detects stalls from this position."""
        _pack_status(self._map, _STATUS_AT, state, ordinal, since_ns, what)

    def write_facts(self, facts: RankFacts) -> bool:
        """Replace the facts; if the new facts are too large, keep the old facts and return ``False``."""
        return self._facts.write_document(to_document(facts))

    def write_address(self, address: FoundAddress) -> bool:
        """Publish the aggregator's address; it is separate from the facts, because another thread may find it."""
        return self._address.write_document(to_document(address))

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped while the ring is used."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class RingReader:
    """Reads the ring, in the agent."""

    def __init__(self, descriptor: int) -> None:
        room_bytes = os.fstat(descriptor).st_size - _SLOTS_AT
        if room_bytes < 0:
            raise RingError("the shared memory is too short for a ring of effllm")
        self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        magic, self._num_slots, slot_bytes, _ = _HEADER.unpack_from(self._map, 0)
        if magic != MAGIC or slot_bytes != _SLOT_BYTES or not 0 < ring_bytes(self._num_slots) - _SLOTS_AT <= room_bytes:
            self._map.close()
            raise RingError("this is not a ring of this version of effllm")
        self._next_sequence = 1  # of the record to read next
        self._facts = SharedDocument(self._map, _FACTS_AT, _FACTS_BYTES)
        self._address = SharedDocument(self._map, _ADDRESS_AT, _ADDRESS_BYTES)
        self._valid_state = RingState(STARTUP, 0, 0, 0)
        self.num_overrun = 0  # number of records that were overwritten before they were read, or are not valid

    def read_new(self) -> list[Slot]:
        """Return the records since the last call, oldest first.

        Records that were overwritten before this call are counted in `num_overrun`; later records include their totals.
        """
        newest = int(_NEWEST.unpack_from(self._map, _NEWEST_AT)[0])
        if newest - self._next_sequence >= self._num_slots:
            self.num_overrun += newest - self._num_slots + 1 - self._next_sequence
            self._next_sequence = newest - self._num_slots + 1
        records = []
        while self._next_sequence <= newest:
            slot = self._read_slot(self._next_sequence)
            if slot is None or slot.sequence < self._next_sequence:
                break  # not complete yet: read it at the next call
            if slot.sequence > self._next_sequence or not _is_valid(slot):  # overwritten meanwhile, or not valid
                self.num_overrun += 1
            else:
                records.append(slot)
            self._next_sequence += 1
        return records

    def skip_torn(self) -> None:
        """Skip a record that will never be complete, because the training process died during the write."""
        newest = int(_NEWEST.unpack_from(self._map, _NEWEST_AT)[0])
        if self._next_sequence <= newest and self._read_slot(self._next_sequence) is None:
            self.num_overrun += 1
            self._next_sequence += 1

    def _read_slot(self, sequence: int) -> Slot | None:
        offset = _SLOTS_AT + sequence % self._num_slots * _SLOT_BYTES
        often, about, rare, checksum = _SEALED.unpack_from(self._map, offset)
        if zlib.crc32(often, zlib.crc32(about, zlib.crc32(rare))) != checksum:
            return None  # half-written
        sequence, ordinal, start_ns, end_ns, step_ns, wait_ns, *frequent = _OFTEN.unpack(often)
        kind, what, number, value = _ABOUT.unpack(about)
        if kind in (VALUES, MEMORY):
            numbers = _VALUES.unpack(often[16:] + rare)  # `MAX_VALUES` values, and then their indices
            values = tuple(zip(numbers[MAX_VALUES:], numbers, strict=False))[:what]
            return Slot(sequence, kind, what, ordinal, number, 0, 0, 0.0, 0, 0, (), 0, (), values)
        totals = _RARE.unpack(rare)
        return Slot(
            sequence, kind, what, ordinal, number, start_ns, end_ns, value, step_ns, wait_ns,
            totals[:_PHASES], totals[_PHASES], (*frequent, *totals[_PHASES + 1 :]),
        )  # fmt: skip

    def read_state(self) -> RingState:
        """Return the last valid state, from two equal consecutive reads or from the last of four reads."""
        state = RingState(*_STATUS.unpack_from(self._map, _STATUS_AT))
        for _ in range(3):
            again = RingState(*_STATUS.unpack_from(self._map, _STATUS_AT))
            if again == state:
                break
            state = again
        is_valid = 0 <= state.state < len(STATE_NAMES) and 0 <= state.phase < _PHASES
        if is_valid and state.ordinal >= 0 and state.since_ns >= 0:
            self._valid_state = state
        return self._valid_state

    def take_facts(self) -> dict[str, Any] | None:
        """Return the document of `RankFacts` if it is complete and has changed since the last call, else ``None``."""
        return self._facts.take_new()

    def take_address(self) -> dict[str, Any] | None:
        """Return the document of `FoundAddress` if it has changed since the last call, else ``None``."""
        return self._address.take_new()

    def close(self) -> None:
        """Close the map; may be called twice."""
        self._map.close()


def _is_valid(slot: Slot) -> bool:
    """Whether a recorder could have written the record: the kind and the indices exist, and no count is negative."""
    first_what, end_what = _WHAT_RANGES.get(slot.kind, (0, 0))
    if not first_what <= slot.what < end_what or not slot.start_ns <= slot.end_ns or slot.start_ns < 0:
        return False
    is_amount = slot.kind in (ITERATION, PROFILE, DEVICE_TIME, OWN_TIME)
    if is_amount and not (slot.number >= 0 and 0 <= slot.value < math.inf):
        return False
    if not all(0 <= index < MAX_VALUE_NAMES for index, _ in slot.values):
        return False
    if slot.kind == MEMORY and not (
        0 <= slot.number <= AFTER_STARTUP
        and [index for index, _ in slot.values] == list(range(len(MEMORY_FIELDS)))
        and all(0 <= value < MAX_BYTES for _, value in slot.values)
    ):
        return False
    return min(slot.ordinal, slot.step_ns, slot.wait_ns, *slot.phases_ns, slot.generation_ns, *slot.counts) >= 0
