"""A text file of bounded size: the newest lines, and in a second file the ones before them."""

from __future__ import annotations

import os
from pathlib import Path

from effllm.store import own_files


def append(path: Path, text: str, max_bytes: int) -> None:
    """Append text to a file of our own; one that would pass ``max_bytes`` becomes ``<name>.1``, in place of the last.

    Of a text that is longer the last whole lines are taken.

    Raises:
        OSError: it cannot be written, or is not a file of our own.
    """
    content = text.encode(errors="replace")
    if len(content) > max_bytes:
        content = content[-max_bytes:].partition(b"\n")[2]
    descriptor = own_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        if size and size + len(content) > max_bytes:
            own_files.rename_file(path, f"{path.name}.1")
            os.close(descriptor)
            descriptor = -1
            descriptor = own_files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, content)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
