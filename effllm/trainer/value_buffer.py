"""The values of instruments on their way from the instruments to the ring."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident

from effllm.records.ring import MAX_VALUES, RingWriter
from effllm.trainer.pending_values import PendingValues

#: After this many records of values, the agent is woken, so that it reads the ring before records are overwritten.  By
#: default, the ring has 1,000 slots.
WAKE_RECORDS = 250
#: Maximum number of values that are kept in iterations; this number of values is written at once.
MAX_TOGETHER = 10 * MAX_VALUES
#: At the ends of iterations, values are written at most once in this time: with cold caches, a write takes as long as
#: the recorder's two calls of an iteration.
EVERY_NS = 100_000_000
#: Maximum number of values of a second thread that wait for the training loop; further values are dropped and counted.
MAX_PENDING = 1000
#: Maximum number of names whose index is stored here; if a loop creates more names, the later names are ignored.
MAX_KNOWN_NAMES = 1000


class ValueBuffer:
    """Writes pending values to the ring; one record of several values takes less time than a record of each.

    Only the thread of the training loop writes, because two threads would write into the same slot of the ring.

    Args:
        writer: the ring.
        wake: wakes the agent; must not wait.
        pending: the values; by default, no instrument adds values.
        index_of: returns the index of a name of values, or -1 if there are too many names.
        warn: called with a line for the user, once for each kind of mistake.
    """

    def __init__(
        self,
        writer: RingWriter,
        wake: Callable[[], None],
        pending: PendingValues | None = None,
        index_of: Callable[[str], int] = lambda _name: -1,
        warn: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._writer, self._wake, self._index_of, self._warn = writer, wake, index_of, warn
        self.pending = PendingValues() if pending is None else pending
        self._indices: dict[str, int] = {}
        self._thread = get_ident()
        self._is_writing = False  # a signal handler may call `write` during a call
        self._num_values = self._num_records = 0
        self._num_dropped = 0  # only a second thread changes this number

    def begin(self) -> None:
        """Begin an iteration; the calling thread is the thread of the training loop."""
        self._thread = get_ident()
        self.pending.limit = MAX_TOGETHER

    def write(self, ordinal: int, now_ns: int = 0) -> int:
        """Write all values, if the calling thread is the thread of the training loop.

        Args:
            ordinal: number of the running iteration or, between two iterations, of the last iteration.
            now_ns: the current time.

        Returns:
            The earliest time of the next write at the end of an iteration.
        """
        if self.pending and get_ident() != self._thread:
            if len(self.pending) > MAX_PENDING:
                self.pending.drop_newest()
                self._num_dropped += 1
        elif self.pending and not self._is_writing:
            self._is_writing = True
            try:
                pairs = self.pending.take()
                for at in range(0, len(pairs), MAX_VALUES):
                    self._put(ordinal, pairs[at : at + MAX_VALUES])
            finally:
                self._is_writing = False
        return now_ns + EVERY_NS

    def _put(self, ordinal: int, pairs: list[tuple[str, float]]) -> None:
        index_of, indices, values = self._indices, [], []
        for name, value in pairs:
            index = index_of.get(name)
            if index is None:
                index = -1
                if len(index_of) < MAX_KNOWN_NAMES:
                    index = index_of[name] = self._index_of(name)
            if index < 0:
                continue
            if type(value) is float:
                indices.append(index)
                values.append(value)
            else:
                self._warn(f"value {name} must be a float, not {type(value).__name__}; the value is ignored")
        if not values:
            return
        self._num_values += len(values)
        # If this number is above the number of values that the agent has read, the agent reports missing values.
        self._writer.values(ordinal, self._num_values + self._num_dropped, indices, values)
        self._num_records += 1
        if self._num_records % WAKE_RECORDS == 0:
            self._wake()
