"""The size limit of a run folder."""

from __future__ import annotations

import os
from pathlib import Path

from effllm.store.reader import segments

MB = 1_000_000
#: Kinds of files with the detail of a run, from which totals were computed.
DETAIL = ("windows", "ranks")
MIN_SEGMENTS = 16  # number of files in a full folder, so that each removed file is only a small part of it


def segment_bytes(limit_mb: int, largest: int) -> int:
    """Return the size at which the next file of detail is started, from the folder's limit; 0 means no limit."""
    return min(largest, limit_mb * MB // MIN_SEGMENTS) if limit_mb else largest


def size_bytes(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(place, name).lstat().st_size
            except FileNotFoundError:  # the file was replaced after the folder was listed
                continue
    return total


def remove_oldest_detail(folder: Path, limit_mb: int) -> int:
    """Remove the oldest files of detail until a folder is below its limit; return the number of removed files.

    The newest file of each kind, totals, events and facts are kept.

    Raises:
        OSError: a file cannot be removed.
    """
    over_bytes = size_bytes(folder) - limit_mb * MB
    if over_bytes <= 0:
        return 0
    removed = 0
    old = [(path.lstat(), path) for stem in DETAIL for path in segments(folder, stem)[:-1]]
    for about, path in sorted(old, key=lambda one: one[0].st_mtime_ns):
        path.unlink(missing_ok=True)
        removed += 1
        over_bytes -= about.st_size
        if over_bytes <= 0:
            break
    return removed
