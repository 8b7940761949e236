"""Values of instruments that are not yet in the ring.

Instruments import this module also without a run, so it imports nothing of effllm.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable


class PendingValues:
    """The values of instruments that the recorder has not written yet, oldest first.

    In a training loop the caches are cold: each function and each object that a call uses takes microseconds.  So a
    value is only appended here.  Any thread may call `add`.
    """

    __slots__ = ("_due", "_values", "limit")

    def __init__(self) -> None:
        self._values: list[tuple[str, float]] = []
        self._due: Callable[[], None] | None = None
        self.limit = 1  #: at this number of values, `add` calls the recorder

    def __len__(self) -> int:
        return len(self._values)

    def connect(self, due: Callable[[], None]) -> None:
        """Keep values from now on; ``due`` is called at `limit` values and must not wait."""
        self._values, self.limit, self._due = [], 1, due

    def disconnect(self, due: Callable[[], None]) -> None:
        """Drop all values, and ignore later values; does nothing if another recorder has connected since."""
        if self._due == due:
            self._due, self._values = None, []

    def add(self, name: str, value: float) -> None:
        """Record a value for the run folder; does nothing while no recorder is connected.

        Args:
            name: for example ``loss``, or with its unit ``timing/forward_seconds``.
            value: NaN and infinite values are counted; a value that is not a float is ignored, with a warning.
        """
        due = self._due
        if due is not None:
            values = self._values
            values.append((name, value))
            if len(values) >= self.limit:
                due()

    def take(self) -> list[tuple[str, float]]:
        """Remove and return all values; a call must not begin before an earlier call has ended."""
        values = self._values
        taken = values[:]
        del values[: len(taken)]  # another thread may have appended a value meanwhile
        return taken

    def drop_newest(self) -> None:
        """Remove the newest value, if there is one."""
        with contextlib.suppress(IndexError):
            self._values.pop()


#: The values of the instruments of this process.
PENDING = PendingValues()
