"""effllm/records/shared_memory.py and board.py: only complete documents are returned."""

import os

import pytest

from effllm.records.board import BOARD_BYTES, Board, JobState
from effllm.records.shared_memory import DOCUMENT_HEADER, RingError, SharedDocument, checksum, make_memory

HEADER = DOCUMENT_HEADER.size


@pytest.fixture
def memory():
    return bytearray(1024)


@pytest.fixture
def document(memory):
    return SharedDocument(memory, 64, 256)


@pytest.mark.parametrize("header", [(0, 0, 0), (2, 0, 0), (2, 7, 0)], ids=["cleared", "version", "length"])
def test_document_with_a_half_written_header_is_not_read(memory, document, header):
    document.write_document({"a": 1})
    document.take_new()
    DOCUMENT_HEADER.pack_into(memory, 64, *header)  # pack_into clears all fields and then stores each one

    assert document.take_new() is None


def test_half_written_document_is_not_read(memory, document):
    document.write_document({"a": 1})
    payload = slice(64 + HEADER, 64 + HEADER + 6)
    memory[payload] = b'{"a":2'  # the payload is written, but the checksum is not

    assert document.take_new() is document.read_document() is None
    memory[payload] = b'{"a":1'
    assert document.read_document() == document.take_new() == document.read_document() == {"a": 1}
    assert document.take_new() is None


@pytest.mark.parametrize("payload", [b"", b"{", b"[1]", b"7", b"\xff\xfe", b'{"a":' * 40])
def test_payload_that_is_no_json_object_is_not_read(memory, document, payload):
    memory[64 + HEADER : 64 + HEADER + len(payload)] = payload
    DOCUMENT_HEADER.pack_into(memory, 64, 1, len(payload), checksum(1, payload))

    assert document.take_new() is None


def test_json_with_too_many_levels_is_not_read():
    memory, payload = bytearray(64 * 1024), b'{"a":' * 5000
    memory[HEADER : HEADER + len(payload)] = payload
    DOCUMENT_HEADER.pack_into(memory, 0, 1, len(payload), checksum(1, payload))

    assert SharedDocument(memory, 0, len(memory)).take_new() is None


def test_document_longer_than_its_memory_is_not_read(memory, document):
    payload = bytes(memory[64 + HEADER :])
    DOCUMENT_HEADER.pack_into(memory, 64, 1, len(payload), checksum(1, payload))

    assert document.take_new() is None


def test_board_returns_the_newest_complete_state():
    board = Board()
    other = Board(os.dup(board.descriptor))

    assert other.read_state() == JobState()
    assert board.write_state(JobState(1, 10, {"amu_gb": 2.5}))
    assert other.read_state() == other.read_state() == JobState(1, 10, {"amu_gb": 2.5})
    assert board.write_state(JobState(2, admitted_by="tcp://127.0.0.1:1"))
    assert other.admitted_by() == "tcp://127.0.0.1:1"
    os.pwrite(board.descriptor, b"!", HEADER)
    assert other.read_state().report == 1, "a half-written document must not be read"
    assert not board.write_state(JobState(admitted_by="x" * BOARD_BYTES))
    for _ in range(2):
        board.close()
        other.close()
    assert board.descriptor == -1


def test_memory_too_short_for_a_board_is_rejected():
    descriptor = make_memory("short", 100)
    try:
        with pytest.raises(RingError, match="too short for a board"):
            Board(descriptor)
    finally:
        os.close(descriptor)
