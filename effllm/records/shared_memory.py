"""Memory that a training process shares with its agent, and documents in this memory.  Standard library only.

The memory is a memfd that the agent inherits: it has no name and leaves no file. Neither process waits for the other
process. A half-written document has a wrong checksum, and is read again later. Without a checksum, a half-written
document could seem complete, because ARM may reorder stores, and Python has no fences.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Mapping
from typing import Any

DOCUMENT_HEADER = struct.Struct("<QII")  # version, length, checksum


class RingError(OSError):
    """Shared memory could not be created, so the rank has no metrics; the message has the reason."""


def make_memory(name: str, size: int) -> int:
    """Return the descriptor of a memfd whose pages are all reserved.

    Without the reservation, a full tmpfs would kill the trainer with a SIGBUS at a later store.

    Raises:
        RingError: there is not enough memory.
    """
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError) as error:
        raise RingError(f"no shared memory for metrics: {error}") from error
    try:
        os.posix_fallocate(descriptor, 0, size)
        # The size is sealed: if the memory became smaller, the next store of either process would raise a SIGBUS.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise RingError(f"no room for {size} bytes of shared memory: {error}") from error
    return descriptor


def map_memory(descriptor: int, size: int) -> memoryview:
    """Return the memory of a descriptor; it is mapped while the view is used, also if the descriptor is closed.

    `mmap.mmap` keeps a descriptor of its own and closes it by its number.  If the script has closed all descriptors
    meanwhile, as a daemon does, this number is a file of the script.

    Raises:
        RingError: the memory cannot be mapped.
    """
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype, library.munmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise RingError(f"no shared memory for metrics: {os.strerror(ctypes.get_errno())}")
    mapped = (ctypes.c_char * size).from_address(address)
    # Not at the end of the interpreter: a later function of atexit may still write.
    weakref.finalize(mapped, library.munmap, address, size).atexit = False
    return memoryview(mapped).cast("B")


class SharedDocument:
    """A JSON object in a part of a map: in at most ``max_bytes`` bytes with its header, from ``offset`` on."""

    def __init__(self, memory: memoryview | mmap.mmap, offset: int, max_bytes: int) -> None:
        self._memory, self._offset, self._max_bytes = memory, offset, max_bytes
        self._version = 0  # version of the newest document that `take_new` has returned

    def write_document(self, document: Mapping[str, Any]) -> bool:
        """Replace the document; if the new document is too large, keep the old document and return ``False``."""
        payload = json.dumps(document, separators=(",", ":")).encode()
        if len(payload) > self._max_bytes - DOCUMENT_HEADER.size:
            return False
        version = int(DOCUMENT_HEADER.unpack_from(self._memory, self._offset)[0]) + 1
        start = self._offset + DOCUMENT_HEADER.size
        self._memory[start : start + len(payload)] = payload
        DOCUMENT_HEADER.pack_into(self._memory, self._offset, version, len(payload), checksum(version, payload))
        return True

    def take_new(self) -> dict[str, Any] | None:
        """Return the document if it is complete and has changed since the last call, else ``None``."""
        version, document = self._read(self._version)
        if document is not None:
            self._version = version
        return document

    def read_document(self) -> dict[str, Any] | None:
        """Return the document if it is complete, even if it has not changed; any thread may call this method."""
        return self._read(0)[1]

    def _read(self, last_version: int) -> tuple[int, dict[str, Any] | None]:  # None also for the last version itself
        version, length, expected = DOCUMENT_HEADER.unpack_from(self._memory, self._offset)
        if version == last_version or length > self._max_bytes - DOCUMENT_HEADER.size:
            return last_version, None
        start = self._offset + DOCUMENT_HEADER.size
        payload = bytes(self._memory[start : start + length])  # a copy: the other process may write
        if checksum(version, payload) != expected:
            return last_version, None  # half-written: the caller reads again
        try:
            document = json.loads(payload, parse_int=_whole_number)
        except (ValueError, RecursionError):
            return last_version, None
        return (version, document) if isinstance(document, dict) else (last_version, None)


def _whole_number(digits: str) -> int:
    if not -(2**63) < (number := int(digits)) < 2**63:
        raise ValueError  # messages have no such numbers
    return number


def checksum(version: int, payload: bytes) -> int:
    """Return the checksum of a document.

    The checksum includes the version and the length, because the fields of a header are stored one after another.
    While only the version of the first header is stored, the length and the checksum in this header are 0.  These are
    also the length and the checksum of empty content, so without the version in the checksum the header would be valid.
    """
    return zlib.crc32(payload, zlib.crc32(version.to_bytes(8, "little") + len(payload).to_bytes(4, "little")))
