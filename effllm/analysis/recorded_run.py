"""One run for a report: its documents, curves, ranks, events and stacks; an unreadable part is left out and named."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from effllm.analysis.event_extract import EventExtract, read_stacks
from effllm.analysis.rank_sums import RankReports
from effllm.analysis.run_row import Document, Unreadable, read_document
from effllm.analysis.sides import STALE_AFTER_S
from effllm.analysis.window_curves import WindowCurves
from effllm.records.job import Summary


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
