"""effllm/records/ring.py: one process writes records, another process reads only complete records."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.records import ring
from effllm.records.counters import FIELDS, Counters
from effllm.records.facts import DeclaredParameters, FoundAddress, RankFacts, to_document
from effllm.records.rank import MARKED_PHASES
from effllm.records.ring import RingReader, RingWriter
from effllm.records.shared_memory import DOCUMENT_HEADER, RingError
from effllm.records.timeline import KINDS


@pytest.fixture
def writer():
    writer = RingWriter(16)
    yield writer
    writer.close()


@pytest.fixture
def reader(writer):
    reader = RingReader(writer.descriptor)
    yield reader
    reader.close()


def counters(*values):
    made = Counters()
    for name, value in zip(FIELDS, values, strict=False):
        setattr(made, name, value)
    return made


def put(writer, ordinal, tokens=0):
    writer.write_iteration(ordinal, ordinal * 10, ordinal * 10 + 5, 0, 0, counters(tokens, tokens, 0, 0))


def slot_at(sequence, slots=16):
    return ring._SLOTS_AT + sequence % slots * ring._SLOT_BYTES


@pytest.fixture
def ordinals(reader):
    """Return a function that reads the ring, and returns the ordinals of the records."""
    return lambda: [slot.ordinal for slot in reader.read_new()]


def test_records_are_read_once_and_in_order(writer, reader, ordinals):
    for ordinal in (1, 2, 3):
        put(writer, ordinal)

    assert ordinals() == [1, 2, 3]
    assert ordinals() == []
    put(writer, 4)
    assert ordinals() == [4]
    assert reader.num_overrun == 0
    for ordinal in range(5, 28):  # 23 records into 16 slots
        put(writer, ordinal)
    assert ordinals() == list(range(12, 28))
    assert reader.num_overrun == 7


def test_every_field_of_a_record_is_read(writer, reader):
    counts = (6, 7, 8, 2**62, *range(10, 6 + len(FIELDS)))
    writer.replace_totals((3, 4, 5, 9), 11, counters(*counts))
    writer.write_record(ring.PHASE, 2, 7, -9, 11, 12, 3.25, 1, 2, counters(*counts))

    assert reader.read_new() == [(1, ring.PHASE, 2, 7, -9, 11, 12, 3.25, 1, 2, (3, 4, 5, 9), 11, counts, ())]


LONGS = st.integers(0, 2**62)


@contextmanager
def ring_of(slots=16):
    writer = RingWriter(slots)
    reader = RingReader(writer.descriptor)
    yield writer, reader
    for _ in range(2):  # a second close has no effect
        reader.close()
        writer.close()
    assert writer.descriptor == -1


@given(st.lists(LONGS, min_size=9, max_size=9), st.lists(LONGS, min_size=7, max_size=7), LONGS)
def test_methods_iteration_and_put_write_equal_records(often, rare, own_ns):
    ordinal, start_ns, end_ns, step_ns, wait_ns, *frequent = sorted(often)
    counted = counters(*frequent, *rare[5:])
    with ring_of() as (writer, reader):
        writer.replace_totals(rare[:4], rare[4], counted)

        writer.write_iteration(ordinal, start_ns, end_ns, step_ns, wait_ns, counted, own_ns)
        assert reader.read_state() == (ring.BETWEEN, ordinal, end_ns, 0)
        writer.write_record(ring.ITERATION, 0, ordinal, own_ns, start_ns, end_ns, 0.0, step_ns, wait_ns, counted)

        short, long = reader.read_new()
        assert short[1:] == long[1:]


@given(bursts=st.lists(st.integers(0, 40), max_size=12))
def test_overrun_of_the_ring_loses_records_but_no_tokens(bursts):
    written, seen, newest = 0, 0, None
    with ring_of() as (writer, reader):
        for burst in bursts:
            for _ in range(burst):
                written += 1
                put(writer, written, tokens=100 * written)
            slots = reader.read_new()
            seen += len(slots)
            newest = slots[-1] if slots else newest

            # Overwritten records are counted, and the newest record includes the tokens of all earlier records.
            assert seen + reader.num_overrun == written
            assert newest is None or newest.counts[0] == 100 * written


@pytest.mark.parametrize("num", [1, ring.MAX_VALUES])
def test_record_of_values_is_read_with_every_value(writer, reader, num):
    given = [*(float(number) for number in range(num - 1)), float("-inf")]
    put(writer, 1, 10)
    writer.write_values(2, 40, range(num), given)
    put(writer, 2, 20)

    before, slot, after = reader.read_new()
    assert (slot.kind, slot.what, slot.ordinal, slot.number) == (ring.VALUES, num, 2, 40)
    assert slot.values == tuple(enumerate(given))
    assert (before.counts[0], after.counts[0], reader.num_overrun) == (10, 20, 0)


@pytest.mark.parametrize("index", [-1, ring.MAX_VALUE_NAMES])
def test_value_without_a_possible_name_is_skipped_and_counted(writer, reader, ordinals, index):
    writer.write_values(1, 1, [index], [1.0])
    put(writer, 2, 20)

    assert (ordinals(), reader.num_overrun) == ([2], 1)


def test_incomplete_record_is_not_read_until_it_is_complete(writer, reader, ordinals):
    put(writer, 1)
    put(writer, 2)
    at = slot_at(2) + 40
    whole = os.pread(writer.descriptor, 1, at)
    os.pwrite(writer.descriptor, bytes([whole[0] ^ 0xFF]), at)

    assert ordinals() == [1]
    os.pwrite(writer.descriptor, whole, at)
    reader.skip_torn()
    assert ordinals() == [2], "a complete record is not skipped"


@given(st.lists(LONGS, min_size=8, max_size=8), st.integers(0, 1000), st.binary(min_size=22, max_size=22))
def test_mixture_of_two_records_is_never_read(totals, own_ns, is_stored):
    start_ns, end_ns, step_ns, wait_ns, *counts = sorted(totals)
    with ring_of() as (writer, reader):
        put(writer, 1)
        before = os.pread(writer.descriptor, 176, slot_at(1))
        for ordinal in range(2, 17):
            put(writer, ordinal)
        writer.write_iteration(17, start_ns, end_ns, step_ns, wait_ns, counters(*counts), own_ns)  # replaces the first
        after = os.pread(writer.descriptor, 176, slot_at(1))
        words = [(after if is_stored[at // 8] & 1 else before)[at : at + 8] for at in range(0, 176, 8)]
        os.pwrite(writer.descriptor, b"".join(words), slot_at(1))

        slot = reader._read_slot(1)
        assert (slot and slot.ordinal) == {before: 1, after: 17}.get(b"".join(words))


def test_record_that_remains_incomplete_is_skipped_and_counted(writer, reader, ordinals):
    put(writer, 1)
    os.pwrite(writer.descriptor, b"\xff", slot_at(1) + 40)
    put(writer, 2)

    assert ordinals() == []
    reader.skip_torn()
    assert (ordinals(), reader.num_overrun) == ([2], 1)


def test_record_that_is_overwritten_during_a_read_is_counted(writer, reader, ordinals):
    for ordinal in range(1, 18):  # the 17th record replaces the first one
        put(writer, ordinal)
    # The test writes 16 as the newest number, as if the reader had read this number before record 17 was published.
    os.pwrite(writer.descriptor, (16).to_bytes(8, "little"), ring._NEWEST_AT)

    assert (ordinals(), reader.num_overrun) == (list(range(2, 17)), 1)


def test_reader_of_a_busy_writer_reads_increasing_totals(writer, reader):
    last = 20_000

    def write():
        for ordinal in range(1, last + 1):
            put(writer, ordinal, tokens=ordinal)

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    while not seen or seen[-1].ordinal < last:
        seen += reader.read_new()
    thread.join()

    assert all(slot.counts[0] == slot.ordinal == slot.sequence for slot in seen)
    assert sorted({slot.ordinal for slot in seen}) == [slot.ordinal for slot in seen]
    assert len(seen) + reader.num_overrun == last


def test_facts_are_read_once_for_each_change(writer, reader):
    facts = RankFacts(parameters=DeclaredParameters(total=7_000_000_000), host="Größe \udc80", warnings=("a", "b"))

    assert reader.take_facts() is None
    assert writer.write_facts(facts)
    assert msgspec.convert(reader.take_facts(), RankFacts) == facts
    assert reader.take_facts() is None


def test_largest_facts_do_not_overwrite_address_and_records(writer, reader, ordinals):
    address = FoundAddress(endpoint="tcp://127.0.0.1:1")
    writer.write_address(address)
    put(writer, 1)
    empty = json.dumps(to_document(RankFacts()), separators=(",", ":"))
    largest = RankFacts(host="x" * (ring._FACTS_BYTES - DOCUMENT_HEADER.size - len(empty)))

    assert writer.write_facts(largest)
    assert not writer.write_facts(RankFacts(host=largest.host + "x"))
    assert msgspec.convert(reader.take_facts(), RankFacts) == largest
    assert msgspec.convert(reader.take_address(), FoundAddress) == address
    assert ordinals() == [1]


@pytest.mark.parametrize("size", [0, 10, ring.ring_bytes(16)])
def test_memory_that_is_not_a_ring_is_rejected(size):
    foreign = os.memfd_create("foreign")
    os.truncate(foreign, size)

    with pytest.raises(RingError, match=r"not a ring|too short for a ring"):
        RingReader(foreign)
    os.close(foreign)


@pytest.mark.parametrize(
    ("magic", "slots", "reason"),
    [(b"EFFLRNG0", 16, "this version"), *((ring.MAGIC, slots, "not a ring") for slots in (0, 17, 2**32 - 1))],
)
def test_header_of_another_version_or_size_is_rejected(writer, magic, slots, reason):
    ring._HEADER.pack_into(writer._map, 0, magic, slots, ring._SLOT_BYTES, ring._FACTS_BYTES)

    with pytest.raises(RingError, match=reason):
        RingReader(writer.descriptor)


def open_rings():
    return sum("effllm-ring" in str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())


def test_full_shared_memory_raises_an_error_of_the_ring(monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = open_rings()

    with pytest.raises(RingError, match=r"no room for .* No space left"):
        RingWriter(16)
    assert open_rings() == before


def test_file_size_limit_raises_an_error_when_a_ring_is_created():
    # The limit is set in a new process, because it cannot be raised again and its signal would kill the tests.
    program = (
        "import resource, signal\n"
        "from effllm.records.ring import RingWriter\n"
        "from effllm.records.shared_memory import RingError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: RingWriter(1000)\n"
        "except RingError as error: print('refused', error)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("refused no room for")


# --- data that no recorder writes ---


def test_index_limits_of_the_ring_equal_the_lengths_of_its_tables():
    assert len(KINDS) == ring._KINDS
    assert len(MARKED_PHASES) == ring._PHASES


@pytest.mark.parametrize(
    ("kind", "what", "ordinal", "number", "start_ns", "end_ns", "value", "tokens"),
    [
        (99, 0, 1, 0, 1, 2, 0.0, 0),
        (ring.PHASE, 4, 1, 0, 1, 2, 0.0, 0),
        (ring.END, -1, 1, 0, 1, 2, 0.0, 0),
        (ring.PROFILE, 12, 1, 0, 1, 2, 0.0, 0),
        (ring.PROFILE, 0, 1, 0, 1, 2, float("nan"), 0),
        (ring.DEVICE_TIME, 0, 1, -1, 1, 2, 0.0, 0),
        (ring.ITERATION, 0, -1, 0, 1, 2, 0.0, 0),
        (ring.ITERATION, 0, 1, 0, 2, 1, 0.0, 0),
        (ring.ITERATION, 0, 1, 0, 1, 2, 0.0, -1),
    ],
)
def test_impossible_record_is_skipped_and_counted(
    writer, reader, ordinals, kind, what, ordinal, number, start_ns, end_ns, value, tokens
):
    writer.write_record(kind, what, ordinal, number, start_ns, end_ns, value, 0, 0, counters(tokens))
    put(writer, 2, 20)

    assert (ordinals(), reader.num_overrun) == ([2], 1)


@pytest.mark.parametrize("look", [(5, 1, 1, 0), (-1, 1, 1, 0), (ring.PHASE_STATE, 1, 1, 4), (2, -1, 1, 0)])
def test_impossible_state_does_not_replace_the_last_state(writer, reader, look):
    writer.write_state(ring.PHASE_STATE, 12, 345, 1)
    assert reader.read_state() == (ring.PHASE_STATE, 12, 345, 1)
    ring._STATUS.pack_into(writer._map, ring._STATUS_AT, *look)

    assert reader.read_state() == (ring.PHASE_STATE, 12, 345, 1)


@pytest.mark.parametrize("resize", [0, ring.ring_bytes(16) - 1, ring.ring_bytes(16) + 4096])
def test_mapped_memory_is_reserved_and_cannot_be_resized(writer, resize):
    # Without free memory, a write to a page that is not reserved raises SIGBUS in the training loop.
    assert os.fstat(writer.descriptor).st_blocks * 512 >= ring.ring_bytes(16)
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptor, resize)
    with pytest.raises(PermissionError):
        fcntl.fcntl(writer.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
