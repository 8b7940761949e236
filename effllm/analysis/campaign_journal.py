"""The journal of a campaign: one line when a run starts, and one line when it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from effllm.analysis.campaign_plan import PlannedRun, WrongPlan
from effllm.analysis.run_folders import JOURNAL
from effllm.store import own_files

COMPLETED, FAILED, INTERRUPTED, STARTED = "completed", "failed", "interrupted", "started"


class JournalLine(Struct, frozen=True, omit_defaults=True):
    """The start or the end of a run."""

    key: str  # of the planned run
    status: str  # started, completed, failed or interrupted
    time_s: float  # unix
    fingerprint: str = ""  # of the configuration
    folder: str = ""  # name of the run folder
    seconds: float = 0.0
    exit_status: int | None = None
    reason: str = ""


class PlannedRuns(NamedTuple):
    """The repeats of one configuration of a campaign."""

    folder: Path  # of the campaign
    configuration: str
    repeats: int


def has_ended(planned: PlannedRuns) -> bool:
    """Return whether the journal has the end of all repeats of a configuration, failed ones included."""
    try:
        content = (planned.folder / JOURNAL).read_bytes()
    except OSError:
        return False
    last = {line.key: line.status for line in _lines(content)}
    keys = (PlannedRun(planned.configuration, number, 0).key for number in range(1, planned.repeats + 1))
    return all(last.get(key) in (COMPLETED, FAILED) for key in keys)


def _lines(content: bytes) -> Iterator[JournalLine]:
    for text in content.split(b"\n"):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):  # torn by a crash
            yield msgspec.json.decode(text, type=JournalLine)


class CampaignJournal:
    """Appends lines to campaign.jsonl, each durable before the campaign continues; one campaign at a time.

    Raises:
        WrongPlan: another process runs this campaign, or the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        try:
            own_files.make_folder(folder)
            self._file = own_files.open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        except OSError as error:
            raise WrongPlan(f"{folder}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise WrongPlan(f"another process runs the campaign in {folder}, or one of its runs continues") from error
        self._last: dict[str, JournalLine] = {}
        self._starts: Counter[str] = Counter()
        self._durations_s: dict[str, list[float]] = {}
        for line in self._read():
            self._take(line)

    def close(self) -> None:
        os.close(self._file)

    @property
    def descriptor(self) -> int:
        """The locked file; a run that inherits it holds the lock, also if the campaign is killed before it."""
        return self._file

    def add(self, line: JournalLine) -> None:
        """Append a line and sync it to disk.

        Raises:
            OSError: the disk is full.
        """
        content = msgspec.json.encode(line) + b"\n"
        try:
            while content:  # on a full disk, a part of the line is written without an error
                content = content[os.write(self._file, content) :]
            os.fsync(self._file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._take(line)

    def last(self, key: str) -> JournalLine | None:
        """Return the newest line of a run."""
        return self._last.get(key)

    def starts(self, key: str) -> int:
        """Return how often a run was started."""
        return self._starts[key]

    def durations_s(self, keys: Collection[str]) -> list[float]:
        """Return the durations of the completed runs among these."""
        return [seconds for key in keys for seconds in self._durations_s.get(key, ())]

    def _take(self, line: JournalLine) -> None:
        self._last[line.key] = line
        self._starts[line.key] += line.status == STARTED
        if line.status == COMPLETED:
            self._durations_s.setdefault(line.key, []).append(line.seconds)

    def _read(self) -> list[JournalLine]:
        size = os.fstat(self._file).st_size
        content = os.pread(self._file, size, 0)
        if content and not content.endswith(b"\n"):
            os.write(self._file, b"\n")
        return list(_lines(content))
