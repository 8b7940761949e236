"""One run for a report: its documents, curves, ranks, events and stacks; an unreadable part is left out and named."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from effllm.analysis.rank_sums import RankReports
from effllm.analysis.run_row import Document, Unreadable, read_document
from effllm.analysis.sides import STALE_AFTER_S
from effllm.analysis.window_curves import WindowCurves
from effllm.records.events import is_problem
from effllm.records.job import Summary
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


class RecordedRun:
    """The content of a run folder; ``problems`` has a sentence for everything that was not read.

    Args:
        folder: the run folder.
        tags: tags of the curves.
        max_events: maximum number of problems, and of other events.
        max_stacks: maximum number of stack files.
    """

    def __init__(self, folder: Path, tags: Iterable[str], max_events: int, max_stacks: int) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.facts: Document = self._document("run.json") or {}
        self.summary = self._summary()
        self.curves, self.ranks, self.events = WindowCurves(tags), RankReports(), EventExtract(max_events)
        self.stacks: list[tuple[str, str]] = []
        self.stack_files = 0
        readers: tuple[tuple[str, WindowCurves | RankReports | EventExtract], ...]
        readers = (("windows", self.curves), ("rank reports", self.ranks), ("events", self.events))
        for name, reader in readers:
            try:
                reader.read(folder)
            except OSError as error:
                self.problems.append(f"{name} cannot be read: {error.strerror or error}")
            if reader.skipped:
                self.problems.append(f"{name}: {reader.skipped:,} incomplete or invalid lines were left out")
        try:
            self.stacks, self.stack_files = read_stacks(folder, max_stacks)
        except OSError as error:
            self.problems.append(f"stacks cannot be read: {error.strerror or error}")

    @property
    def name(self) -> str:
        """The id of the run, else the name of its folder."""
        known = self.summary.run_id if self.summary is not None else self.facts.get("run_id")
        return known if isinstance(known, str) and known else self.folder.name

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware was measured."""
        return self.curves.is_simulated or (self.summary is not None and self.summary.simulated)

    @property
    def continues(self) -> bool:
        """Whether the run has not ended, and its summary is recent."""
        found = self.summary
        return found is not None and not found.is_over and time.time() - found.updated_time_s < STALE_AFTER_S

    def _summary(self) -> Summary | None:
        document: Any = self._document("summary.json")
        if document is None:
            return None
        try:
            return msgspec.convert(document, Summary, str_keys=True)
        except (msgspec.ValidationError, RecursionError) as error:
            self.problems.append(f"summary.json has another form: {error}")
            return None

    def _document(self, name: str) -> Document | None:
        try:
            return read_document(self.folder / name)
        except FileNotFoundError:
            self.problems.append(f"there is no {name}")
        except Unreadable as error:
            self.problems.append(f"{name} cannot be read: {error}")
        return None
