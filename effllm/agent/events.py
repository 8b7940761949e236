"""The events of one agent: limited in number, written to its log file, and stored until they are sent."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from pathlib import Path

from msgspec.structs import replace

from effllm.agent.log import LogFile
from effllm.records.event_limit import EventLimit
from effllm.records.rank import MAX_EVENT_COUNT, MAX_TEXT, Event

MAX_UNSENT = 200


class AgentEvents:
    """The events of an agent and its devices; the threads of samplers also add events.

    Args:
        rank: the rank; its number is in the name of the log file, which has a line for each event.
    """

    def __init__(self, rank: int) -> None:
        self._log = LogFile(rank)
        self._limit = EventLimit()
        self._lock = threading.Lock()
        self._unsent: deque[Event] = deque()

    def report(self, kind: str, text: str) -> None:
        self.add(Event(time.time(), kind, text))

    def add(self, event: Event) -> None:
        """Add an event; if there are many equal events, most of them are only counted."""
        event = replace(event, text=event.text[:MAX_TEXT], count=min(event.count, MAX_EVENT_COUNT))
        with self._lock:
            self._roll(time.monotonic())
            if self._limit.admits(event):
                self._put(event)

    def unsent(self) -> Event | None:
        """Return the oldest unsent event, or ``None`` if all are sent."""
        with self._lock:
            self._roll(time.monotonic())
            return self._unsent[0] if self._unsent else None

    def sent(self) -> None:
        """Remove the oldest event after it was sent."""
        with self._lock:
            self._unsent.popleft()

    def end(self) -> None:
        """Add the lines that count omitted events, because the job ends."""
        with self._lock:
            self._roll(math.inf, 2 * MAX_UNSENT)

    def attach(self, folder: Path) -> None:
        """Write the log file in ``folder``; the first event creates the file."""
        self._log.attach(folder)

    def close(self) -> None:
        """Close the log file; wait at most half a second for the disk."""
        self._log.close()

    def _roll(self, now_s: float, max_unsent: int = MAX_UNSENT) -> None:
        for event in self._limit.roll(now_s):
            self._put(event, max_unsent)

    def _put(self, event: Event, max_unsent: int = MAX_UNSENT) -> None:
        self._log.write(event)
        if len(self._unsent) >= max_unsent:
            self._limit.leave_out(self._unsent.popleft())
        self._unsent.append(event)
