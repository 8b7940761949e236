"""How long iterations take on the device, by two CUDA events each that are never waited for.

The host may be far ahead of the device, so its own stamps tell when work was launched.  An iteration's events
are read when the next one ends, and only if the device has come past them by then.  Standard library alone:
torch is the one that the training has imported.
"""

from __future__ import annotations

from collections import deque
from typing import Any

#: Iterations that the device may be behind before one of them is not measured.
MOST_PENDING = 4


class DeviceTime:
    """Times iterations on the current stream of the current device.

    Args:
        cuda: ``torch.cuda``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: list[tuple[Any, Any]] = []
        self._made = 0
        self._open: tuple[Any, Any] | None = None
        self._pending: deque[tuple[Any, Any]] = deque()
        self.total_ns = 0  # of the iterations that were measured ...
        self.iterations = 0  # ... and how many they are

    def start(self) -> None:
        """Mark the start of an iteration on the device."""
        if not self._can_record():
            return
        self._open = self._open or self._pair()
        if self._open is not None:
            self._open[0].record()

    def end(self) -> None:
        """Mark the end of an iteration on the device, and read the one before if it is over there."""
        if not self._can_record():
            self._drop()
            return
        while self._pending and self._pending[0][1].query():
            pair = self._pending.popleft()
            self.total_ns += round(pair[0].elapsed_time(pair[1]) * 1e6)
            self.iterations += 1
            self._free.append(pair)
        if self._open is not None:
            self._open[1].record()
            self._pending.append(self._open)
            self._open = None

    def _can_record(self) -> bool:
        # A capture would take the event into the graph, and asking for it would end the capture.
        return bool(self._cuda.is_initialized()) and not self._cuda.is_current_stream_capturing()

    def _pair(self) -> tuple[Any, Any] | None:
        if self._free:
            return self._free.pop()
        if self._made >= MOST_PENDING:
            return None
        self._made += 1
        return self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True)

    def _drop(self) -> None:
        if self._open is not None:
            self._free.append(self._open)
            self._open = None
