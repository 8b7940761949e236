"""The time of a run: one axis over all restarts, and the time that each rank's reports cover. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from effllm.records.columns import Array, Table

#: A rank can have begun at most this long before the first message of the run.  Agents keep reports of several days for
#: a late aggregator.
MAX_BEFORE_S = 30 * 86_400.0


class Axis(Struct):
    """One axis of time for a whole run, in seconds since its first message.

    The axis follows the monotonic clock of a host.  Across a reboot or a change of host the axis follows unix time.
    """

    boot: str = ""  # boot id of the monotonic clock; empty if unknown
    now_s: float = 0.0  # monotonic time of the last `advance`
    time_s: float = 0.0  # unix time of the last `advance`
    at_s: float | None = None  # position on the axis; None before the first message
    is_resumed: bool = False  # whether another process continues from the stored state

    def advance(self, now_s: float, time_s: float | None, boot: str = "") -> None:
        """Advance to the current monotonic and unix time; the latter is ``None`` if it was not read."""
        is_same = not self.is_resumed or (bool(self.boot) and boot == self.boot and now_s >= self.now_s)
        step_s = max(now_s - self.now_s, 0.0)
        wall_s = step_s if time_s is None else time_s - self.time_s
        if self.at_s is None:
            self.at_s, wall_s = 0.0, (time_s or 0.0)
        else:
            self.at_s += step_s if is_same else max(wall_s, 0.0)
        self.boot, self.now_s, self.time_s, self.is_resumed = boot, now_s, self.time_s + wall_s, False


class RankTimes(Table):
    """The time covered by the reports of each rank in one attempt.

    Reports contain times of the agent's clock.  The offset between this clock and the axis is estimated from messages:
    a message is received after it is sent, so the smallest difference is the best estimate, and delayed messages have
    no effect.  Positions are on the axis, times are on the agent's clock.
    """

    NAMES = (
        "covered_s",
        "clock_s",  # smallest difference so far between the position and the time of one moment
        "start_s",  # time at the start of the first report
        "end_s",  # time at the end of the newest report
        "begin_s",  # position at the start of the first report
        "heard_s",  # position at the sending of the last message
        "left_s",  # position at the receipt of the BYE
        "away_s",  # seconds between leaving and rejoining
        "is_broken",  # reports before the first received report were lost, or the rank left and rejoined
        "is_over",  # `end_s` is the end of the rank
    )
    NEW_ROW = (0.0, *[np.nan] * 6, 0.0, 0.0, 0.0)

    def add_reports(self, ranks: Sequence[int], columns: Mapping[str, Array], seconds: Array, at_s: float) -> float:
        """Append one report of each rank; return the earliest start position of these ranks.

        The columns are sequence, final, start_time_s and end_time_s.  Each report covers some ``seconds``; the latest
        possible position of its receipt is ``at_s``.
        """
        at = self.find_or_add(ranks)
        covered_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over = self.values[at].T
        is_first = np.isnan(end_s)
        broken = np.maximum(broken, is_first & (columns["sequence"] > 1) & np.isnan(start_s))
        start_s = np.fmin(start_s, np.where(is_first, columns["start_time_s"], np.nan))
        end_s, over = np.fmax(end_s, columns["end_time_s"]), np.maximum(over, columns["final"])
        clock_s, covered_s = np.fmin(clock_s, at_s - columns["end_time_s"]), covered_s + seconds
        # Reports end before they are received, and before their rank leaves.
        begin_s = np.fmin(begin_s, np.fmin(start_s + clock_s, np.fmin(left_s, at_s) - covered_s - away_s))
        begin_s = np.where(begin_s < -MAX_BEFORE_S, -MAX_BEFORE_S, begin_s)  # also of a hostile rank
        heard_s = np.fmax(heard_s, end_s + clock_s)
        self.values[at] = np.stack(
            (covered_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over), axis=1
        )
        return float(begin_s.min())

    def note_message(self, rank: int, at_s: float, time_s: float | None) -> None:
        """Record a message of a rank: position of its receipt, and time of sending on the agent's clock."""
        at, clock_s, heard_s = self.find_or_add_one(rank), self.column("clock_s"), self.column("heard_s")
        if time_s is not None:
            clock_s[at] = np.fmin(clock_s[at], at_s - time_s)
            at_s = time_s + clock_s[at]
        heard_s[at] = np.fmax(heard_s[at], at_s)

    def note_start(self, rank: int, start_s: float | None) -> float:
        """Record the start of a rank's first report on its agent's clock; return its position, or nan if unknown."""
        at = self.find_or_add_one(rank)
        start_s = math.nan if start_s is None else start_s
        if not self.column("is_broken")[at] and math.isnan(self.column("start_s")[at]):
            self.column("start_s")[at] = start_s
        begin_s = self.column("begin_s")
        begin_s[at] = np.fmin(begin_s[at], self.column("start_s")[at] + self.column("clock_s")[at])
        if begin_s[at] < -MAX_BEFORE_S:
            begin_s[at] = -MAX_BEFORE_S
        return float(begin_s[at])

    def note_bye(self, rank: int, at_s: float, end_s: float | None = None) -> None:
        """Record a rank's BYE at a position, with the end of the rank on its agent's clock."""
        at = self.find_or_add_one(rank)
        left_s = self.column("left_s")
        if math.isnan(left_s[at]):
            left_s[at] = at_s
        if end_s is not None:
            latest_s = at_s - self.column("clock_s")[at]  # the receipt
            self.column("end_s")[at] = np.fmax(self.column("end_s")[at], np.fmin(end_s, latest_s))
            self.column("is_over")[at] = 1.0

    def note_return(self, rank: int, at_s: float) -> None:
        """Record the first message of a rank's next agent, which has another clock."""
        at = self.find_or_add_one(rank)
        if np.isfinite(self.column("end_s")[at]):
            self.column("away_s")[at] += max(np.nan_to_num(at_s - self.end_positions_s[at]), 0.0)
            self.column("is_broken")[at], self.column("is_over")[at] = 1.0, 0.0
            for name in ("clock_s", "start_s", "end_s", "left_s"):
                self.column(name)[at] = np.nan

    @property
    def _covered_until_s(self) -> Array:
        until_s: Array = self.column("begin_s") + self.column("covered_s") + self.column("away_s")
        return until_s

    @property
    def end_positions_s(self) -> Array:
        """End of the reports of each ended rank; if unknown, the receipt of its BYE; nan for running ranks."""
        end_s = self.column("end_s") + self.column("clock_s")
        end_positions_s: Array = np.where(
            self.column("is_over") > 0, np.fmax(end_s, self._covered_until_s), self.column("left_s")
        )
        return end_positions_s

    @property
    def last_s(self) -> float:
        """End of the last rank, or the last position at which this rank was running; nan if unknown."""
        alive_s = np.fmax(self.column("heard_s"), self._covered_until_s)
        last_s = np.where(np.isnan(self.end_positions_s), alive_s, self.end_positions_s)
        return float(np.fmax.reduce(last_s, initial=np.nan))

    def idle_s(self, begin_s: float, end_s: float) -> float:
        """Return the rank-seconds of this period before ranks joined, after ranks left, and during their absence."""
        before_s = np.where(self.column("is_broken") > 0, 0.0, np.nan_to_num(self.column("begin_s") - begin_s))
        after_s = np.maximum(np.nan_to_num(end_s - self.end_positions_s), 0.0)
        return float(before_s.sum() + after_s.sum() + self.column("away_s").sum())
