"""Detects agents that ended without a BYE: the kernel closes a killed agent's connection. No I/O.

Used at the end of a job, so that the job does not wait three heartbeat periods for a dead agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

#: An agent reconnects within half a second, or within five seconds after repeated failures.
GONE_AFTER_S = 2.0


class LostAgents:
    """Ranks whose agents have lost their connections, with the time of each loss."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def look(self, now_s: float, ranks: Iterable[int], reaches: Callable[[int], bool]) -> list[int]:
        """Return the ranks whose agents have had no connection for two seconds.

        Args:
            now_s: current time.
            ranks: ranks that have not ended.
            reaches: returns whether a rank's agent has a connection.
        """
        gone_s = {rank: self._since_s.get(rank, now_s) for rank in ranks if not reaches(rank)}
        self._since_s = gone_s
        return [rank for rank, since_s in gone_s.items() if now_s - since_s >= GONE_AFTER_S]
