"""The agent's log: lines for the run folder and for the aggregator."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from effllm.config import state_folder
from effllm.event_limit import EventLimit
from effllm.runs import own_files
from effllm.schema import MAX_EVENT_COUNT, MOST_TEXT, Event

CLOSE_S = 0.5
MAX_UNSENT = 200


class Log:
    """The agent's log: kept until the run folder is known, then a file in it.

    The file is written by a thread: the agent samples and reports on while the disk stands still.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: deque[str] = deque(maxlen=200)
        self._path: Path | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._is_closed = False
        self._limit = EventLimit()
        self._lock = threading.Lock()  # samplers' threads log too
        self._unsent: deque[Event] = deque()

    def line(self, text: str, kind: str = "agent") -> None:
        """Take one line, for the file and for the aggregator."""
        self.event(Event(time.time(), kind, text))

    def event(self, event: Event) -> None:
        """Take an event, for the file and for the aggregator; in a storm most are only counted."""
        with self._lock:
            left_out = self._limit.roll(time.monotonic())
            event = replace(event, text=event.text[:MOST_TEXT], count=min(event.count, MAX_EVENT_COUNT))
            for one in [*left_out, event] if self._limit.admits(event) else left_out:
                self._put(one)
        self._flush()

    def unsent(self) -> Event | None:
        """Return the oldest event that is not sent yet, or ``None``."""
        with self._lock:
            for one in self._limit.roll(time.monotonic()):
                self._put(one)
            return self._unsent[0] if self._unsent else None

    def sent(self) -> None:
        """Note that the oldest event was sent."""
        with self._lock:
            self._unsent.popleft()

    def end(self) -> None:
        """Let the events that were left out so far be sent now: the job ends."""
        with self._lock:
            for one in self._limit.roll(math.inf):
                self._put(one, most=2 * MAX_UNSENT)
        self._flush()

    def _put(self, event: Event, most: int = MAX_UNSENT) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(event.time_s))
        often = f" ({event.count} events)" if event.count > 1 else ""
        self._lines.append(f"{stamp}Z rank {self._rank}: {event.text}{often}\n")
        if len(self._unsent) >= most:
            self._limit.leave_out(self._unsent.popleft())
        self._unsent.append(event)

    def attach(self, folder: Path) -> None:
        """Write to a file in ``folder`` from now on; it is made with the first line."""
        self._path = self._path or folder / f"agent-{self._rank}.log"
        self._flush()

    def close(self) -> None:
        """Leave what nobody has seen in the user's state folder; wait half a second for a disk at most."""
        if self._path is None:
            self.attach(state_folder() / f"pid-{os.getpid()}")
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _flush(self) -> None:
        if self._path is None or not self._lines or self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, args=(self._path,), name="log", daemon=True)
            self._thread.start()
        self._wake.set()

    def _write(self, path: Path) -> None:
        file, is_last = -1, False
        while not is_last:
            self._wake.wait()
            self._wake.clear()
            is_last = self._is_closed
            with contextlib.suppress(OSError):  # a full disk, another host's folder: the aggregator has the lines
                if file < 0 and self._lines:
                    own_files.make_folder(path.parent)
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                while self._lines:
                    os.write(file, self._lines[0].encode())
                    self._lines.popleft()
        if file >= 0:
            os.close(file)
