"""Reports that are not in the totals yet: reports of open windows, and late reports of closed windows. No I/O.

A window is identified by its number, which is equal on all ranks, and never by wall-clock time.  Windows close in order
and only once: after every live rank has passed the window, or at the deadline.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from msgspec import Struct, field
from msgspec.structs import replace

from effllm.config.settings import Config
from effllm.job.joining import Joined, WindowJoiner, with_earlier_part
from effllm.job.ledger import Ledger
from effllm.job.merged import GpuReadings
from effllm.job.pacing import is_large
from effllm.job.presence import Presence
from effllm.records.rank import RankReport

MAX_PENDING_BYTES = 2 * 2**20  # maximum size of a rank's encoded reports; in memory they take eight times as much
#: Late reports are added in turns, of at most this number of windows: each window takes about a millisecond.
MAX_LATE = 32
LATE_WINDOW_S = 0.005  # delay of the next turn per late window
MAX_CLOSING_ROWS = 1000  # maximum number of reports of incomplete windows that close at once, while outputs wait
CLOSING_ROWS = 30  # time for closing a window, as a number of reports


class OpenWindow(Struct):
    """An open window."""

    number: int
    first_s: float  # receipt of the first report
    rows: dict[int, RankReport] = {}  # by rank
    # Of reports with one device, added at their receipt: of 10,000 ranks, twice as fast as when the window closes.
    readings: GpuReadings = field(default_factory=GpuReadings)
    num_added: int = 0  # number of reports in `readings`

    def add_readings(self, row: RankReport) -> None:
        if len(row.devices) == 1:
            self.readings.add_window(row.devices[0])
            self.num_added += 1

    @property
    def whole_readings(self) -> GpuReadings | None:
        """The readings of all reports; ``None`` if a rank has several devices, or several parts of a report."""
        return self.readings if self.num_added == len(self.rows) else None


@dataclass(slots=True)
class _PendingSize:
    """The number and the encoded bytes of a rank's reports that are not in the totals yet."""

    num_rows: int = 0
    num_bytes: int = 0

    def subtract(self, num_rows: int = 1) -> None:
        """Subtract reports of mean size."""
        self.num_bytes -= self.num_bytes * num_rows // self.num_rows if self.num_rows else 0
        self.num_rows = max(self.num_rows - num_rows, 0)


class OpenWindows:
    """The reports of a job that are not in its totals yet."""

    def __init__(self, config: Config, ledger: Ledger, presence: Presence) -> None:
        self._ledger, self._presence = ledger, presence
        self._history_size, min_s = config.history_size, config.min_window_s  # maximum number of pending reports
        until = max(ledger.joined_until, ledger.closed)
        self._joiner = WindowJoiner(min_s, ledger.closed, until) if min_s else None
        self._windows: dict[int, OpenWindow] = {}  # by number
        self._oldest: OpenWindow | None = None  # the open window with the lowest number
        self._pending_sizes: dict[int, _PendingSize] = {}  # by rank
        self._late: dict[int, dict[int, RankReport]] = {}  # closed window -> rank -> its late report
        self._max_late = MAX_LATE  # maximum number of windows in a turn of late reports
        self._next_late_s = -math.inf  # earliest time of the next turn of late reports
        self._closed_s = -math.inf  # time at which the last window closed
        self.has_more_to_close = False  # whether further windows may be ready to close, at once

    # --- inputs ---

    def reserve_room(self, rank: int, num_bytes: int) -> bool:
        """Return whether a rank may have one more open report; if so, it is counted, and `add_report` must follow."""
        size = self._pending_sizes.get(rank)
        if size is None:
            size = self._pending_sizes[rank] = _PendingSize()
        if size.num_rows >= self._history_size or size.num_bytes + num_bytes > MAX_PENDING_BYTES:
            return False
        size.num_rows += 1
        size.num_bytes += num_bytes
        return True

    def add_report(self, row: RankReport, now_s: float) -> None:
        """Add a report to its window; if windows are joined, it may wait for its joined window."""
        if self._joiner is None:
            self._add_to_window(row, now_s)
        elif (number := self._joiner.number_if_single(row)) > 0:
            self._add_to_window(row if row.window == number else replace(row, window=number), now_s)
        else:
            size, num_ranks = self._pending_sizes[row.rank], self._ledger.world_size - self._presence.num_away
            has_many = 2 * size.num_rows >= self._history_size or 2 * size.num_bytes >= MAX_PENDING_BYTES
            self._add_joined(self._joiner.add_report(row, num_ranks, self._ledger.closed, has_many, now_s), now_s)

    def join_overdue(self, now_s: float) -> None:
        """Advance the time: reports that have waited too long are joined without missing reports."""
        if self._joiner is not None:
            num_ranks, is_over = self._ledger.world_size - self._presence.num_away, self._presence.everyone_left(now_s)
            self._add_joined(self._joiner.end_overdue_windows(now_s, num_ranks, is_over), now_s)

    def _add_to_window(self, row: RankReport, now_s: float) -> None:
        """Add a report to its window, or to the late reports if the window has closed."""
        rank, window = row.rank, row.window
        state = self._ledger.ranks[rank]
        if window > state.last_window:
            state.last_window = window
        if window <= self._ledger.closed:
            rows = self._late.setdefault(window, {})
        else:
            opened = self._windows.get(window)
            if opened is None:
                opened = self._windows[window] = OpenWindow(window, now_s)
                self._oldest = self._windows[min(self._windows)]
            opened.add_readings(row)
            rows = opened.rows
        rows[rank] = row if self._joiner is None else with_earlier_part(rows.get(rank), row)

    def _add_joined(self, joined: Iterable[Joined], now_s: float) -> None:
        for rank, last_ended_window, row, num_rows in joined:
            state = self._ledger.ranks[rank]
            state.last_window = max(state.last_window, last_ended_window)
            if row is not None:
                self._pending_sizes[rank].subtract(num_rows - 1)  # one report, the joined one, is still pending
                self._add_to_window(row, now_s)

    # --- outputs ---

    def may_close(self) -> bool:
        """Whether enough ranks have reported for the oldest window: a fast check, which is made at every report."""
        oldest = self._oldest
        return oldest is not None and len(oldest.rows) + self._presence.num_away >= self._ledger.world_size

    def take_ready_windows(
        self, now_s: float, timeout_s: Callable[[], float], heard_until_s: float = -math.inf
    ) -> Iterator[OpenWindow]:
        """Yield the windows that close now, in order, up to a limit; the caller must close each window at once.

        A window waits ``timeout_s()`` seconds for late ranks, up to ``heard_until_s``: all frames that arrived before
        this time have been handled.
        """
        self.has_more_to_close, rows_left = True, MAX_CLOSING_ROWS
        while (window := self._oldest) is not None and rows_left > 0:
            # Windows that only few ranks have reached close one after another, so that other ranks have time to report.
            is_shared = 2 * len(window.rows) > self._ledger.world_size - self._presence.num_away
            since_s = window.first_s if is_shared else max(window.first_s, self._closed_s)
            is_overdue = heard_until_s - since_s > timeout_s()
            is_whole = len(window.rows) == self._ledger.world_size
            if not is_overdue and not is_whole and self._presence.has_rank_behind(window.number, now_s):
                self.has_more_to_close = False
                return
            self._closed_s = now_s
            rows_left -= 0 if is_whole else CLOSING_ROWS + len(window.rows)
            yield self._take_window(window)
        self.has_more_to_close = bool(self._windows)

    def take_all_windows(self) -> Iterator[OpenWindow]:
        """Yield all windows in order, because no more reports will arrive; from now on late reports do not wait."""
        if self._joiner is not None:
            self._add_joined(self._joiner.end_overdue_windows(math.inf, 0, is_over=True), math.inf)
        while self._oldest is not None:
            yield self._take_window(self._oldest)
        self._next_late_s, self._max_late = -math.inf, sys.maxsize

    def _take_window(self, window: OpenWindow) -> OpenWindow:
        """Remove a window and return it; reports of late ranks for a part of it are added before."""
        number = window.number
        if self._joiner is not None:
            self._ledger.joined_until = self._joiner.end_of(number)
            self._add_joined(self._joiner.take_incomplete_reports(number), self._closed_s)
        self._ledger.closed = number
        del self._windows[number]
        self._oldest = self._windows[min(self._windows)] if self._windows else None
        for rank in window.rows:
            size = self._pending_sizes[rank]
            if size.num_rows == 1:  # the usual case, without a call for each of 10,000 ranks
                size.num_rows = size.num_bytes = 0
            else:
                size.subtract()
        return window

    def has_late(self, now_s: float, *, for_s: float = 0.0) -> bool:
        """Whether late reports exist, and could have been added since at least ``for_s`` seconds."""
        return bool(self._late) and now_s - self._next_late_s >= for_s

    def take_late_reports(self, now_s: float) -> Iterator[tuple[int, dict[int, RankReport]]]:
        """Yield the late reports, oldest window first."""
        is_limited = not is_large(self._ledger.world_size)  # in a large world all late reports are taken at once
        numbers = sorted(self._late)[: self._max_late if is_limited else None]
        self._next_late_s = now_s + (LATE_WINDOW_S * len(numbers) if is_limited else 0.0)
        for number in numbers:
            rows = self._late.pop(number)
            for rank in rows:
                self._pending_sizes[rank].subtract()
            yield number, rows

    @property
    def is_empty(self) -> bool:
        return not self._windows and not self._late and not (self._joiner and self._joiner.lowest_sequences)

    def safe_sequences(self) -> dict[int, int]:
        """Return for each rank the last sequence up to which all reports are in closed windows."""
        lowest: dict[int, int] = self._joiner.lowest_sequences if self._joiner is not None else {}
        for rows in (*(window.rows for window in self._windows.values()), *self._late.values()):
            for rank, row in rows.items():
                lowest[rank] = min(lowest.get(rank, row.sequence), row.sequence)
        return {
            rank: lowest[rank] - 1 if rank in lowest else state.last_sequence
            for rank, state in self._ledger.ranks.items()
        }
