"""The events of one agent: limited in number, written to its log file, and kept until they are sent."""

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
    """The events of an agent and its devices; samplers' threads also add events.

    Args:
        rank: names the log file, in which each event becomes a line.
    """

    def __init__(self, rank: int) -> None:
        self._log = LogFile(rank)
        self._limit = EventLimit()
        self._lock = threading.Lock()
        self._unsent: deque[Event] = deque()

    def report(self, kind: str, text: str) -> None:
        """Add an event with the current time."""
        self.add(Event(time.time(), kind, text))

    def add(self, event: Event) -> None:
        """Add an event; in a storm most events are only counted."""
        event = replace(event, text=event.text[:MAX_TEXT], count=min(event.count, MAX_EVENT_COUNT))
        with self._lock:
            self._roll(time.monotonic())
            if self._limit.admits(event):
                self._put(event)

    def unsent(self) -> Event | None:
        """Return the oldest unsent event, or ``None``."""
        with self._lock:
            self._roll(time.monotonic())
            return self._unsent[0] if self._unsent else None

    def sent(self) -> None:
        """Remove the oldest event after it was sent."""
        with self._lock:
            self._unsent.popleft()

    def end(self) -> None:
        """Add the lines for events that were left out, because the job ends."""
        with self._lock:
            self._roll(math.inf, 2 * MAX_UNSENT)

    def attach(self, folder: Path) -> None:
        """Write the log file in ``folder``; it is made with the first event."""
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
