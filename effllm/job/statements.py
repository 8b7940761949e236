"""What a rank states about itself: lost reports, and the time of its reports. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from effllm.job.goodput_tiles import MAX_BEFORE_S
from effllm.job.ledger import Ledger, RankState
from effllm.records.rank import Event, RankReport


class Statements:
    """Adds the statements of ranks to their states, and rejects those that are not possible.

    Args:
        ledger: the job's state.
        record: records an event.
    """

    def __init__(self, ledger: Ledger, record: Callable[[Event], None]) -> None:
        self._ledger, self._record = ledger, record

    def accepts(self, number: int, rank: RankState, row: RankReport, time_s: float) -> bool:
        """Add the time of a report; ``False`` if the rank's reports then cover more time than can have passed."""
        covered_s = rank.covered_s + max(row.wall_s, row.busy_s + row.wait_s)
        if covered_s > (self._ledger.goodput.clock.at_s or 0.0) + MAX_BEFORE_S:
            rank.reject(row.sequence)
            self._reject(number, rank, f"reports of {covered_s:,.0f} s", time_s)
            return False
        rank.covered_s = covered_s
        return True

    def lose(self, number: int, rank: RankState, lost: int, sent: int, time_s: float) -> None:
        """Record the number of reports that an agent has dropped; it cannot have dropped more than ``sent``."""
        if lost > sent:
            self._reject(number, rank, f"{lost:,} lost reports", time_s)
        else:
            self._lose(number, rank, lost, "the agent's buffer was full", time_s)

    def lose_gaps(self, number: int, rank: RankState, time_s: float) -> None:
        """Record the reports that are missing before the last accepted report."""
        self._lose(number, rank, rank.gaps, "an aggregator died before it wrote them", time_s)

    def _lose(self, number: int, rank: RankState, lost: int, why: str, time_s: float) -> None:
        if lost > rank.lost:
            text = f"rank {number} lost {lost - rank.lost} reports: {why}"
            self._record(Event(time_s, "reports_lost", text, number))
            rank.lost = lost

    def _reject(self, number: int, rank: RankState, what: str, time_s: float) -> None:
        """Count an impossible statement by rank; the first one of a rank is an event."""
        rank.implausible += 1
        if rank.implausible == 1:
            text = f"rank {number} stated {what}, which is not possible: rejected, like all such values of this rank"
            self._record(Event(time_s, "implausible", text, number))
