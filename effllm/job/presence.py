"""State of each rank (alive, lost or gone), and the ranks for which a window waits. No I/O."""

from __future__ import annotations

import random

from effllm.job.ledger import Ledger, RankState

LOST_AFTER_S = 15.0  # three heartbeat periods: a rank without a message in this time is lost
ABSENT_AFTER_S = 30.0  # timeout of ranks that have not joined; large jobs start slowly
ABSENT_AFTER_BYE_S = 2.0  # the same timeout after the first BYE, because no rank joins then


class Presence:
    """The time of each rank's last message, and the ranks that have left, also before a restart."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.heard_s: dict[int, float] = {}  # time of each rank's last message
        self.lost: set[int] = set()  # ranks whose last message is older than LOST_AFTER_S
        self.num_left = sum(bool(rank.bye) for rank in ledger.ranks.values())
        self._first_hello_s: float | None = None
        self._first_bye_s: float | None = None
        self._last_behind: int | None = None  # a rank that was behind in the last `has_rank_behind`
        self._random = random.Random(0)  # noqa: S311 - not for secrets

    def note_hello(self, now_s: float) -> None:
        """Record a HELLO; the first HELLO starts the timeout of ranks that have not joined."""
        self._first_hello_s = now_s if self._first_hello_s is None else self._first_hello_s

    def note_message(self, rank: int, now_s: float) -> bool:
        """Record a message of a rank; return whether the rank was lost."""
        self.heard_s[rank] = now_s
        if rank not in self.lost:
            return False
        self.lost.discard(rank)
        return True

    def note_bye(self, rank: RankState, status: str, now_s: float) -> bool:
        """Record the BYE of a rank; return ``False`` if the rank had already left."""
        self._first_bye_s = now_s if self._first_bye_s is None else self._first_bye_s
        if rank.bye:
            return False
        rank.bye = status or "ended"
        self.num_left += 1
        return True

    def take_newly_lost(self, now_s: float) -> dict[int, float]:
        """Return the ranks that were lost since the last call, with the seconds since their last message."""
        if min(self.heard_s.values(), default=now_s) >= now_s - LOST_AFTER_S:  # the usual case of ten thousand ranks
            return {}
        newly_lost = {
            rank: now_s - heard_s
            for rank, heard_s in self.heard_s.items()
            if now_s - heard_s > LOST_AFTER_S and rank not in self.lost and not self._ledger.ranks[rank].bye
        }
        self.lost |= set(newly_lost)
        return newly_lost

    def mark_lost(self, rank: int) -> None:
        """Mark a rank as lost at once, because its agent has ended."""
        self.lost.add(rank)

    def ranks_last_heard(self, before_s: float) -> list[int]:
        """Return the ranks that sent their last message before ``before_s``, and have not left and are not lost."""
        away = self.lost | self.left_ranks
        return [rank for rank, heard_s in self.heard_s.items() if heard_s < before_s and rank not in away]

    @property
    def num_away(self) -> int:
        """Number of ranks that have left or are lost."""
        return len(self.lost) + self.num_left

    def awaited_ranks(self, now_s: float) -> set[int]:
        """Return the ranks for which a window waits, including ranks that have left."""
        present = set(self.heard_s) - self.lost
        if not self._waits_for_absent(now_s):
            return present
        return present | (set(range(self._ledger.world_size)) - set(self.heard_s))

    def has_rank_behind(self, window: int, now_s: float) -> bool:
        """Whether a rank for which the window waits has not passed the window."""
        # This is called for each of ten thousand reports, so a rank that was behind is checked first.
        candidate = self._last_behind
        is_awaited = candidate not in self.lost and (candidate in self.heard_s or self._waits_for_absent(now_s))
        if candidate is not None and is_awaited and self._has_not_passed(candidate, window):
            return True
        behind = [rank for rank in self.awaited_ranks(now_s) if self._has_not_passed(rank, window)]
        self._last_behind = self._random.choice(behind) if behind else None  # the first one may report next
        return bool(behind)

    def _has_not_passed(self, rank: int, window: int) -> bool:
        state = self._ledger.ranks.get(rank)
        return state is None or (state.last_window < window and not state.bye)

    def _waits_for_absent(self, now_s: float) -> bool:
        """Whether windows wait for ranks that have not joined."""
        since_hello_s = now_s - self._first_hello_s if self._first_hello_s is not None else 0.0
        since_bye_s = now_s - self._first_bye_s if self._first_bye_s is not None else 0.0
        return since_hello_s <= ABSENT_AFTER_S and since_bye_s <= ABSENT_AFTER_BYE_S

    @property
    def left_ranks(self) -> set[int]:
        return {rank for rank, state in self._ledger.ranks.items() if state.bye} if self.num_left else set()

    def everyone_left(self, now_s: float) -> bool:
        """Whether ranks have left, and windows wait for no other rank."""
        if len(self.heard_s) - len(self.lost) > self.num_left:
            return False  # a fast check without sets, because this is called often
        left = self.left_ranks
        return bool(left) and not self.awaited_ranks(now_s) - left

    def all_lost(self, now_s: float) -> bool:
        """Whether all ranks that have not left are lost."""
        away = self.lost | self.left_ranks
        heard = [heard_s for rank, heard_s in self.heard_s.items() if rank not in away]
        return all(now_s - heard_s > LOST_AFTER_S for heard_s in heard)

    @property
    def is_deserted(self) -> bool:
        """Whether ranks have joined, and all of them have left or are lost."""
        return bool(self.heard_s) and len(self.lost | self.left_ranks) >= len(self.heard_s)
