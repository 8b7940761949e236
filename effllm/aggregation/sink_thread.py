"""A thread per sink, so that one that stalls or raises holds up nobody else."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from effllm.sinks import Run, Sink, SinkUnavailable, open_sink


class SinkThread:
    """A sink in a thread of its own, behind a bounded queue: it may stall, raise or be slow alone."""

    def __init__(self, name: str, run: Run, report: Callable[[str], None], most: int = 256) -> None:
        self.name = name
        self._run = run
        self._report = report
        self._work: queue.Queue[tuple[int, Callable[[Sink], None]] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._loop, name=f"sink-{name}", daemon=True)
        self.opened = threading.Event()  # or not to be opened
        self._told: set[str] = set()
        self._dropped = self._failed = self._at_work = 0  # windows

    def start(self) -> None:
        """Open the sink, in its thread."""
        self._thread.start()

    def put(self, work: Callable[[Sink], None], windows: int = 0) -> None:
        """Queue work that writes so many windows; where the queue is full it is dropped and they are counted."""
        try:
            self._work.put_nowait((windows, work))
        except queue.Full:
            self._dropped += windows
            self._tell(f"sink {self.name} is too slow: reports are left out")

    def stop(self, last: Callable[[Sink], None]) -> None:
        """Queue one last piece of work and the end; in a full queue the oldest make room."""
        for item in ((0, last), None):
            while True:
                try:
                    self._work.put_nowait(item)
                    break
                except queue.Full:
                    with contextlib.suppress(queue.Empty):
                        self._dropped += self._windows(self._work.get_nowait())

    def join(self, timeout_s: float) -> bool:
        """Wait for the end that `stop` has queued, for so long; return whether it came."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    @property
    def left_out(self) -> int:
        """Number of windows that were dropped, or that the sink failed to write."""
        return self._dropped + self._failed

    @property
    def unfinished(self) -> int:
        """Number of windows that wait, or are being written."""
        return self._at_work + sum(map(self._windows, list(self._work.queue)))

    @staticmethod
    def _windows(item: tuple[int, Callable[[Sink], None]] | None) -> int:
        return item[0] if item else 0

    def _loop(self) -> None:
        sink = self._open()
        self.opened.set()
        while (item := self._work.get()) is not None:
            if sink is not None:
                self._at_work, work = item
                self._failed += 0 if self._do(sink, work) else self._at_work
                self._at_work = 0
        if sink is not None:
            self._do(sink, lambda opened: opened.close())

    def _open(self) -> Sink | None:
        try:
            return open_sink(self.name, self._run)
        except SinkUnavailable as error:
            self._tell(f"sink {self.name} is off: {error}")
        except Exception as error:  # noqa: BLE001 - as below
            self._tell(f"sink {self.name} failed to open: {type(error).__name__}: {error}")
        return None

    def _do(self, sink: Sink, work: Callable[[Sink], None]) -> bool:
        try:
            work(sink)
        except Exception as error:  # noqa: BLE001 - a sink is a plug-in: whatever it raises is its own trouble
            self._tell(f"sink {self.name} failed: {type(error).__name__}: {error}")
            return False
        return True

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 10:
            self._told.add(text)
            self._report(text)
