"""Memory that a training process and its agent share, and documents in it; standard library alone.

Each piece is a memfd that the agent inherits, so that it has no name and leaves nothing behind. Neither side waits for
the other: a reader that meets a half-written document sees a wrong checksum (ARM may reorder stores, and Python has no
fences) and reads again later.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

DOCUMENT_HEADER = struct.Struct("<QII")  # version, length, checksum


class RingError(OSError):
    """The maps could not be made, so there can be no metrics; the message has the reason."""


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
        # From now on it cannot shrink, which would be a SIGBUS at the next store of a process that maps it.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise RingError(f"no room for {size} bytes of shared memory: {error}") from error
    return descriptor


class SharedDocument:
    """An object of JSON in a part of a map.

    Args:
        memory: the map.
        at: where the part begins.
        room: its bytes.
    """

    def __init__(self, memory: mmap.mmap, at: int, room: int) -> None:
        self._memory, self._at, self._room = memory, at, room
        self._version = 0  # of the newest document that `take` has returned

    def write(self, document: Mapping[str, Any]) -> bool:
        """Replace the document; ``False`` where it is too large, and the old one stays."""
        payload = json.dumps(document, separators=(",", ":")).encode()
        if len(payload) > self._room - DOCUMENT_HEADER.size:
            return False
        version = int(DOCUMENT_HEADER.unpack_from(self._memory, self._at)[0]) + 1
        start = self._at + DOCUMENT_HEADER.size
        self._memory[start : start + len(payload)] = payload
        DOCUMENT_HEADER.pack_into(self._memory, self._at, version, len(payload), checksum(version, payload))
        return True

    def take(self) -> dict[str, Any] | None:
        """Return the document if it has changed since the last call and is whole, else ``None``."""
        version, document = self._read(self._version)
        if document is not None:
            self._version = version
        return document

    def read(self) -> dict[str, Any] | None:
        """Return the document if it is whole, changed or not; any thread may call this."""
        return self._read(0)[1]

    def _read(self, seen: int) -> tuple[int, dict[str, Any] | None]:
        version, length, expected = DOCUMENT_HEADER.unpack_from(self._memory, self._at)
        if version == seen or length > self._room - DOCUMENT_HEADER.size:
            return seen, None
        start = self._at + DOCUMENT_HEADER.size
        payload = self._memory[start : start + length]
        if checksum(version, payload) != expected:
            return seen, None  # being written at this moment: the caller reads again
        try:
            document = json.loads(payload)
        except (ValueError, RecursionError):
            return seen, None
        return (version, document) if isinstance(document, dict) else (seen, None)


def checksum(version: int, payload: bytes) -> int:
    """Return the checksum of a document.

    The version and the length are in it, for a header is stored field by field: half of a first one, its version with
    no length and no checksum yet, is what an empty payload would look like.
    """
    return zlib.crc32(payload, zlib.crc32(version.to_bytes(8, "little") + len(payload).to_bytes(4, "little")))
