"""The time of a run: one axis over all restarts, and the time that each rank's reports cover. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from effllm.records.columns import Array, Table

#: A rank can have begun at most this long before the first message of the run, also if it is hostile.  Agents keep
#: reports of several days for a late aggregator.
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

    def advance(self, monotonic_s: float, unix_s: float | None, boot: str = "") -> None:
        """Advance to the current monotonic and unix time; the latter is ``None`` if it was not read."""
        is_same_clock = bool(self.boot) and boot == self.boot and monotonic_s >= self.now_s
        monotonic_step_s = max(monotonic_s - self.now_s, 0.0)
        unix_step_s = monotonic_step_s if unix_s is None else unix_s - self.time_s
        if self.at_s is None:
            self.at_s, unix_step_s = 0.0, (unix_s or 0.0)
        else:
            self.at_s += monotonic_step_s if is_same_clock or not self.is_resumed else max(unix_step_s, 0.0)
        self.boot, self.now_s, self.time_s, self.is_resumed = boot, monotonic_s, self.time_s + unix_step_s, False


class RankTimes(Table):
    """The time covered by the reports of each rank in one attempt.

    In names, ``_axis_s`` is a position on the axis, ``_agent_s`` a time of the agent's clock.  The offset between the
    two is estimated from messages: a message is received after it is sent, so the smallest difference is the best
    estimate, and delayed messages have no effect.
    """

    NAMES = (
        "covered_s",
        "offset_s",  # smallest difference so far between the position and the agent's time of one moment
        "start_agent_s",  # start of the first report
        "end_agent_s",  # end of the newest report
        "start_axis_s",  # start of the first report
        "heard_axis_s",  # sending of the last message
        "left_axis_s",  # receipt of the BYE
        "away_s",  # seconds between leaving and rejoining
        "has_gap",  # reports before the first received report were lost, or the rank left and rejoined
        "has_ended",  # `end_agent_s` is the end of the rank
    )
    NEW_ROW = (0.0, *[np.nan] * 6, 0.0, 0.0, 0.0)

    def add_reports(self, ranks: list[int], columns: Mapping[str, Array], seconds: Array, now_axis_s: float) -> float:
        """Add one report of each rank to its row; return the earliest start of these ranks on the axis.

        The columns are sequence, final, start_time_s and end_time_s; the times are of the agents' clocks.  Each report
        covers some ``seconds``, and was received at ``now_axis_s`` at the latest.
        """
        rows = self.find_or_add(ranks)
        values = dict(zip(self.NAMES, self.values[rows].T, strict=True))  # of these ranks, before their reports
        is_first = np.isnan(values["end_agent_s"])
        has_lost = is_first & (columns["sequence"] > 1) & np.isnan(values["start_agent_s"])
        start_agent_s = np.fmin(values["start_agent_s"], np.where(is_first, columns["start_time_s"], np.nan))
        end_agent_s = np.fmax(values["end_agent_s"], columns["end_time_s"])
        offset_s = np.fmin(values["offset_s"], now_axis_s - columns["end_time_s"])
        covered_s = values["covered_s"] + seconds
        # Reports end before they are received, and before their rank leaves.
        latest_end_axis_s = np.fmin(values["left_axis_s"], now_axis_s)
        latest_start_axis_s = np.fmin(start_agent_s + offset_s, latest_end_axis_s - covered_s - values["away_s"])
        start_axis_s = np.maximum(np.fmin(values["start_axis_s"], latest_start_axis_s), -MAX_BEFORE_S)
        values |= {"covered_s": covered_s, "offset_s": offset_s, "start_axis_s": start_axis_s}
        values |= {"start_agent_s": start_agent_s, "end_agent_s": end_agent_s}
        values["heard_axis_s"] = np.fmax(values["heard_axis_s"], end_agent_s + offset_s)
        values["has_gap"] = np.maximum(values["has_gap"], has_lost)
        values["has_ended"] = np.maximum(values["has_ended"], columns["final"])
        self.values[rows] = np.stack(tuple(values.values()), axis=1)
        return float(start_axis_s.min())

    def note_message(self, rank: int, receipt_axis_s: float, sent_agent_s: float | None) -> None:
        """Record a message of a rank: its receipt on the axis, and its sending on the agent's clock."""
        row, offset_s, heard_axis_s = self.find_or_add_one(rank), self.column("offset_s"), self.column("heard_axis_s")
        sent_axis_s = receipt_axis_s
        if sent_agent_s is not None:
            offset_s[row] = np.fmin(offset_s[row], receipt_axis_s - sent_agent_s)
            sent_axis_s = sent_agent_s + offset_s[row]
        heard_axis_s[row] = np.fmax(heard_axis_s[row], sent_axis_s)

    def note_start(self, rank: int, start_agent_s: float | None) -> float:
        """Record the start of a rank's first report on its agent's clock; return its position, or nan if unknown."""
        row, starts_agent_s = self.find_or_add_one(rank), self.column("start_agent_s")
        if not self.column("has_gap")[row] and math.isnan(starts_agent_s[row]):
            starts_agent_s[row] = math.nan if start_agent_s is None else start_agent_s
        starts_axis_s = self.column("start_axis_s")
        start_axis_s = np.fmin(starts_axis_s[row], starts_agent_s[row] + self.column("offset_s")[row])
        starts_axis_s[row] = np.maximum(start_axis_s, -MAX_BEFORE_S)
        return float(starts_axis_s[row])

    def note_bye(self, rank: int, receipt_axis_s: float, end_agent_s: float | None = None) -> None:
        """Record a rank's BYE: its receipt on the axis, and the end of the rank on its agent's clock."""
        row = self.find_or_add_one(rank)
        left_axis_s = self.column("left_axis_s")
        if math.isnan(left_axis_s[row]):
            left_axis_s[row] = receipt_axis_s
        if end_agent_s is not None:
            receipt_agent_s = receipt_axis_s - self.column("offset_s")[row]  # a rank ends before its BYE is received
            ends_agent_s = self.column("end_agent_s")
            ends_agent_s[row] = np.fmax(ends_agent_s[row], np.fmin(end_agent_s, receipt_agent_s))
            self.column("has_ended")[row] = 1.0

    def note_return(self, rank: int, receipt_axis_s: float) -> None:
        """Record the first message of a rank's next agent, which has another clock."""
        row = self.find_or_add_one(rank)
        if np.isfinite(self.column("end_agent_s")[row]):
            self.column("away_s")[row] += max(np.nan_to_num(receipt_axis_s - self.ends_axis_s[row]), 0.0)
            self.column("has_gap")[row], self.column("has_ended")[row] = 1.0, 0.0
            for name in ("offset_s", "start_agent_s", "end_agent_s", "left_axis_s"):
                self.column(name)[row] = np.nan

    @property
    def _covered_until_axis_s(self) -> Array:
        until_axis_s: Array = self.column("start_axis_s") + self.column("covered_s") + self.column("away_s")
        return until_axis_s

    @property
    def ends_axis_s(self) -> Array:
        """End of the reports of each ended rank; if unknown, the receipt of its BYE; nan for running ranks."""
        reports_end_axis_s = np.fmax(self.column("end_agent_s") + self.column("offset_s"), self._covered_until_axis_s)
        ends_axis_s: Array = np.where(self.column("has_ended") > 0, reports_end_axis_s, self.column("left_axis_s"))
        return ends_axis_s

    @property
    def last_axis_s(self) -> float:
        """End of the last rank, or the last position at which this rank was running; nan if unknown."""
        alive_axis_s = np.fmax(self.column("heard_axis_s"), self._covered_until_axis_s)
        last_axis_s = np.where(np.isnan(self.ends_axis_s), alive_axis_s, self.ends_axis_s)
        return float(np.fmax.reduce(last_axis_s, initial=np.nan))

    def idle_s(self, start_axis_s: float, end_axis_s: float) -> float:
        """Return the rank-seconds of this period before ranks joined, after ranks left, and during their absence."""
        before_s = np.nan_to_num(self.column("start_axis_s") - start_axis_s)
        before_s[self.column("has_gap") > 0] = 0.0  # this may be the time of the lost reports
        after_s = np.maximum(np.nan_to_num(end_axis_s - self.ends_axis_s), 0.0)
        return float(before_s.sum() + after_s.sum() + self.column("away_s").sum())
