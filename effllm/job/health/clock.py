"""Offset of another process's monotonic clock, and the error of the offset, from four timestamps. No I/O.

A message leaves this process at ``sent`` and arrives at ``received``.  Its answer leaves the other process at
``answered`` and arrives at ``heard``.  If both ways took equally long, the other clock would be ahead by the mean of
``received - sent`` and ``answered - heard`` (RFC 5905, section 8).  The durations differ, but no duration is negative.
So half of the round trip bounds the error on every network.  Of the last 16 exchanges, the exchange with the smallest
bound is used: the shortest round trip, unless this exchange is old.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

NS = 1e-9

#: Number of exchanges from which an estimate is chosen.
MAX_EXCHANGES = 16

#: Maximum drift between two monotonic clocks, in seconds per second.  A quartz is within 50 ppm of its rate, and a
#: disciplined clock has a smaller error.  A clock that is slewed faster is detected: see `Exchanges.add`.
DRIFT = 100e-6

#: Seconds between exchanges, and maximum rate, for the first `MAX_EXCHANGES` and for later exchanges.  At 10,000 ranks
#: the first rate lasts five minutes.  An exchange takes about 30 us of CPU time in the aggregator: 1.5 % of a core at
#: the first rate, 0.6 % at the later rate.  In jobs with few ranks every heartbeat has an exchange, which takes 270 us
#: in an agent.  In 5 s clocks drift by at most half a millisecond.
FIRST_PACE_S, FIRST_RANKS_PER_S = 0.25, 500
PACE_S, RANKS_PER_S = 5.0, 200

#: A round trip that is longer than this has a lost or delayed message, and its estimate is useless.
MAX_S = 10.0


class Offset(NamedTuple):
    """The other process's clock minus this process's clock, with an error of at most ``error_s``."""

    offset_s: float
    error_s: float


class _Exchange(NamedTuple):
    heard_ns: int
    offset_ns: float
    error_ns: float  # half of the round trip

    def error_at(self, now_ns: int) -> float:
        return self.error_ns + DRIFT * max(now_ns - self.heard_ns + 2 * self.error_ns, 0)


def aged(error_s: float, age_s: float) -> float:
    """Return the error of an offset after ``age_s`` seconds of drift."""
    return error_s + DRIFT * max(age_s, 0.0)


class Exchanges:
    """The exchanges between this process and the process whose clock is estimated.

    Args:
        world_size: number of ranks that send messages to the other process; with more ranks, pauses are longer.
        rank: rank of this process; the first exchanges of different ranks have different delays.
    """

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self._first_pace_s = max(FIRST_PACE_S, world_size / FIRST_RANKS_PER_S)
        self._pace_s = max(PACE_S, world_size / RANKS_PER_S)
        self._first_s = self._first_pace_s * (rank % 61) / 61
        self._asked_ns: deque[int] = deque(maxlen=4)
        self._done: deque[_Exchange] = deque(maxlen=MAX_EXCHANGES)
        self._due_s: float | None = None

    def due_s(self, now_s: float) -> float:
        """Return the time of the next message; the first message has a delay."""
        if self._due_s is None:
            self._due_s = now_s + self._first_s
        return self._due_s

    def ask(self, now_ns: int) -> int:
        """Record that a message is sent now; return its field ``sent``."""
        pace_s = self._first_pace_s if len(self._done) < MAX_EXCHANGES else self._pace_s
        self._due_s = now_ns * NS + pace_s
        self._asked_ns.append(now_ns)
        return now_ns

    def add(self, sent_ns: int, received_ns: int, answered_ns: int, heard_ns: int) -> bool:
        """Add an answer; return ``False`` for an answer to an unknown message, or with impossible times.

        Older exchanges whose bounds, including drift, do not overlap with the new bounds are dropped: the other clock
        was slewed or replaced.
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
        """Return the best estimate at ``now_ns``; ``None`` before the first exchange."""
        best = min(self._done, key=lambda one: one.error_at(now_ns), default=None)
        return None if best is None else Offset(best.offset_ns * NS, best.error_at(now_ns) * NS)

    def forget(self) -> None:
        """Drop all exchanges, because the other process may have been replaced."""
        self._asked_ns.clear()
        self._done.clear()
        self._due_s = None
