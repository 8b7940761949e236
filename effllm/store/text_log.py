"""A text file of bounded size with the newest lines, and a second file with older lines."""

from __future__ import annotations

import os
from pathlib import Path

from effllm.store import own_files


def append(path: Path, text: str, max_bytes: int) -> None:
    """Append text to a file of this user; a file that would exceed ``max_bytes`` is first renamed to ``<name>.1``.

    If the text itself is longer, only its last complete lines are written.

    Raises:
        OSError: the file cannot be written, or is rejected by `own_files.open_file`.
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
