"""Times iterations on the device with two CUDA events each, without waiting for them.

The host may be far ahead of the device, so the host's stamps only show launches.  The events of an iteration are read
when a later iteration ends, and only if the device has passed them.  Only the standard library is imported: the
caller passes the ``torch.cuda`` of the training.
"""

from __future__ import annotations

from collections import deque
from typing import Any

#: While the device is more than this many iterations behind the host, no iteration is measured.
MAX_PENDING = 4


class _Events:
    """The CUDA events of one iteration."""

    __slots__ = ("end", "has_sync", "start", "sync")

    def __init__(self, start: Any, end: Any) -> None:
        self.start, self.end = start, end
        self.sync: Any = None  # created at the first sync point
        self.has_sync = False


class DeviceTime:
    """Times iterations on the current stream of the current device.

    Args:
        cuda: ``torch.cuda``.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._free: list[_Events] = []
        self._made = 0
        self._open: _Events | None = None
        self._pending: deque[_Events] = deque()
        self.total_ns = 0  # time of the measured iterations
        self.iterations = 0  # number of measured iterations
        self.own_ns = 0  # own time of the iterations with a sync point
        self.own_iterations = 0  # number of iterations with a sync point

    def start(self) -> None:
        """Mark the start of an iteration on the device."""
        if not self._can_record():
            return
        self._open = self._open or self._events()
        if self._open is not None:
            self._open.has_sync = False
            self._open.start.record()

    def sync_point(self) -> None:
        """Mark the first point in an iteration at which this rank waits for other ranks."""
        if self._open is not None and not self._open.has_sync and self._can_record():
            self._open.sync = self._open.sync or self._cuda.Event(enable_timing=True)
            self._open.sync.record()
            self._open.has_sync = True

    def end(self) -> None:
        """Mark the end of an iteration on the device; read the events of iterations that the device has completed."""
        if not self._can_record():
            self._drop()
            return
        while self._pending and self._pending[0].end.query():
            events = self._pending.popleft()
            self.total_ns += round(events.start.elapsed_time(events.end) * 1e6)
            self.iterations += 1
            if events.has_sync:
                self.own_ns += round(events.start.elapsed_time(events.sync) * 1e6)
                self.own_iterations += 1
            self._free.append(events)
        if self._open is not None:
            self._open.end.record()
            self._pending.append(self._open)
            self._open = None

    def _can_record(self) -> bool:
        # During a capture, the event would become a part of the graph, and a query would end the capture.
        return bool(self._cuda.is_initialized()) and not self._cuda.is_current_stream_capturing()

    def _events(self) -> _Events | None:
        if self._free:
            return self._free.pop()
        if self._made >= MAX_PENDING:
            return None
        self._made += 1
        return _Events(self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True))

    def _drop(self) -> None:
        if self._open is not None:
            self._free.append(self._open)
            self._open = None
