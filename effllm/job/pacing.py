"""How often the aggregator of a large world writes its state, acknowledges and receives. No I/O.

In a world of up to a thousand ranks the state is kept, and acknowledged, after every window.  Ten thousand
acknowledgements a second would cost as much as what they acknowledge; agents have room for a thousand reports.
"""

from __future__ import annotations

LARGE_WORLD = 1000  # ranks, from which on ...
RANKS_PER_S = 1000.0  # ... so many are acknowledged in a second
SHARE_OF_BUFFER = 8  # a part of an agent's buffer that may be unconfirmed because of this
ENDING_S = 1.0  # agents that have said goodbye wait four seconds for their last confirmation
LARGE_PAUSE_S = 0.002  # between two looks at the socket; one wake-up for each frame would cost more than the frame
QUIET_S, LARGE_QUIET_S = 1.0, 3.0  # a rank heard since needs no heartbeat; reports may be a second apart
LARGE_REPORT_EVERY_S = 0.5  # at most two frames a second from each agent of a large world


class Pace:
    """When the state is kept next.

    Args:
        history_size: how many reports an agent has room for.
    """

    def __init__(self, history_size: int) -> None:
        self._max_windows = max(history_size // SHARE_OF_BUFFER, 1)
        self._windows = 0  # closed, and not in the state that was kept
        self._kept_s = float("-inf")
        self._ending_s: float | None = None  # when the first was seen to leave

    def closed(self, windows: int) -> None:
        self._windows += windows

    def kept(self, now_s: float) -> None:
        self._windows, self._kept_s = 0, now_s

    def is_due(self, now_s: float, world_size: int, is_ending: bool) -> bool:
        """Whether the state is to be kept now: soon where ranks are leaving, or windows follow each other fast."""
        if not self._windows:
            return False
        every_s, since_s = keep_every_s(world_size), self._kept_s
        if is_ending and every_s > ENDING_S:
            # Not at once: the last reports come among farewells, and their window waits for what is done meanwhile.
            self._ending_s = now_s if self._ending_s is None else self._ending_s
            every_s, since_s = ENDING_S, max(since_s, self._ending_s)
        return self._windows >= self._max_windows or now_s - since_s >= every_s


def is_large(world_size: int) -> bool:
    """Whether a world is too large for all ranks to be answered at every window."""
    return world_size > LARGE_WORLD


def keep_every_s(world_size: int) -> float:
    """Return how long the state is at least kept apart; 0 is after every window."""
    return world_size / RANKS_PER_S if is_large(world_size) else 0.0


def late_every_s(world_size: int) -> float:
    """Return how long late rows may wait for more: a window of ten thousand is weighed anew each time."""
    return keep_every_s(world_size) / 2


def quiet_s(world_size: int) -> float:
    """Return for how long a rank may send nothing, when the job ends, before its connection is tried: all in one go."""
    return LARGE_QUIET_S if is_large(world_size) else QUIET_S


def report_every_s(world_size: int) -> float:
    """Return what agents are asked to leave between two frames of reports; 0 leaves it to them."""
    return LARGE_REPORT_EVERY_S if is_large(world_size) else 0.0


def pause_s(world_size: int) -> float:
    """Return for how long the aggregator lets frames gather, when it has emptied its socket."""
    return LARGE_PAUSE_S if is_large(world_size) else 0.0
