"""Reads a run folder for ``effllm top``: the values at one position, while the files grow or after the end of the run.

Only new lines, and lines near the position, are read.  The functions block as long as the disk does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from effllm.analysis.run_folders import UnreadableRun, find_runs, started_s
from effllm.metrics import METRICS
from effllm.records.identity import Identity
from effllm.records.job import SCHEMA_VERSION, Summary, WindowReport, version_error
from effllm.records.rank import Event
from effllm.store.line_files import END, START, LineFiles, Lines, Position, end_of
from effllm.store.reader import DECODE_ERRORS, RankRow
from effllm.store.regular_file import read_regular
from effllm.views.top.frame import Head, RankTimes, RunPlace, TopFrame, is_point, problems_of, status_of
from effllm.views.top.ranks import EventHistory, Limits, RankStates, rank_table
from effllm.views.top.text import local_time

MAX_WINDOWS = 200  # number of windows of the curve, and with times of ranks
MAX_ROWS = 600  # number of lines of ranks that are read for a window
MAX_EVENTS = 200
READ_EVENTS_FOR_S, MAX_LINES = 0.1, 5000  # time for reading events before a frame, and lines that are read at once

Document = TypeVar("Document", bound=Struct)


class _RankFacts(Struct):
    host: str = ""
    devices: tuple[Limits, ...] = ()


class _RunFacts(Identity, frozen=True, kw_only=True):
    ranks: Mapping[str, _RankFacts] = {}
    world_size: int | None = None
    schema_version: int = SCHEMA_VERSION


class _WindowKey(Struct):
    attempt: int
    window: int


_FORMS: tuple[type[Struct], ...] = (WindowReport, _WindowKey, Event, RankRow)
_DECODERS = {form: msgspec.json.Decoder(form) for form in _FORMS}


def _decoded(form: type[Struct], line: bytes) -> Any:
    """Return the record in a line of JSON; ``None`` for an invalid line."""
    try:
        return _DECODERS[form].decode(line)
    except DECODE_ERRORS:
        return None


class _Document:
    """A JSON document that is replaced as a whole."""

    def __init__(self, path: Path, form: type[Struct]) -> None:
        self._path, self._decoder = path, msgspec.json.Decoder(form)
        self._file_state = (0, 0, 0)  # inode, size and time of the version that was read
        self.content: Any = None  # the newest valid version
        self.changed_s = 0.0  # unix time of the file
        self.error = ""

    def refresh(self) -> bool:
        """Read the document if it was replaced; return whether it was. `error` is the reason of an invalid document."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return False
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if state == self._file_state:
            return False
        content = read_regular(self._path)
        self._file_state, self.changed_s = state, status.st_mtime
        try:
            record: Any = self._decoder.decode(content)
        except DECODE_ERRORS as error:
            self.error = f"{self._path.name} cannot be read: {error}"
        else:
            if problem := version_error(record.schema_version):
                raise UnreadableRun(f"{self._path} cannot be read: {problem}")
            self.content, self.error = record, ""
        return True


class _RunFiles:
    """The files of a run folder: documents, and lines of windows, ranks and events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.summary = _Document(folder / "summary.json", Summary)
        self.facts = _Document(folder / "run.json", _RunFacts)
        self.windows, self.ranks, self.events = (LineFiles(folder, stem) for stem in ("windows", "ranks", "events"))

    @property
    def changed_s(self) -> float:
        """Unix time of the last change of a file; 0 if unknown."""
        return max(self.windows.changed_s, self.summary.changed_s, self.events.changed_s)


class OwnTimes:
    """The time that each rank itself needed per iteration (not waiting for others), from ranks-*.jsonl."""

    def __init__(self, files: LineFiles) -> None:
        self._files = files
        self._read_until: Position | None = None
        self._times_s: dict[tuple[int, int], dict[int, float]] = {}  # by (attempt, window), then by rank

    def refresh(self) -> bool:
        """Read new lines, at first the newest ones; return whether there are any."""
        files, start = self._files, self._read_until
        lines = files.lines_before(END, MAX_LINES) if start is None else files.lines_after(start, MAX_LINES)
        for _, line in lines:
            row: RankRow | None = _decoded(RankRow, line)
            if row is None:
                continue
            count, seconds = row.own_steps, row.own_step_s  # number of steps, and the sum of their own times
            if count <= 0:  # without own times, the whole steps are counted
                count, seconds = row.iteration_last - row.iteration_first + 1, row.busy_s
            if count > 0 and seconds > 0:
                self._times_s.setdefault((row.attempt, row.window), {})[row.rank] = seconds / count
        if lines:
            self._read_until = end_of(lines)
            for key in sorted(self._times_s)[:-MAX_WINDOWS]:
                del self._times_s[key]
        return bool(lines)

    def times_until(self, attempt: int, window: int) -> RankTimes:
        """Return the times of the windows up to one, the oldest first."""
        return [self._times_s[key] for key in sorted(self._times_s) if key <= (attempt, window)]


class FolderSource:
    """The values of a run folder, or of the last one of a folder of runs, at one position, which can be moved."""

    every_s = 1.0  # period of reading while nothing is requested

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened_files: _RunFiles | None = None  # None until the first read
        self._history, self._events_end = EventHistory(), START  # events, and the end of the lines that were read
        self._position: Position | None = None  # None: the newest window
        self._tail: list[WindowReport | None] = []  # the windows up to the position; None: an invalid line
        self._tail_end = START  # the end of the lines of these windows
        self._host_of_rank: dict[int, str] = {}
        self._limits_of_rank: dict[int, Limits] = {}
        self.has_more = False  # whether events of the file are still to be read
        self._num_changes = 0  # number of readings with something new
        self._last_change_s = 0.0  # monotonic time of the last of these readings

    @property
    def _files(self) -> _RunFiles:
        """The files of the run; of a folder of runs, those of the run that was the last to start at the first read."""
        if self._opened_files is None:
            folders = [run.folder for run in find_runs(self._path)]
            self._opened_files = _RunFiles(max(folders, key=started_s))
            self._times = OwnTimes(self._opened_files.ranks)
        return self._opened_files

    def refresh(self) -> bool:
        """Read what is new in the folder; return whether something is."""
        # All four are read. run.json has megabytes, and is not needed for the first frame: see `refresh_hosts`.
        files = self._files
        is_new = any([files.windows.refresh(), files.summary.refresh(), self._read_events(), files.ranks.refresh()])
        if is_new:
            self._num_changes, self._last_change_s = self._num_changes + 1, time.monotonic()
        return is_new

    def refresh_hosts(self) -> bool:
        """Read run.json, with the hosts and GPUs of all ranks, and times of ranks; return whether something is new."""
        is_new = self._times.refresh()
        if not self._files.facts.refresh() or self._files.facts.content is None:
            return is_new
        ranks = self._files.facts.content.ranks.items()
        by_rank = {int(rank): facts for rank, facts in ranks if rank.isdecimal() and len(rank) < 10}
        self._host_of_rank = {rank: sys.intern(facts.host) for rank, facts in by_rank.items()}
        self._limits_of_rank = {rank: facts.devices[0] for rank, facts in by_rank.items() if facts.devices}
        return True

    def _read_events(self) -> bool:
        """Read new events for a limited time, and set `has_more` if there are others; return whether there were any."""
        until_s = time.monotonic() + READ_EVENTS_FOR_S
        self._files.events.refresh()
        is_new = False
        while lines := self._files.events.lines_after(self._events_end, MAX_LINES):
            self._history.add_events(event for _, line in lines if (event := _decoded(Event, line)) is not None)
            self._events_end = end_of(lines)
            is_new = True
            if time.monotonic() > until_s:
                break
        self.has_more = bool(lines)
        return is_new

    def move(self, kind: str, amount: float = 0.0) -> None:
        """Move the position to the ``oldest`` or ``newest`` window, or by a number (``step``) or ``share`` of windows.

        ``pause`` keeps the position at the window that is now the newest.
        """
        if (here := self._position) is None:
            newest = self._files.windows.lines_before(END, 1)
            here = newest[-1][0] if newest else START
        if kind == "newest":
            self._position = None
        elif kind == "pause":
            self._position = here
        elif kind == "oldest":
            self._position = _first_position(self._files.windows.lines_after(START, 1))
        elif kind == "share":
            share = max(self._files.windows.share_of(here) + amount, 0.0)
            start = self._files.windows.position_at_share(share)  # the end for a share of 1
            self._position = _first_position(self._files.windows.lines_after(start, 1))
        elif amount < 0:
            lines = self._files.windows.lines_before(here, int(-amount))
            self._position = lines[0][0] if lines else here
        elif self._position is not None:
            lines = self._files.windows.lines_after(here, int(amount) + 1)
            self._position = lines[-1][0] if len(lines) > amount else None  # past the end: the newest
        self._tail = []

    def frame(self, now_s: float) -> TopFrame:
        """Return the values at the position; ``now_s`` is the unix time."""
        self._read_windows()
        latest, shown = _newest_reports(self._tail)
        summary: Summary | None = self._files.summary.content
        until_unix_s = math.inf if self._position is None or shown is None else shown.time_s
        # A part of the events would show ranks as lost that are back.
        states = RankStates() if self.has_more else self._history.states(until_unix_s)
        head = self._head(latest, shown, states, now_s)
        coverage = shown.coverage if shown is not None else None
        num_ranks = coverage.ranks_expected if coverage is not None else len(self._host_of_rank)
        rows = self._rank_rows(shown) if shown is not None else []
        notes = [document.error for document in (self._files.summary, self._files.facts) if document.error]
        if self.has_more:
            notes.append("events.jsonl is being read: lost ranks are not known yet")
        verdict_note = ""
        if summary is not None:
            verdict_note = "whole run" if summary.is_over else f"at {local_time('%H:%M:%S', summary.updated_time_s)}"
        return TopFrame(
            head=head,
            place=RunPlace(
                self._position is None,
                1.0 if self._position is None else self._files.windows.share_of(self._position),
                shown.time_s if shown is not None else None,
                shown.window if shown is not None else None,
            ),
            coverage=coverage,
            values=self._values_by_tag(latest, shown),
            over="" if shown is None else "whole run" if self._shows_whole_run else f"window {shown.window}",
            loss=shown.loss if shown is not None else None,
            doubtful=shown.doubtful if shown is not None else (),
            verdict=summary.verdict if summary is not None else None,
            verdict_note=verdict_note,
            waterfall=summary.waterfall if summary is not None else None,
            problems=list(problems_of(head, states, coverage, shown.stragglers if shown is not None else ())),
            points=[point for point in self._tail if point is not None and is_point(point)],
            rank_times=self._times.times_until(shown.attempt, shown.window) if shown is not None else (),
            ranks=rank_table(shown, rows, states, self._host_of_rank, num_ranks, self._limits_of_rank),
            events=self._history.newest(until_unix_s, MAX_EVENTS),
            notes=notes,
        )

    @property
    def _shows_whole_run(self) -> bool:
        """Whether the values are those of the whole run: it is over, and no earlier window is shown."""
        summary: Summary | None = self._files.summary.content
        return self._position is None and summary is not None and summary.is_over

    def _values_by_tag(self, latest: WindowReport | None, shown: WindowReport | None) -> dict[str, float]:
        # The last window may be without iterations, but has the newest totals.
        values = {**shown.values, **latest.values} if shown is not None and latest is not None else {}
        if not self._shows_whole_run:
            return values
        metrics = self._files.summary.content.metrics
        run_tags = {entry.tag(entry.bases[0]): entry.tag(entry.summary_bases[0]) for entry in METRICS.values()}
        run_tags["window/pcu_ratio"] = "pcu_ratio"
        return values | {tag: metrics[run_tag].value for tag, run_tag in run_tags.items() if run_tag in metrics}

    def _head(self, latest: WindowReport | None, shown: WindowReport | None, states: RankStates, now_s: float) -> Head:
        summary: Summary | None = self._files.summary.content
        facts: Identity | None = summary or self._files.facts.content
        is_over = summary is not None and summary.is_over
        is_newest = self._position is None
        changed_unix_s = self._files.changed_s
        age_s = None if is_over or not changed_unix_s else max(now_s - changed_unix_s, 0.0)
        if age_s is not None and self._num_changes > 1:  # the clock of the file server may differ from this host's
            age_s = min(age_s, time.monotonic() - self._last_change_s)
        status = status_of(summary.status if summary is not None else "running", is_over, states, age_s)
        if not is_newest:
            status = "stalled" if states.stall else "running"
        start_unix_s = facts.started_time_s if facts is not None else None
        elapsed_s = shown.time_s - start_unix_s if shown is not None and start_unix_s is not None else None
        if summary is not None and is_newest and (is_over or elapsed_s is None):
            elapsed_s = summary.elapsed_s
        return Head(
            name=(facts.run_id if facts is not None else None) or self._files.folder.name,
            user=facts.user if facts is not None else None,
            status=status,
            is_over=is_over,
            age_s=age_s,
            elapsed_s=elapsed_s,
            attempt=shown.attempt if shown is not None else None,
            iteration=shown.iteration if shown is not None else None,
            total_iterations=shown.total_iterations if shown is not None else None,
            forecast=shown.forecast if shown is not None and not (is_over and is_newest) else {},
            currency=summary.currency if summary is not None else "",
            style=shown.style if shown is not None else "Iteration",
            simulated=any(record.simulated for record in (latest, summary) if record is not None),
        )

    def _read_windows(self) -> None:
        """Read the windows up to the position; while the newest window is shown, only the new lines are read."""
        if self._position is not None:
            windows, here = self._files.windows, self._position
            new = [] if self._tail else [*windows.lines_before(here, MAX_WINDOWS - 1), *windows.lines_after(here, 1)]
        elif not self._tail:
            new = self._files.windows.lines_before(END, MAX_WINDOWS)
        else:
            new = self._files.windows.lines_after(self._tail_end, MAX_WINDOWS)
        if new:
            self._tail = [*self._tail, *(_decoded(WindowReport, line) for _, line in new)][-MAX_WINDOWS:]
            self._tail_end = end_of(new)

    def _rank_rows(self, window: WindowReport) -> list[RankRow]:
        """Return the reports of the ranks in a window: they are at the end of the files, or they are searched."""
        wanted = window.attempt, window.window
        lines = self._files.ranks.lines_before(END, MAX_ROWS)
        if not lines or _attempt_and_window(lines[0][1]) >= wanted:
            first = self._files.ranks.first_reached(lambda line: _attempt_and_window(line) >= wanted)
            lines = self._files.ranks.lines_after(first, MAX_ROWS)
        rows = (_decoded(RankRow, line) for _, line in lines if _attempt_and_window(line) == wanted)
        return [row for row in rows if row is not None]


def _first_position(lines: Lines) -> Position | None:
    return lines[0][0] if lines else None


def _attempt_and_window(line: bytes) -> tuple[int, int]:
    key = _decoded(_WindowKey, line)
    return (key.attempt, key.window) if key is not None else (0, 0)


def _newest_reports(windows: Sequence[WindowReport | None]) -> tuple[WindowReport | None, WindowReport | None]:
    """Return the newest window, and the newest with iterations, because the last window of a run may not have any."""
    latest: WindowReport | None = None
    for report in reversed(windows):
        if report is None or report.correction:  # an invalid line, or new totals of an older window
            continue
        latest = latest or report
        if report.iteration_last >= report.iteration_first:
            return latest, report
    return latest, latest
