"""Agents that ended without a BYE: the kernel of a killed one closes its connection. No I/O.

Used at the end of a job, which must not wait for three heartbeats of a dead agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

#: An agent whose connection broke has another within half a second, or five where that went on failing.
GONE_AFTER_S = 2.0


class LostAgents:
    """Ranks whose agents cannot be reached, and since when."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}

    def look(self, now_s: float, ranks: Iterable[int], reaches: Callable[[int], bool]) -> list[int]:
        """Return those of the ranks whose agents have been out of reach for two seconds.

        Args:
            now_s: the time.
            ranks: those that are waited for.
            reaches: whether a rank's agent has a connection now.
        """
        gone_s = {rank: self._since_s.get(rank, now_s) for rank in ranks if not reaches(rank)}
        self._since_s = gone_s
        return [rank for rank, since_s in gone_s.items() if now_s - since_s >= GONE_AFTER_S]
