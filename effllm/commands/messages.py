"""What commands print on stderr: errors, warnings, and how many run folders were read."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from effllm.records.plain_text import one_line

#: A shorter reading prints nothing.
AFTER_S = 1.0
EVERY_S = 0.2


def complain(command: str, text: str, status: int = 0) -> int:
    """Print why a command failed, or a warning; return the exit status."""
    print(f"effllm {command}: {one_line(text)}", file=sys.stderr)
    return status


class ReadingProgress:
    """Prints the progress of a long reading; it prints nothing on a stream that is not a terminal.

    Args:
        stream: the stream; stderr by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._next_s = time.monotonic() + AFTER_S if self._stream.isatty() else float("inf")
        self._letters = 0

    def __call__(self, done: int, total: int) -> None:
        """Print the number of run folders that were read; the line is erased at the end."""
        if done >= total:
            self._print("")
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + EVERY_S
            self._print(f"{done:,} of {total:,} run folders were read")

    def _print(self, line: str) -> None:
        if line or self._letters:
            print(f"\r{line.ljust(self._letters)}", end="" if line else "\r", file=self._stream, flush=True)
            self._letters = len(line)
