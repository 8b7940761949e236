"""The current time on both clocks of a process."""

from __future__ import annotations

import time

from msgspec import Struct


class Now(Struct, frozen=True, gc=False):
    """The current time on the monotonic clock, for durations, and on the unix clock, for output and messages."""

    mono_s: float
    unix_s: float

    @classmethod
    def read(cls) -> Now:
        return cls(time.monotonic(), time.time())
