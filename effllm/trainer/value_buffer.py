"""Values of instruments, gathered until the end of the running iteration."""

from __future__ import annotations

from collections.abc import Callable

from effllm.records.ring import MAX_VALUES, RingWriter

#: After this many records of values, the agent is woken, so that it reads the ring before records are overwritten.  By
#: default, the ring has 1,000 slots.
WAKE_RECORDS = 250


class ValueBuffer:
    """Values that are not yet in the ring; one record of several values takes less time than a record of each.

    A second thread that records values, or an interrupt, may lose values, but never raises an exception.

    Args:
        writer: the ring.
        wake: wakes the agent; must not wait.
    """

    __slots__ = ("_kept", "_num_records", "_num_values", "_ordinal", "_wake", "_writer")

    def __init__(self, writer: RingWriter, wake: Callable[[], None]) -> None:
        self._writer, self._wake = writer, wake
        self._ordinal = 0  # ordinal of the iteration of the kept values
        self._kept: list[tuple[int, float]] = []  # each value with the index of its name
        self._num_values = self._num_records = 0

    def add(self, index: int, value: float, ordinal: int, *, is_running: bool) -> bool:
        """Add a value; return whether it must be written before the end of the iteration is recorded.

        Args:
            index: index of the value's name.
            value: the value.
            ordinal: number of completed iterations.
            is_running: whether an iteration is running; between two iterations, the value is written at once.
        """
        kept = self._kept
        kept.append((index, value))
        self._ordinal = ordinal + is_running
        if is_running and len(kept) < MAX_VALUES:
            return True
        self.write()
        return False

    def write(self) -> None:
        """Write the kept values."""
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        for at in range(0, len(kept), MAX_VALUES):  # a second thread may have added more values than fit in a record
            indices, values = zip(*kept[at : at + MAX_VALUES], strict=True)
            self._writer.values(self._ordinal, self._num_values + len(values), indices, values)
            self._num_values += len(values)
            self._num_records += 1
            if self._num_records % WAKE_RECORDS == 0:
                self._wake()
