"""The current time on both clocks of a process, and their offset. Standard library only."""

from __future__ import annotations

import time
from typing import NamedTuple

TRIES = 5


class Now(NamedTuple):
    """The current time on the monotonic clock, for durations, and on the unix clock, for output and messages."""

    mono_s: float
    unix_s: float

    @classmethod
    def read(cls) -> Now:
        return cls(time.monotonic(), time.time())


def unix_minus_monotonic_ns() -> int:
    """Return unix time minus monotonic time, now.

    A busy machine may stop a process between the reads of the two clocks for milliseconds, which is a joule at 300 W.
    So the unix clock is read between two reads of the monotonic clock, and of several tries the shortest one counts.
    """
    tries = []
    for _ in range(TRIES):
        before_ns, unix_ns, after_ns = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        tries.append((after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2))
    return min(tries)[1]
