"""The newest events of a run, problems first, read with bounded memory and a bounded number of bytes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from effllm.records.events import is_problem
from effllm.records.rank import Event

#: Only the newest bytes of events.jsonl are read.
MAX_BYTES = 64 * 2**20
#: Kinds of stalls, which have a section of their own.
STALLS = ("stalled", "resumed", "stack")
MAX_STALLS = 50
#: Bytes of the beginning of a stack file: the main thread is first.
MAX_STACK_BYTES = 16_384


class EventExtract:
    """The newest problems and the newest other events of a run.

    Args:
        limit: maximum number of problems, and of other events.
    """

    def __init__(self, limit: int) -> None:
        self.counts: Counter[str] = Counter()  # of the read events, by kind
        self.skipped = 0
        self.unread_bytes = 0
        self.stalls: deque[Event] = deque(maxlen=MAX_STALLS)
        self._problems: deque[Event] = deque(maxlen=limit)
        self._others: deque[Event] = deque(maxlen=limit)

    @property
    def shown(self) -> list[Event]:
        """The kept events, in the order of their times."""
        return sorted((*self._problems, *self._others), key=lambda event: event.time_s)

    def read(self, folder: Path) -> None:
        """Read the newest events of a run; a run without events has no file.

        Raises:
            OSError: the file cannot be read.
        """
        path = folder / "events.jsonl"
        if not path.is_file():
            return
        decode = msgspec.json.Decoder(Event).decode
        with path.open("rb") as file:
            for line in self._newest(file):
                try:
                    event = decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    self.skipped += not line.isspace()
                    continue
                self.counts[event.kind] += event.count
                (self._problems if is_problem(event.kind) else self._others).append(event)
                if event.kind in STALLS:
                    self.stalls.append(event)

    def _newest(self, file: IO[bytes]) -> Iterator[bytes]:
        size = file.seek(0, 2)
        self.unread_bytes = max(size - MAX_BYTES, 0)
        file.seek(self.unread_bytes)
        if self.unread_bytes:
            self.unread_bytes += len(file.readline(MAX_BYTES))  # the rest of a line
        while line := file.readline(MAX_BYTES):
            yield line


def read_stacks(folder: Path, limit: int) -> tuple[list[tuple[str, str]], int]:
    """Return the names and the beginnings of the ``limit`` newest stack files, and the number of all stack files.

    Raises:
        OSError: a file cannot be read.
    """
    found = sorted(
        (path for path in (folder / "stacks").glob("*.txt") if path.is_file()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    texts = []
    for path in found[:limit]:
        with path.open("rb") as file:
            texts.append((path.name, file.read(MAX_STACK_BYTES).decode(errors="replace")))
    return texts, len(found)
