"""One run for a report: its documents, curves, ranks, events and stacks; an unreadable part is left out and named."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from effllm.analysis.run_row import Document, Form, Unreadable, read_record
from effllm.analysis.sides import STALE_AFTER_S
from effllm.analysis.window_curves import WindowCurves
from effllm.metrics.table import quotient
from effllm.records.events import is_problem
from effllm.records.job import Summary
from effllm.records.rank import Event
from effllm.store.line_files import read_at
from effllm.store.reader import JsonLines, RankRow, segments

#: Only the newest bytes of the files of rank reports are read.
MAX_RANK_BYTES = 256 * 2**20
#: Ranks above this number are left out.
MAX_RANKS = 65_536
#: Ranks whose times are kept by window, and the number of columns of windows.
MAX_TIMED_RANKS, MAX_COLUMNS = 32, 48
#: Only the newest bytes of events.jsonl are read.
MAX_EVENT_BYTES = 64 * 2**20
#: Kinds of stalls, which have a section of their own.
STALLS = ("stalled", "resumed", "stack")
MAX_STALLS = 50
#: Bytes of the beginning of a stack file: the main thread is first.
MAX_STACK_BYTES = 16_384


class RankMeans(Struct):
    """Sums of one rank over its reports; a quotient of two sums is a mean over the same windows."""

    host: str | None = None
    device: str | None = None
    reports: int = 0
    iterations: int = 0
    busy_s: float = 0.0  # time in steps
    wait_s: float = 0.0  # data wait
    energy_j: float = 0.0
    energy_covered_s: float = 0.0
    memory_peak_bytes: float | None = None
    utilization_seconds: float = 0.0
    utilization_covered_s: float = 0.0

    @property
    def step_s(self) -> float | None:
        """Mean step time."""
        return quotient(self.busy_s, self.iterations)

    @property
    def wait_ratio(self) -> float | None:
        """Data wait divided by the time of the iterations."""
        return quotient(self.wait_s, self.busy_s + self.wait_s)

    @property
    def power_w(self) -> float | None:
        """Mean power of the rank's first device."""
        return quotient(self.energy_j, self.energy_covered_s)

    @property
    def utilization(self) -> float | None:
        """Mean utilization of the rank's first device."""
        return quotient(self.utilization_seconds, self.utilization_covered_s)

    def add_report(self, line: RankRow) -> None:
        """Add a report."""
        self.host, self.device = line.host or self.host, line.device or self.device
        self.reports += 1
        self.iterations += max(line.iteration_last - line.iteration_first + 1, 0)
        self.busy_s += line.busy_s
        self.wait_s += line.wait_s
        if line.energy_j is not None:
            self.energy_j += line.energy_j
            self.energy_covered_s += line.energy_covered_s
        if line.memory_peak_bytes is not None:
            self.memory_peak_bytes = max(self.memory_peak_bytes or 0.0, line.memory_peak_bytes)
        if line.utilization_seconds is not None:
            self.utilization_seconds += line.utilization_seconds
            self.utilization_covered_s += line.utilization_covered_s


class RankTimes:
    """Step times by rank and window; neighbouring windows are added up when there are many.

    These are own times (until the sync point), if there are any: ranks that wait for each other have equal step times.
    """

    def __init__(self) -> None:
        self.columns: list[tuple[int, dict[int, list[float]]]] = []  # last iteration; seconds and steps by rank
        self.has_own = False  # whether the times are own times
        self._windows_per_column, self._num_windows = 1, 0  # a multiple of the first fills a column

    def add_report(self, line: RankRow) -> None:
        """Add a report; the reports of a window follow each other."""
        steps = line.iteration_last - line.iteration_first + 1
        if steps <= 0 or line.rank >= MAX_TIMED_RANKS:
            return
        if line.own_steps and not self.has_own:
            self.columns, self._windows_per_column, self._num_windows, self.has_own = [], 1, 0, True
        last_iteration = line.iteration_shown or line.iteration_last
        if not self.columns or self.columns[-1][0] != last_iteration:  # the first report of a window
            self._num_windows += 1
            if not self.columns or (self._num_windows - 1) % self._windows_per_column == 0:
                self.columns.append((last_iteration, {}))
            else:
                self.columns[-1] = last_iteration, self.columns[-1][1]
            if len(self.columns) > MAX_COLUMNS:
                self._merge_pairs()
        seconds, count = (line.own_step_s, line.own_steps) if self.has_own else (line.busy_s, steps)
        sums = self.columns[-1][1].setdefault(line.rank, [0.0, 0])
        sums[0], sums[1] = sums[0] + seconds, sums[1] + count

    def _merge_pairs(self) -> None:
        pairs = [self.columns[index : index + 2] for index in range(0, len(self.columns), 2)]
        self.columns = []
        for pair in pairs:
            merged: dict[int, list[float]] = {}
            for _, by_rank in pair:
                for rank, (seconds, count) in by_rank.items():
                    sums = merged.get(rank, [0.0, 0])
                    merged[rank] = [sums[0] + seconds, sums[1] + count]
            self.columns.append((pair[-1][0], merged))
        self._windows_per_column, self._num_windows = 2 * self._windows_per_column, 1  # the last column has no pair


class RankReports:
    """The sums of all ranks with reports, and the iterations that they cover."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankMeans] = {}
        self.times = RankTimes()
        # Shown iterations at the ends of the first and the last window that was read.
        self.first_end_iteration: int | None = None
        self.last_end_iteration: int | None = None
        self.skipped_lines = 0
        self.unread_bytes = 0  # of older reports

    def read_folder(self, folder: Path) -> None:
        """Read the newest rank reports of a run."""
        lines = JsonLines(list(filter(Path.is_file, segments(folder, "ranks"))), RankRow, MAX_RANK_BYTES)
        for line in lines:
            if line.rank in self.ranks or len(self.ranks) < MAX_RANKS:
                self.ranks.setdefault(line.rank, RankMeans()).add_report(line)
                self.times.add_report(line)
                self.last_end_iteration = line.iteration_shown or line.iteration_last
                if self.first_end_iteration is None:
                    self.first_end_iteration = self.last_end_iteration
        self.skipped_lines, self.unread_bytes = lines.num_skipped, lines.unread_bytes


class EventExtract:
    """The newest problems and the newest other events of a run, at most ``limit`` of each."""

    def __init__(self, limit: int) -> None:
        self.counts: Counter[str] = Counter()  # of the read events, by kind
        self.skipped_lines = 0
        self.unread_bytes = 0
        self.stalls: deque[Event] = deque(maxlen=MAX_STALLS)
        self._problems: deque[Event] = deque(maxlen=limit)
        self._others: deque[Event] = deque(maxlen=limit)

    @property
    def shown(self) -> list[Event]:
        """The kept events, in the order of their times."""
        return sorted((*self._problems, *self._others), key=lambda event: event.time_s)

    def read_folder(self, folder: Path) -> None:
        """Read the newest events of a run; a run without events has no file."""
        path = folder / "events.jsonl"
        if not path.is_file():
            return
        lines = JsonLines([path], Event, MAX_EVENT_BYTES)
        for event in lines:
            self.counts[event.kind] += event.count
            (self._problems if is_problem(event.kind) else self._others).append(event)
            if event.kind in STALLS:
                self.stalls.append(event)
        self.skipped_lines, self.unread_bytes = lines.num_skipped, lines.unread_bytes


def read_stacks(folder: Path, limit: int) -> tuple[list[tuple[str, str]], int]:
    """Return the names and the beginnings of the ``limit`` newest stack files, and the number of all stack files."""
    paths = sorted(
        (path for path in (folder / "stacks").glob("*.txt") if path.is_file()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    texts = [read_at(path, 0, MAX_STACK_BYTES).decode(errors="replace") for path in paths[:limit]]
    return list(zip((path.name for path in paths), texts, strict=False)), len(paths)


class RecordedRun:
    """The content of a run folder; ``problems`` has a sentence for everything that was not read.

    It has at most ``max_events`` problems, as many other events, and ``max_stacks`` stack files.
    """

    def __init__(self, folder: Path, tags: Iterable[str], max_events: int, max_stacks: int) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self.facts = self._read("run.json", Document) or {}
        self.summary = self._read("summary.json", Summary)
        self.curves, self.ranks, self.events = WindowCurves(tags), RankReports(), EventExtract(max_events)
        self.stacks: list[tuple[str, str]] = []
        self.num_stack_files = 0
        readers: tuple[tuple[str, WindowCurves | RankReports | EventExtract], ...]
        readers = (("windows", self.curves), ("rank reports", self.ranks), ("events", self.events))
        for name, reader in readers:
            try:
                reader.read_folder(folder)
            except OSError as error:
                self.problems.append(f"{name} cannot be read: {error.strerror or error}")
            if reader.skipped_lines:
                self.problems.append(f"{name}: {reader.skipped_lines:,} incomplete or invalid lines were left out")
        try:
            self.stacks, self.num_stack_files = read_stacks(folder, max_stacks)
        except OSError as error:
            self.problems.append(f"stacks cannot be read: {error.strerror or error}")

    @property
    def name(self) -> str:
        """The id of the run, else the name of its folder."""
        run_id = self.summary.run_id if self.summary is not None else self.facts.get("run_id")
        return run_id if isinstance(run_id, str) and run_id else self.folder.name

    @property
    def is_simulated(self) -> bool:
        """Whether no hardware was measured."""
        return self.curves.is_simulated or (self.summary is not None and self.summary.simulated)

    @property
    def continues(self) -> bool:
        """Whether the run has not ended, and its summary is recent."""
        summary = self.summary
        return summary is not None and not summary.is_over and time.time() - summary.updated_time_s < STALE_AFTER_S

    def _read(self, name: str, form: type[Form]) -> Form | None:
        try:
            record = read_record(self.folder / name, form)
        except Unreadable as error:
            self.problems.append(f"{name} cannot be read: {error}")
            return None
        if record is None:
            self.problems.append(f"there is no {name}")
        return record
