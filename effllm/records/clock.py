"""One moment on both clocks of a process."""

from __future__ import annotations

import time

from msgspec import Struct


class Now(Struct, frozen=True, gc=False):
    """One moment by the clock that no one sets, for durations, and by the one that is shown and sent."""

    mono_s: float
    unix_s: float

    @classmethod
    def read(cls) -> Now:
        """Return the present."""
        return cls(time.monotonic(), time.time())
