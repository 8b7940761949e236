"""How far another process's monotonic clock is from ours, and how well that is known: four timestamps, pure.

A message leaves at ``sent``, reaches the other at ``received``, its answer leaves there at ``answered`` and is heard
here at ``heard``.  Were both ways equally long, the other's clock would be ahead by the mean of ``received - sent``
and ``answered - heard`` (RFC 5905, section 8).  They are not, but neither takes less than no time, so that half of
the round trip bounds the error, whatever the network does.  Of the last 16 exchanges the one with the least bound
holds: the one with the shortest round trip, unless it has become old.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NS = 1e-9

#: Exchanges that an estimate is chosen from.
MAX_EXCHANGES = 16

#: How much two monotonic clocks may drift apart, in seconds of a second.  A quartz is within 50 ppm of its rate, and
#: a disciplined clock far nearer; one that is slewed faster than this is found out, see `Exchanges.add`.
DRIFT = 100e-6

#: Between exchanges until there are `MAX_EXCHANGES`, and then: at 10,000 ranks 500 a second for five minutes, then
#: 200, of which each takes about 30 us of the aggregator's core: 1.5 %, then 0.6 %.
#: In small worlds an exchange comes with every heartbeat: an agent's core pays 270 us for each, and 5 s are half a
#: millisecond of drift at most.
FIRST_PACE_S, FIRST_RANKS_PER_S = 0.25, 500
PACE_S, RANKS_PER_S = 5.0, 200

#: A message with a later answer was lost or delayed, and its estimate would be useless.
MAX_S = 10.0


class Offset(NamedTuple):
    """The other clock minus ours; its error is at most ``error_s``."""

    offset_s: float
    error_s: float


class _Exchange(NamedTuple):
    heard_ns: int
    offset_ns: float
    error_ns: float  # half of the round trip

    def error_at(self, now_ns: int) -> float:
        return self.error_ns + DRIFT * max(now_ns - self.heard_ns + 2 * self.error_ns, 0)


def aged(error_s: float, age_s: float) -> float:
    """Return the error of an offset of this age."""
    return error_s + DRIFT * max(age_s, 0.0)


class Exchanges:
    """The exchanges of this process with the process whose clock is estimated.

    Args:
        world_size: number of ranks that use the same process; the pace grows with it.
        rank: in the job; their first exchanges are spread by it.
    """

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self._first_pace_s = max(FIRST_PACE_S, world_size / FIRST_RANKS_PER_S)
        self._pace_s = max(PACE_S, world_size / RANKS_PER_S)
        self._first_s = self._first_pace_s * (rank % 61) / 61
        self._asked_ns: deque[int] = deque(maxlen=4)
        self._done: deque[_Exchange] = deque(maxlen=MAX_EXCHANGES)
        self._due_s: float | None = None

    def due_s(self, now_s: float) -> float:
        """Return when the next message should go; the first waits for a part of a pace."""
        if self._due_s is None:
            self._due_s = now_s + self._first_s
        return self._due_s

    def ask(self, now_ns: int) -> int:
        """Record that a message goes now; return its field ``sent``."""
        pace_s = self._first_pace_s if len(self._done) < MAX_EXCHANGES else self._pace_s
        self._due_s = now_ns * NS + pace_s
        self._asked_ns.append(now_ns)
        return now_ns

    def add(self, sent_ns: int, received_ns: int, answered_ns: int, heard_ns: int) -> bool:
        """Add an answer; ``False`` if it does not belong to a message of ours, or is impossible.

        Exchanges that contradict it are dropped: their bounds, including drift, do not overlap with its own, so the
        other clock was slewed or replaced.
        """
        if sent_ns not in self._asked_ns:
            return False
        self._asked_ns.remove(sent_ns)
        round_trip_ns = heard_ns - sent_ns - (answered_ns - received_ns)
        if answered_ns < received_ns or not 0 <= round_trip_ns <= MAX_S / NS:
            return False
        new = _Exchange(heard_ns, (received_ns - sent_ns + answered_ns - heard_ns) / 2, round_trip_ns / 2)
        error_ns = new.error_at(heard_ns)
        agreeing = [
            old for old in self._done if abs(old.offset_ns - new.offset_ns) <= old.error_at(heard_ns) + error_ns
        ]
        self._done = deque([*agreeing, new], maxlen=MAX_EXCHANGES)
        return True

    def offset(self, now_ns: int) -> Offset | None:
        """Return the best estimate of now; ``None`` before the first."""
        best = min(self._done, key=lambda one: one.error_at(now_ns), default=None)
        return None if best is None else Offset(best.offset_ns * NS, best.error_at(now_ns) * NS)

    def forget(self) -> None:
        """Drop all exchanges, because the other process may have been replaced."""
        self._asked_ns.clear()
        self._done.clear()
        self._due_s = None
