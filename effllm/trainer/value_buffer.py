"""The values of instruments on their way from the instruments to the ring.

Instruments import this module also without a run, so it imports nothing of effllm.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effllm.records.ring import RingWriter

MAX_VALUES = 12  # in one record: records.ring.MAX_VALUES
#: After this many records of values, the agent is woken, so that it reads the ring before records are overwritten.  By
#: default, the ring has 1,000 slots.
WAKE_RECORDS = 250
#: Maximum number of values that are kept in iterations; this number of values is written at once.
MAX_TOGETHER = 10 * MAX_VALUES
#: At the ends of iterations, values are written at most once in this time: with cold caches, a write takes as long as
#: the recorder's two calls of an iteration.
WRITE_EVERY_NS = 100_000_000
#: Maximum number of values of a second thread that wait for the training loop; further values are dropped and counted.
MAX_PENDING = 1000
#: Maximum number of names whose index is stored here; if a loop creates more names, the later names are ignored.
MAX_KNOWN_NAMES = 1000


class ValueBuffer:
    """The values of instruments that are not yet in the ring, oldest first.

    In a training loop the caches are cold: each function and each object that a call uses takes microseconds.  So
    `add_value` only appends, and one record of several values takes less time than a record of each.  Any thread may
    call it.  Only the thread of the training loop writes: two threads would write into the same slot of the ring.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, float]] = []  # names and values
        self._due: Callable[[], None] | None = None  # see `connect`; None while no recorder is connected
        self.limit = 1  #: at this number of values, `add_value` calls the recorder

    def connect(
        self,
        due: Callable[[], None],
        writer: RingWriter,
        wake: Callable[[], None],
        index_of: Callable[[str], int],
        warn: Callable[[str], None],
    ) -> None:
        """Keep values from now on.

        ``due`` is called at `limit` values, and calls `write_values`.  ``wake`` must not wait.  ``index_of`` returns
        the index of a name, or -1 if there are too many names.  ``warn`` gets a line once for each kind of mistake.
        """
        self._pending, self.limit, self._due = [], 1, due
        self._writer, self._wake, self._index_of, self._warn = writer, wake, index_of, warn
        self._index_by_name: dict[str, int] = {}  # -1: the name has no index, so its values are ignored
        self._loop_thread = get_ident()
        self._is_writing = False  # a signal handler may call `write_values` during a call
        self._num_values = self._num_records = 0  # written so far
        self._num_dropped = 0  # only a second thread changes this number

    def disconnect(self, due: Callable[[], None]) -> None:
        """Drop all values, and ignore later values; does nothing if another recorder has connected since."""
        if self._due == due:
            self._due, self._pending = None, []

    def add_value(self, name: str, value: float) -> None:
        """Record a value for the run folder; does nothing while no recorder is connected.

        Args:
            name: for example ``loss``, or with its unit ``timing/forward_seconds``.
            value: NaN and infinite values are counted; a value that is not a float is ignored, with a warning.
        """
        due = self._due
        if due is not None:
            pending = self._pending
            pending.append((name, value))
            if len(pending) >= self.limit:
                due()

    def begin_iteration(self) -> None:
        """Begin an iteration; the calling thread is the thread of the training loop."""
        self._loop_thread = get_ident()
        self.limit = MAX_TOGETHER

    def write_values(self, ordinal: int, now_ns: int = 0) -> int:
        """Write all values, if the calling thread is that of the loop; return the earliest time of the next call.

        Between two iterations, ``ordinal`` is the number of the last iteration.
        """
        pending = self._pending
        if pending and get_ident() != self._loop_thread:
            if len(pending) > MAX_PENDING:
                del pending[-1:]  # the newest value
                self._num_dropped += 1
        elif pending and not self._is_writing:
            self._is_writing = True
            try:
                pairs = pending[:]
                del pending[: len(pairs)]  # another thread may have appended a value meanwhile
                for start in range(0, len(pairs), MAX_VALUES):
                    self._write_record(ordinal, pairs[start : start + MAX_VALUES])
            finally:
                self._is_writing = False
        return now_ns + WRITE_EVERY_NS

    def _write_record(self, ordinal: int, pairs: list[tuple[str, float]]) -> None:  # names and values, of one record
        index_by_name, indices, values = self._index_by_name, [], []
        for name, value in pairs:
            index = index_by_name.get(name)
            if index is None:
                index = -1
                if len(index_by_name) < MAX_KNOWN_NAMES:
                    index = index_by_name[name] = self._index_of(name)
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
        self._writer.write_values(ordinal, self._num_values + self._num_dropped, indices, values)
        self._num_records += 1
        if self._num_records % WAKE_RECORDS == 0:
            self._wake()


#: The values of the instruments of this process.
PENDING = ValueBuffer()
