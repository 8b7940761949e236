"""Reads regular files, and appends to them: one lock, no partial text. Standard library only.

A pipe or a device is never read, because such a read may wait or never end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

#: A longer line of a JSON Lines file is not read as a whole; a window of two ranks has up to 11 kB. DuckDB's limit is
#: 16 MiB.
MAX_LINE_BYTES = 15 * 2**20
#: A larger run.json or summary.json is not read: run.json of 10,000 ranks has 8 MB.
MAX_DOCUMENT_BYTES = 2**26


def open_regular(path: Path) -> int:
    """Return a descriptor of a regular file, opened for reading; for another file, `OSError`."""
    # Non-blocking, because opening a pipe would block until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
    """Return the content of a regular file of at most ``max_bytes``; for another file, `OSError`."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes >> 20} MiB", str(path))
    return content


def lines_of(path: Path, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines that start at an offset or later; of a line longer than `MAX_LINE_BYTES`, only the beginning."""
    with os.fdopen(open_regular(path), "rb") as file:
        file.seek(max(begin - 1, 0))
        is_rest = begin > 0  # first comes the end of an earlier line: at least its line break
        while line := file.readline(MAX_LINE_BYTES):
            part = line
            while len(part) == MAX_LINE_BYTES and not part.endswith(b"\n"):
                part = file.readline(MAX_LINE_BYTES)  # the rest of the line is skipped
            if not is_rest:
                yield line
            is_rest = False


@contextlib.contextmanager
def locked(descriptor: int, path: Path, timeout_s: float) -> Iterator[int]:
    """Lock an open file, so that other processes wait (`TimeoutError` after ``timeout_s``); at the end it is closed."""
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"another process has locked {path} for {timeout_s:g} s") from None
            time.sleep(0.02)
        yield descriptor
    finally:
        os.close(descriptor)


def is_still_at(descriptor: int, path: Path) -> bool:
    """Whether an open file has this path; it may have been removed or renamed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def append(descriptor: int, data: bytes) -> None:
    """Append to an open file; after a failed write the file has its old length."""
    size = os.fstat(descriptor).st_size
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        with contextlib.suppress(OSError):  # the file system may reject every change
            os.ftruncate(descriptor, size)
        raise
