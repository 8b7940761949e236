"""The time of a run: one axis over its restarts, and what the reports of each rank cover of it. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from effllm.records.columns import Array, Table

#: A wall clock that disagrees with the monotonic one by more than this was set.
SET_BY_S = 2.0


class Axis(Struct):
    """One axis of time for a whole run, in seconds since its first sign of life.

    It follows the monotonic clock as long as that is the same one; over another boot or another host unix time is
    all there is.
    """

    boot: str = ""  # whose monotonic clock it is; empty where there is one alone
    now_s: float = 0.0
    time_s: float = 0.0
    at_s: float | None = None
    is_resumed: bool = False  # another process has gone on since it was read

    def advance(self, now_s: float, time_s: float | None, boot: str = "") -> float | None:
        """Move on to a moment; return by how many seconds the wall clock was set, where that is known.

        Args:
            now_s: of the monotonic clock.
            time_s: unix time; ``None`` where it was not read.
            boot: of the machine that these were read on.
        """
        set_by_s = None
        is_same = not self.is_resumed or (bool(self.boot) and boot == self.boot and now_s >= self.now_s)
        step_s = max(now_s - self.now_s, 0.0)
        wall_s = step_s if time_s is None else time_s - self.time_s
        if self.at_s is None:
            self.at_s, wall_s = 0.0, (time_s or 0.0)
        elif is_same:
            self.at_s += step_s
            set_by_s = wall_s - step_s if abs(wall_s - step_s) > SET_BY_S else None
        else:
            self.at_s += max(wall_s, 0.0)
            set_by_s = wall_s if wall_s < -SET_BY_S else None
        self.boot, self.now_s, self.time_s, self.is_resumed = boot, now_s, self.time_s + wall_s, False
        return set_by_s


class Tiles(Table):
    """What the reports of each rank cover in one attempt.

    Reports carry times of their agent's clock.  Its offset to the axis of the run is estimated from the messages: none
    is taken before it was sent, so the smallest difference that any message shows is the best estimate, and messages
    that waited for the aggregator change nothing.  Positions are on the axis, times are by the agent's clock.
    """

    NAMES = (
        "covered_s",
        "clock_s",  # position less time of the same moment: the smallest difference so far
        "start_s",  # time: beginning of the first report
        "end_s",  # time: end of the newest report
        "begin_s",  # position: beginning of the first report
        "heard_s",  # position: when the last message was sent
        "left_s",  # position: when its last message was taken
        "away_s",  # between leaving and coming back
        "is_broken",  # reports were lost before the first that came, or the rank left and came back
        "is_over",  # `end_s` is the end of the rank
    )
    EMPTY = (0.0, *[np.nan] * 6, 0.0, 0.0, 0.0)

    def append(self, ranks: Sequence[int], columns: Mapping[str, Array], seconds: Array, at_s: float) -> float:
        """Append a report of each of these ranks; return the position where the earliest of all begins.

        Args:
            ranks: whose reports they are.
            columns: sequence, final, start_time_s and end_time_s of each report.
            seconds: covered by each report.
            at_s: position when they were taken, at the latest.
        """
        at = self.find(ranks)
        covered_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over = self.values[at].T
        is_first = np.isnan(end_s)
        broken = np.maximum(broken, is_first & (columns["sequence"] > 1) & np.isnan(start_s))
        start_s = np.fmin(start_s, np.where(is_first, columns["start_time_s"], np.nan))
        end_s, over = np.fmax(end_s, columns["end_time_s"]), np.maximum(over, columns["final"])
        clock_s, covered_s = np.fmin(clock_s, at_s - columns["end_time_s"]), covered_s + seconds
        # Reports end before they come, and before their rank leaves.
        begin_s = np.fmin(begin_s, np.fmin(start_s + clock_s, np.fmin(left_s, at_s) - covered_s - away_s))
        heard_s = np.fmax(heard_s, end_s + clock_s)
        self.values[at] = np.stack(
            (covered_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over), axis=1
        )
        return float(begin_s.min())

    def hear(self, rank: int, at_s: float, time_s: float | None) -> None:
        """Take a message of a rank at a position, sent at a time by its agent's clock."""
        at, clock_s, heard_s = self.position(rank), self.column("clock_s"), self.column("heard_s")
        if time_s is not None:
            clock_s[at] = np.fmin(clock_s[at], at_s - time_s)
            at_s = time_s + clock_s[at]
        heard_s[at] = np.fmax(heard_s[at], at_s)

    def begin(self, rank: int, start_s: float | None) -> float:
        """Take the beginning of a rank's first report, by its agent's clock; return its position, nan where unknown."""
        at = self.position(rank)
        start_s = math.nan if start_s is None else start_s
        if not self.column("is_broken")[at] and math.isnan(self.column("start_s")[at]):
            self.column("start_s")[at] = start_s
        begin_s = self.column("begin_s")
        begin_s[at] = np.fmin(begin_s[at], self.column("start_s")[at] + self.column("clock_s")[at])
        return float(begin_s[at])

    def leave(self, rank: int, at_s: float, end_s: float | None = None) -> None:
        """Take a rank's last message at a position, with the end of the rank by its agent's clock."""
        at = self.position(rank)
        left_s = self.column("left_s")
        if math.isnan(left_s[at]):
            left_s[at] = at_s
        if end_s is not None:
            self.column("end_s")[at] = np.fmax(self.column("end_s")[at], end_s)
            self.column("is_over")[at] = 1.0

    def come_back(self, rank: int, at_s: float) -> None:
        """Take the first message of a rank's next agent, whose clock is another one too."""
        at = self.position(rank)
        if np.isfinite(self.column("end_s")[at]):
            self.column("away_s")[at] += max(np.nan_to_num(at_s - self.ends_s[at]), 0.0)
            self.column("is_broken")[at], self.column("is_over")[at] = 1.0, 0.0
            for name in ("clock_s", "start_s", "end_s", "left_s"):
                self.column(name)[at] = np.nan

    @property
    def _covered_until_s(self) -> Array:
        until_s: Array = self.column("begin_s") + self.column("covered_s") + self.column("away_s")
        return until_s

    @property
    def ends_s(self) -> Array:
        """Where the reports of ranks end that are over; without their end, when they left; nan if they have not."""
        end_s = self.column("end_s") + self.column("clock_s")
        ends_s: Array = np.where(
            self.column("is_over") > 0, np.fmax(end_s, self._covered_until_s), self.column("left_s")
        )
        return ends_s

    @property
    def last_s(self) -> float:
        """Where the last rank ends, or was alive as far as is known; nan where nothing is."""
        alive_s = np.fmax(self.column("heard_s"), self._covered_until_s)
        last_s = np.where(np.isnan(self.ends_s), alive_s, self.ends_s)
        return float(np.fmax.reduce(last_s, initial=np.nan))

    def idle_s(self, begin_s: float, end_s: float) -> float:
        """Return the rank-seconds between these before ranks came, after they left, and while they were away."""
        before_s = np.where(self.column("is_broken") > 0, 0.0, np.nan_to_num(self.column("begin_s") - begin_s))
        after_s = np.maximum(np.nan_to_num(end_s - self.ends_s), 0.0)
        return float(before_s.sum() + after_s.sum() + self.column("away_s").sum())
