"""Fuzz targets for the corpus, for Hypothesis and for atheris.

Each target accepts all bytes and never raises.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from builders import hello, row
from run_lines import read_events, read_ranks, read_windows

from effllm.agent.window import WindowCutter
from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.job.ledger import restore
from effllm.network.peers import Peers
from effllm.network.transport import FrameError, decode_from_agent, decode_from_aggregator, encode
from effllm.records import ring
from effllm.records.board import Board, JobState
from effllm.records.clock import Now
from effllm.records.facts import FoundAddress, RankFacts
from effllm.records.rank import MARKED_PHASES
from effllm.records.ring import RingReader
from effllm.records.shared_memory import DOCUMENT_HEADER, RingError, checksum
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Hello, Reports, Stack
from effllm.store.reader import read_own_json
from effllm.store.run_folder import RunFolder
from effllm.store.run_lock import Holder, status_of

CORPUS = Path(__file__).parent / "corpus"


def frames(data: bytes) -> None:
    """Decode a frame; pass a valid message to an aggregator twice: unchanged, and as a message of a known rank."""
    with contextlib.suppress(FrameError):
        encode(decode_from_aggregator(data))
    try:
        message = decode_from_agent(data)
    except FrameError as error:
        assert len(str(error)) <= 300
        return
    peers, aggregator = Peers(16), Aggregator(Config(), "job", 1, 1000.0)
    first = hello(0, world_size=2)
    for one in (first, hello(1, world_size=2)):
        assert aggregator.hello(one, Now(0.0, 1000.0)) == ""
    for window in (1, 2):
        aggregator.reports(Reports((row(1, window),)), Now(0.5, 1000.5))
    assert peers.admit_frame(b"a", len(data), 0.0)
    peers.register_hello(b"a", first, 0.0)
    peers.admit_frame(b"b", len(data), 0.0)
    assert isinstance(message, Hello) or type(message).__name__ == "Supersede" or peers.check_sender(b"b", message)
    for received in (message, _as_of(message, first)):
        peers.check_sender(b"a", received)
        deliver(aggregator, received)
    for window in (3, 4, 10**6):
        for rank in (0, 1):
            aggregator.reports(Reports((row(rank, window),)), Now(2.0, 1002.0))
    for now_s in (3.0, 100.0, 10_000.0):
        aggregator.tick(Now(now_s, 1000.0 + now_s))
    aggregator.close_all()
    for closed in aggregator.closed_windows.take_windows():
        values = {tag: value for tag, value in closed.report.values.items() if math.isfinite(value)}  # as sinks do
        assert _is_json(msgspec.structs.replace(closed.report, values=values))
    for event in aggregator.events.take_events():
        assert event.text.isprintable()
        assert _is_json(event)
    summary = aggregator.summary(1100.0, ended=True)
    metrics = {tag: one for tag, one in summary.metrics.items() if math.isfinite(one.value)}
    assert _is_json(msgspec.structs.replace(summary, metrics=metrics))
    restore(aggregator.snapshot())


def _as_of(message: object, first: Hello) -> object:
    """Return the message with the agent, the rank and the job of ``first``."""
    own = {"agent": first.agent, "rank": first.rank}
    if isinstance(message, Reports):
        return msgspec.structs.replace(message, rows=tuple(msgspec.structs.replace(one, **own) for one in message.rows))
    if isinstance(message, Hello):
        return msgspec.structs.replace(message, **own, job=first.job, world_size=2, log_interval=10, offset=0)
    return (
        msgspec.structs.replace(message, **own) if isinstance(message, (AgentEvent, Heartbeat, Bye, Stack)) else message
    )


def deliver(aggregator: Aggregator, message: object) -> None:
    if isinstance(message, (Hello, Reports, Heartbeat, AgentEvent, Bye, Stack)):
        name = "agent_event" if isinstance(message, AgentEvent) else type(message).__name__.lower()
        getattr(aggregator, name)(message, Now(1.0, 1001.0))


def _is_json(record: object) -> bool:
    """Write a record as JSON and read it again; nan and infinities are written as null, and reading null raises an
    error."""
    text = msgspec.json.encode(record)
    msgspec.json.decode(text, type=type(record))
    return True


def ring_(data: bytes) -> None:
    """Read a ring and a board made of these bytes; half of the inputs become records with correct checksums."""
    memory = _ring_of(data[1:]) if data[:1] < b"\x80" else _records_of(data[1:])
    descriptor = os.memfd_create("fuzz")
    try:
        os.write(descriptor, memory)
        try:
            reader = RingReader(descriptor)
        except RingError:
            pass
        else:
            _read_ring(reader)
        try:
            board = Board(os.dup(descriptor))
        except RingError:
            return
        assert isinstance(board.read_state(), JobState)
        board.close()
    finally:
        os.close(descriptor)


def _ring_of(data: bytes) -> bytes:
    """Return a ring of sixteen slots; these bytes replace its header, documents and records."""
    memory = bytearray(ring.ring_bytes(16))
    ring._HEADER.pack_into(memory, 0, ring.MAGIC, 16, ring._SLOT_BYTES, ring._FACTS_BYTES)
    parts = (8, ring._STATUS_AT, ring._NEWEST_AT, ring._FACTS_AT, ring._ADDRESS_AT, ring._SLOTS_AT)
    share = max(len(data) // len(parts), 1)
    for number, at in enumerate(parts):
        part = data[number * share : (number + 1) * share][: ring._PAGE]
        memory[at : at + len(part)] = part
    for at, room in ((ring._FACTS_AT, ring._FACTS_BYTES), (ring._ADDRESS_AT, ring._ADDRESS_BYTES)):
        payload = bytes(memory[at + DOCUMENT_HEADER.size : at + DOCUMENT_HEADER.size + min(share, room // 2)])
        DOCUMENT_HEADER.pack_into(memory, at, 1, len(payload), checksum(1, payload))
    return bytes(memory[: ring.ring_bytes(16)])


_SLOT = struct.Struct("<Qhhqqqqd13q")  # format of a record in the corpus


def _records_of(data: bytes) -> bytes:
    """Return a ring whose records contain these bytes."""
    memory = bytearray(ring.ring_bytes(16))
    ring._HEADER.pack_into(memory, 0, ring.MAGIC, 16, ring._SLOT_BYTES, ring._FACTS_BYTES)
    count = min(len(data) // _SLOT.size, 15)
    for number in range(1, count + 1):
        _, kind, what, ordinal, about_number, start_ns, end_ns, value, *totals = _SLOT.unpack_from(
            data, (number - 1) * _SLOT.size
        )
        often = ring._OFTEN.pack(number, ordinal, start_ns, end_ns, *totals[:2], *totals[5:9])
        about = ring._ABOUT.pack(kind, what, about_number, value)
        rare = ring._RARE.pack(*totals[2:5], totals[9], totals[11], totals[10], totals[12], totals[12])
        checksum = ring.zlib.crc32(often, ring.zlib.crc32(about, ring.zlib.crc32(rare)))
        at = ring._SLOTS_AT + number * ring._SLOT_BYTES
        ring._SEALED.pack_into(memory, at, often, about, rare, checksum)
    ring._NEWEST.pack_into(memory, ring._NEWEST_AT, count)
    return bytes(memory)


def _read_ring(reader: RingReader) -> None:
    cutter = WindowCutter(agent="a", rank=0, log_interval=10, offset=0, origin_ns=0, unix_minus_monotonic_s=0.0)
    for _ in range(3):
        for slot in reader.read_new():
            assert slot.kind in ring._WHAT_RANGES
            assert min(slot.ordinal, slot.step_ns, slot.generation_ns, *slot.phases_ns, *slot.counts) >= 0
            cutter.add_record(slot)
        reader.skip_torn()
    state, ordinal, _, what = reader.read_state()
    assert ring.STATE_NAMES[state]
    assert MARKED_PHASES[what]
    assert ordinal >= 0
    for document, kind in ((reader.take_facts(), RankFacts), (reader.take_address(), FoundAddress)):
        with contextlib.suppress(msgspec.ValidationError):
            assert isinstance(msgspec.convert(document or {}, kind), kind)
    reader.close()


FILES = ("run.json", "windows-0001.jsonl", "ranks-0001.jsonl", "events.jsonl", "summary.json", "state.json")


def runfolder(data: bytes) -> None:
    """Read and continue a run folder; one of its files contains these bytes."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as name:
        folder = Path(name)
        for file in [FILES[data[0] % len(FILES)]] if data else []:
            (folder / file).write_bytes(data[1:])
        for read in (read_windows, read_ranks, read_events):
            rows = read(folder)
            for one in rows:
                assert isinstance(one, msgspec.Struct)
            assert rows.num_skipped <= data.count(b"\n") + 1
        assert isinstance(status_of(folder), str)
        read_own_json(folder / FILES[data[0] % len(FILES)] if data else folder, Holder)
        with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            aggregator = Aggregator(Config(), "job", 1, 1000.0, restore((folder / "state.json").read_bytes()))
            aggregator.hello(hello(0, world_size=2), Now(0.0, 1000.0))
            assert math.isfinite(aggregator.ledger.attempt)
        sink = RunFolder(folder, {"job": "job"})
        sink.close()
        assert msgspec.json.decode((folder / "run.json").read_bytes())["job"] == "job"


TARGETS = {"frames": frames, "ring": ring_, "runfolder": runfolder}


def corpus(target: str) -> Iterator[Path]:
    yield from sorted((CORPUS / target).iterdir())
