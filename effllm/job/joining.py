"""Joins the reports of short windows into windows that last a second or longer. No I/O.

The aggregator sets the end of a joined window, so that the window ends at the same iteration on all ranks.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeVar

from msgspec.structs import astuple, replace

from effllm.records.counters import FIELDS
from effllm.records.iteration_times import IterationTimes
from effllm.records.rank import METHODS, Allocator, DeviceWindow, Gauge, Integrals, RankReport, add_profiles
from effllm.records.values import merge_by_name

MAX_WAIT_S = 2.5  # timeout of a joined window; until most ranks have reported, the timeout is twice as long
MAX_ENDS = 1024  # maximum number of stored ends of joined windows, which late reports need
Name = TypeVar("Name", int, str)
Number = TypeVar("Number", int, float)


class Joined(NamedTuple):
    """A rank's part of a joined window: the sum of the rank's reports, or ``None``."""

    rank: int
    last_ended_window: int  # the last joined window whose end the rank has reached
    row: RankReport | None = None
    num_rows: int = 0  # number of the rank's reports in `row`


class WindowJoiner:
    """Joins the windows of each rank until the joined window is long enough.

    A joined window ends when the windows of most ranks are long enough, so that no single rank sets the end.
    Joined windows are numbered consecutively; if each window is long enough, windows are not joined.  In this class a
    *window* is one that an agent has reported, and a *number* is that of a joined window.

    Args:
        min_s: minimum duration of a joined window, except before a pause or the end of the job.
        number: the last closed joined window, 0 before the first.
        until: the last window in joined window ``number``.
    """

    def __init__(self, min_s: float, number: int = 0, until: int = 0) -> None:
        self._min_s = min_s
        self._last_ended = number  # the last ended joined window
        self._ends = [until]  # the last window in each of the newest ended joined windows, up to `_last_ended`
        self._has_first_number = number > 0  # if not, the first joined window gets the number of its first window
        self._long_at: dict[int, int] = {}  # rank -> window at which the rank's part is long enough
        self._since_s: float | None = None  # receipt of the first report of the open joined window
        self._waiting: dict[int, list[RankReport]] = {}  # rank -> its reports in one joined window

    def add_report(self, row: RankReport, num_ranks: int, closed: int, has_many: bool, now_s: float) -> list[Joined]:
        """Add a report; return the joined reports that are complete now.

        Late reports of joined windows up to ``closed`` do not wait.  If the rank ``has_many`` waiting reports, its part
        counts as long enough.
        """
        rank, number = row.rank, self._joined_number_of(row.window)
        ready: list[Joined] = []
        rows = self._waiting.get(rank)
        if rows is not None:
            waiting_number = self._joined_number_of(rows[0].window)
            if number < waiting_number:  # a late report of an earlier joined window
                return [Joined(rank, number, join((row,), number), 1)]
            if number > waiting_number:  # the part that waits is complete
                ready.append(self._take_joined(rank))
                rows = None
        if rows is None and number > 1:  # the rank has reached the end of the previous joined window
            ready.append(Joined(rank, number - 1))
        if rows is None:
            rows = self._waiting[rank] = []
        rows.append(row)
        if number <= self._last_ended:  # the report is late, and complete if it is the rank's last in this window
            if row.final or number <= closed or row.window >= self.end_of(number):
                ready.append(self._take_joined(rank))
            return ready
        if self._since_s is None:
            self._since_s = now_s
        if len(rows) == 1 and row.window == self._ends[-1] + 1 and self._is_long(row, row):
            return ready + self._end_window(row.window, now_s)  # this window is long enough
        if rank not in self._long_at and (has_many or self._is_long(rows[0], row)):
            self._long_at[rank] = row.window
        while 2 * len(self._long_at) > num_ranks:
            ready += self._end_window(statistics.median_low(self._long_at.values()), now_s)
        return ready

    def number_if_single(self, row: RankReport) -> int:
        """Return the number of the last ended joined window if it consists of this report's window; else 0.

        Also 0 if reports of the rank wait.  In a large job nearly all reports are such: `add_report` changes none.
        """
        ends = self._ends
        is_single = row.window == ends[-1] and len(ends) > 1 and ends[-2] == row.window - 1
        return self._last_ended if is_single and row.rank not in self._waiting else 0

    def end_overdue_windows(self, now_s: float, num_ranks: int, is_over: bool) -> list[Joined]:
        """End the open joined window after its timeout, or all if no more reports will come; return their reports."""
        ready: list[Joined] = []
        while self._since_s is not None and (is_over or now_s - self._since_s >= MAX_WAIT_S):
            newest = [rows[-1].window for rows in self._waiting.values() if rows[-1].window > self._ends[-1]]
            if not is_over and 2 * len(newest) <= num_ranks and now_s - self._since_s < 2 * MAX_WAIT_S:
                break
            ready += self._end_window(statistics.median_low(newest), now_s)
        return ready

    def take_incomplete_reports(self, number: int) -> list[Joined]:
        """Return the incomplete joined reports of a joined window that closes now."""
        ranks = [rank for rank, rows in self._waiting.items() if self._joined_number_of(rows[0].window) <= number]
        return [self._take_joined(rank, number) for rank in ranks]

    def end_of(self, number: int) -> int:
        """Return the last window of an ended joined window; of a long ended one, that of the oldest stored one."""
        return self._ends[max(number - self._last_ended - 1, -len(self._ends))]  # -1 is the last ended one

    @property
    def lowest_sequences(self) -> dict[int, int]:
        """The lowest sequence of each rank with waiting reports."""
        return {rank: min(row.sequence for row in rows) for rank, rows in self._waiting.items()}

    def _joined_number_of(self, window: int) -> int:
        """Return the number of the joined window that contains a window; after the last end, that of the open one."""
        return self._last_ended + 1 - len(self._ends) + bisect_left(self._ends, window)

    def _is_long(self, first: RankReport, last: RankReport) -> bool:
        return last.final or last.end_time_s - first.start_time_s >= self._min_s

    def _end_window(self, end: int, now_s: float) -> list[Joined]:
        """End the newest joined window; return the joined reports of the ranks that have reached its end."""
        rows_by_rank = {rank: rows for rank, rows in self._waiting.items() if rows[-1].window > self._ends[-1]}
        if not self._has_first_number:
            self._has_first_number = True
            self._last_ended = statistics.median_low(rows[0].window for rows in rows_by_rank.values()) - 1
        self._last_ended += 1
        self._ends.append(end)
        if len(self._ends) > MAX_ENDS:
            del self._ends[: MAX_ENDS // 2]
        self._long_at, self._since_s = {}, None
        ready = []
        for rank, rows in rows_by_rank.items():
            later = [row for row in rows if row.window > end]
            if later or rows[-1].final or rows[-1].window == end:
                self._waiting[rank] = [row for row in rows if row.window <= end]
                ready.append(self._take_joined(rank) if self._waiting[rank] else Joined(rank, self._last_ended))
            if later:
                self._waiting[rank], self._since_s = later, now_s
                long_at = next((row.window for row in later if self._is_long(later[0], row)), None)
                self._long_at |= {} if long_at is None else {rank: long_at}
        return ready

    def _take_joined(self, rank: int, number: int | None = None) -> Joined:
        rows = self._waiting.pop(rank)
        number = self._joined_number_of(rows[0].window) if number is None else number
        return Joined(rank, number, join(rows, number), len(rows))


def add_to(sums: dict[Name, Number], more: Mapping[Name, Number], sign: int = 1) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + sign * value


def summed(parts: Iterable[Mapping[Name, float]]) -> dict[Name, float]:
    sums: dict[Name, float] = {}
    for part in parts:
        add_to(sums, part)
    return sums


def largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def with_earlier_part(earlier: RankReport | None, row: RankReport) -> RankReport:
    """Return a report, joined with the earlier report of its rank in the same window if there is any."""
    return row if earlier is None else join((earlier, row), row.window)


def join(rows: Sequence[RankReport], window: int) -> RankReport:
    """Return the exact sum of consecutive reports of one rank, oldest first, as its report of ``window``."""
    first, last = rows[0], rows[-1]
    if len(rows) == 1:
        return first if first.window == window else replace(first, window=window)
    return replace(
        last,
        **{name: sum(getattr(row, name) for row in rows) for name in _SUMMED_FIELDS},
        window=window,
        sequence=min(row.sequence for row in rows),  # no report is acknowledged before its sum is written
        iteration_first=last.iteration_last - sum(row.iterations for row in rows) + 1,  # if one is missing: too late
        start_time_s=first.start_time_s,
        phases_s=summed(row.phases_s for row in rows),
        loss=next((row.loss for row in reversed(rows) if row.loss is not None or row.losses_not_finite), None),
        first_not_finite=next((row.first_not_finite for row in rows if row.first_not_finite is not None), None),
        devices=_joined_devices(rows),
        final=any(row.final for row in rows),
        reset=any(row.reset for row in rows),
        profile=add_profiles(*(row.profile for row in rows)),
        values=merge_by_name(row.values for row in rows if row.values) or None,
        times=IterationTimes.join([(row.times, row.iterations) for row in rows]),
        allocator=_largest_sizes([row.allocator for row in rows if row.allocator is not None]),
    )


_SUMMED_FIELDS = (
    *FIELDS, "wall_s", "busy_s", "wait_s", "iterations_overrun", "generation_s", "device_steps", "device_step_s",
    "own_steps", "own_step_s", "device_own_steps", "device_own_step_s", "losses_not_finite",
)  # fmt: skip


def _largest_sizes(parts: Sequence[Allocator]) -> Allocator | None:
    return Allocator(*map(max, *map(astuple, parts))) if len(parts) > 1 else next(iter(parts), None)


def _joined_devices(rows: Sequence[RankReport]) -> tuple[DeviceWindow, ...]:
    by_key: dict[str, list[DeviceWindow]] = {}
    for row in rows:
        for device in row.devices:
            by_key.setdefault(device.device, []).append(device)
    return tuple(parts[0] if len(parts) == 1 else join_devices(parts) for parts in by_key.values())


def join_devices(parts: Sequence[DeviceWindow]) -> DeviceWindow:
    """Return the sum of consecutive windows of one device."""
    phases: dict[str, Integrals] = {}
    gauges: dict[str, Gauge] = {}
    for part in parts:
        for name, integrals in part.phases.items():
            phases[name] = phases[name] + integrals if name in phases else integrals
        for name, gauge in part.gauges.items():
            gauges[name] = gauges[name] + gauge if name in gauges else gauge
    return DeviceWindow(
        device=parts[0].device,
        wall=reduce(Integrals.then, [part.wall for part in parts]),
        phases=phases,
        memory_peak_bytes=largest(part.memory_peak_bytes for part in parts),
        power_peak_w=largest(part.power_peak_w for part in parts),
        energy_method=max(
            (part.energy_method for part in parts if part.energy_method is not None),
            key=lambda method: METHODS.index(method) if method in METHODS else -1,
            default=None,
        ),
        gauges=gauges,
        throttled_s=summed(part.throttled_s for part in parts),
        throttle_covered_s=sum(part.throttle_covered_s for part in parts),
        power_histogram_s=summed(part.power_histogram_s for part in parts),
    )
