"""Values of instruments, gathered until the end of the running iteration."""

from __future__ import annotations

from effllm.records.ring import MAX_VALUES, RingWriter

#: After this many records of values, the agent is woken, so that it reads the ring before records are overwritten.  By
#: default, the ring has 1,000 slots.
WAKE_RECORDS = 250


class ValueBuffer:
    """Values that are not yet in the ring; one record of several values takes less time than a record of each.

    Args:
        writer: the ring.
    """

    __slots__ = ("_indices", "_num_records", "_num_values", "_values", "_writer")

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer
        self._indices: list[int] = []
        self._values: list[float] = []
        self._num_values = self._num_records = 0

    def add(self, index: int, value: float) -> None:
        """Keep a value, with the index of its name."""
        self._indices.append(index)
        self._values.append(value)

    @property
    def is_full(self) -> bool:
        return len(self._values) >= MAX_VALUES

    def write(self, ordinal: int) -> bool:
        """Write the values as values of an iteration; return whether the agent must read the ring soon."""
        if not self._values:
            return False
        self._num_values += len(self._values)
        self._num_records += 1
        self._writer.values(ordinal, self._num_values, self._indices, self._values)
        self._indices.clear()
        self._values.clear()
        return self._num_records % WAKE_RECORDS == 0
