"""A thread for each sink and for the store, so that a stall or an error in one thread does not block other threads."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from effllm.sinks import SinkUnavailable, WriteFailed
from effllm.store.run_folder import StoreUnavailable

MAX_WARNINGS = 10
MAX_QUEUED = 256


class Closeable(Protocol):
    """The target of a writer."""

    def close(self) -> None:
        """Release the resources of the target."""


Target = TypeVar("Target", bound=Closeable)


class Writer(Generic[Target]):
    """Writes to a sink or to the store in its own thread, with a bounded queue.

    Args:
        name: name in warnings, such as "sink console".
        open_target: returns the sink or the store; called in the thread.
        warn: receives warnings, each text once; called from the thread of the writer or of the caller.
        max_queued: limit of queued items.
    """

    def __init__(
        self, name: str, open_target: Callable[[], Target], warn: Callable[[str], None], max_queued: int = MAX_QUEUED
    ) -> None:
        self._name = name
        self._open_target = open_target
        self._warn = warn
        self._work: queue.Queue[tuple[int, Callable[[Target], None]] | None] = queue.Queue(max_queued)
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.opened = threading.Event()  # also set if opening has failed
        self._warnings: set[str] = set()
        self._dropped = self._failed = self._at_work = 0  # numbers of windows

    def start(self) -> None:
        """Start the thread, which first opens the target."""
        self._thread.start()

    def put(self, work: Callable[[Target], None], windows: int = 0) -> None:
        """Queue work that writes this number of windows; if the queue is full, drop the work and count its windows."""
        try:
            self._work.put_nowait((windows, work))
        except queue.Full:
            self._dropped += windows
            self._warn_once(f"{self._name} is too slow: reports are dropped")

    def stop(self, last: Callable[[Target], None] = lambda _: None) -> None:
        """Queue the last work and the end; if the queue is full, drop its oldest work."""
        for item in ((0, last), None):
            while True:
                try:
                    self._work.put_nowait(item)
                    break
                except queue.Full:
                    with contextlib.suppress(queue.Empty):
                        self._dropped += self._windows(self._work.get_nowait())

    def join(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` seconds for the end of the thread after `stop`; return whether it has ended."""
        self._thread.join(max(timeout_s, 0.0))
        return not self._thread.is_alive()

    @property
    def left_out(self) -> int:
        """Number of windows that were dropped or could not be written."""
        return self._dropped + self._failed

    @property
    def unfinished(self) -> int:
        """Number of windows that are queued or being written."""
        return self._at_work + sum(map(self._windows, list(self._work.queue)))

    @staticmethod
    def _windows(item: tuple[int, Callable[[Target], None]] | None) -> int:
        return item[0] if item else 0

    def _loop(self) -> None:
        target = self._open()
        self.opened.set()
        while (item := self._work.get()) is not None:
            if target is not None:
                self._at_work, work = item
                if not self._do(target, work):
                    self._failed += self._at_work
                self._at_work = 0
        if target is not None:
            self._do(target, lambda opened: opened.close())

    def _open(self) -> Target | None:
        try:
            return self._open_target()
        except (SinkUnavailable, StoreUnavailable) as error:
            self._warn_once(f"{self._name} is off: {error}")
        except Exception as error:  # noqa: BLE001 - as below
            self._warn_once(f"{self._name} failed to open: {type(error).__name__}: {error}")
        return None

    def _do(self, target: Target, work: Callable[[Target], None]) -> bool:
        try:
            work(target)
        except Exception as error:  # noqa: BLE001 - a sink is a plug-in: its errors must not end the thread
            self._failed += error.lost if isinstance(error, WriteFailed) else 0
            self._warn_once(f"{self._name} failed: {type(error).__name__}: {error}")
            return False
        return True

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings and len(self._warnings) < MAX_WARNINGS:
            self._warnings.add(text)
            self._warn(text)
