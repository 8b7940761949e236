"""The dump of torch's NCCL flight recorder: requested through torch's pipe, copied, and never decoded.

A dump is a pickle; decoding a pickle runs any code in it.  Names of variables and files are from torch's
ProcessGroupNCCL.hpp (DumpPipe) and FlightRecorder.cpp, 2.4 to 2.13.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from effllm.store import own_files

PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # prefix of a rank's pipe, PREFIX<rank>.pipe; any byte requests a dump
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # prefixes of a rank's dump, PREFIX<rank>
WAIT_S = 10.0  # torch reads its pipe once a second
SETTLED_S = 1.0  # a dump is complete when it has not grown for this time
MAX_BYTES = 256 * 2**20


def dump_paths(rank: int, environ: Mapping[str, str]) -> list[Path]:
    named = [environ[name] for name in PREFIXES if environ.get(name)]
    if named:
        return [Path(f"{named[0]}{rank}")]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"  # noqa: S108 - torch's own default
    return [Path(f"{cache}/torch/comm_lib_trace_rank_{rank}"), Path(f"/tmp/nccl_trace_rank_{rank}")]  # noqa: S108 - as above


def ask(rank: int, environ: Mapping[str, str]) -> bool:
    """Request a dump through torch's pipe without waiting; return whether the request was written."""
    if not environ.get(PIPE):
        return False
    with suppress(OSError):  # no pipe, no reader (ENXIO), or a full pipe (a dump was already requested)
        descriptor = os.open(f"{environ[PIPE]}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            about = os.fstat(descriptor)
            return stat.S_ISFIFO(about.st_mode) and about.st_uid == os.getuid() and os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False


def newest(paths: Sequence[Path], since_time_s: float) -> Path | None:
    """Return the newest dump since ``since_time_s`` that our user owns."""
    found = []
    for path in paths:
        with suppress(OSError):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and about.st_mtime >= since_time_s:
                found.append((about.st_mtime, path))
    return max(found)[1] if found else None


def wait(paths: Sequence[Path], since_time_s: float, timeout_s: float = WAIT_S) -> Path | None:
    """Wait until a dump that was written after ``since_time_s`` has stopped growing, and return its path."""
    deadline_s = time.monotonic() + timeout_s
    seen: tuple[Path, int] | None = None
    seen_s = 0.0
    while (now_s := time.monotonic()) < deadline_s:
        path = newest(paths, since_time_s)
        size = path.stat().st_size if path else 0
        if path and size and seen == (path, size):
            if now_s - seen_s >= SETTLED_S:
                return path
        elif path:
            seen, seen_s = (path, size), now_s
        time.sleep(0.1)
    return seen[0] if seen and seen[1] else None


def copy(dump: Path, to: Path) -> bool:
    """Copy a dump to a private file; return ``False`` if the dump is too large."""
    source = os.open(dump, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(source).st_size
        if size > MAX_BYTES:
            return False
        own_files.make_folder(to.parent)
        own_files.remove_file(to)
        target = own_files.open_file(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            sent = 0
            while sent < size and (count := os.sendfile(target, source, sent, size - sent)):
                sent += count
        finally:
            os.close(target)
        return True
    finally:
        os.close(source)
