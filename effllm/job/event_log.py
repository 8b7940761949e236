"""The events of a job: all events are counted, and a limited number is written. No I/O."""

from __future__ import annotations

import math

from msgspec.structs import replace

from effllm.job.ledger import Ledger
from effllm.records.events import KINDS, EventLimit
from effllm.records.plain_text import one_line
from effllm.records.rank import Event

MAX_STATED = 1000  # number of stored keys per kind, for events that are recorded once
MAX_KINDS = 100  # events of further kinds are counted as OTHER
OTHER = "other"


class EventLog:
    """Counts events in the ledger, and stores the events for the file and the console until `take` is called.

    Args:
        ledger: the job's state.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._limit = EventLimit()
        self._events: list[Event] = []
        self._stated: dict[str, set[str]] = {}  # keys by kind: one kind cannot suppress events of other kinds

    def record(self, event: Event) -> None:
        """Count an event, and store it unless there are too many events."""
        counts, kind, rank = self._ledger.events, event.kind, event.rank
        if kind not in KINDS and kind not in counts and len(counts) >= MAX_KINDS:
            kind = OTHER
        counts[kind] = counts.get(kind, 0) + event.count
        if rank is not None and not 0 <= rank < self._ledger.world_size:
            rank = None  # a peer may send any number as its rank
        event = replace(event, kind=kind, text=one_line(event.text), rank=rank, attempt=self._ledger.attempt)
        if self._limit.admits(event):
            self._events.append(event)

    def record_once(self, event: Event, key: str = "") -> None:
        """Record an event only once per key; the default key is the event's text."""
        stated, key = self._stated.setdefault(event.kind, set()), key or event.text
        if key not in stated and len(stated) < MAX_STATED:
            stated.add(key)
            self.record(event)

    def roll(self, now_s: float = math.inf) -> None:
        """Add events with the counts of suppressed events, once a minute and at the end."""
        self._events += self._limit.roll(now_s)

    def take(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
