"""A thread per sink, so that one that stalls or raises holds up nobody else."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from effllm.sinks import Run, Sink, SinkUnavailable, open_sink


class SinkThread:
    """A sink in a thread of its own, behind a bounded queue: it may stall, raise or be slow alone."""

    def __init__(self, name: str, run: Run, report: Callable[[str], None], most: int = 256) -> None:
        self.name = name
        self.dropped = 0
        self._run = run
        self._report = report
        self._work: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(most)
        self._thread = threading.Thread(target=self._loop, name=f"sink-{name}", daemon=True)
        self._told: set[str] = set()

    def start(self) -> None:
        """Open the sink, in its thread."""
        self._thread.start()

    def put(self, work: Callable[[Sink], None]) -> None:
        """Queue work; where the queue is full it is dropped and counted."""
        try:
            self._work.put_nowait(work)
        except queue.Full:
            self.dropped += 1
            self._tell(f"sink {self.name} is too slow: reports are left out")

    def stop(self, last: Callable[[Sink], None], timeout_s: float) -> None:
        """Let the queued work and one last piece of it end, for so long."""
        deadline_s = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):
            self._work.put(last, timeout=timeout_s)
            self._work.put(None, timeout=max(deadline_s - time.monotonic(), 0.0))
        self._thread.join(max(deadline_s - time.monotonic(), 0.0))

    def _loop(self) -> None:
        sink = self._open()
        while (work := self._work.get()) is not None:
            if sink is not None:
                self._do(sink, work)
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

    def _do(self, sink: Sink, work: Callable[[Sink], None]) -> None:
        try:
            work(sink)
        except Exception as error:  # noqa: BLE001 - a sink is a plug-in: whatever it raises is its own trouble
            self._tell(f"sink {self.name} failed: {type(error).__name__}: {error}")

    def _tell(self, text: str) -> None:
        if text not in self._told and len(self._told) < 10:
            self._told.add(text)
            self._report(text)
