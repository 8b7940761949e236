"""Rate limit for lines of events. No I/O.

Every event is counted by its kind. If there are too many events, only the first lines of a minute are written. The
other events become one line with their number, so the counts of all lines add up to the number of events.
"""

from __future__ import annotations

import math

from effllm.records.rank import Event

#: Limit of the lines of one kind and rank in a minute.
MAX_PER_MINUTE = 100
MINUTE_S = 60.0
#: Limit of the lines of one kind over all ranks: its first value, and its growth in each minute.
MAX_OF_KIND, MORE_OF_KIND = 20_000, 300
#: A longer text counts as several lines of this many bytes.
LINE_BYTES = 500


class EventLimit:
    """Selects the events that become lines: at most `MAX_PER_MINUTE` of one kind and rank in a minute."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._lines: dict[tuple[str, int | None], int] = {}  # in this minute
        self._left: dict[str, int] = {}  # number of lines that a kind may still have
        self._left_out: dict[tuple[str, int | None], Event] = {}  # the total of the events without a line

    def admits(self, event: Event) -> bool:
        """Return whether an event becomes a line; count an event without a line."""
        key, lines = (event.kind, event.rank), 1 + len(event.text) // LINE_BYTES
        used, left = self._lines.get(key, 0), self._left.get(event.kind, MAX_OF_KIND)
        if used + 1 > MAX_PER_MINUTE or left < 1:
            self.leave_out(event, of_all_ranks=left < 1)
            return False
        self._lines[key] = used + lines
        self._left[event.kind] = left - lines
        return True

    def leave_out(self, event: Event, *, of_all_ranks: bool = False) -> None:
        key = (event.kind, None if of_all_ranks else event.rank)
        before = self._left_out.get(key)
        count = event.count + (before.count if before is not None else 0)
        text = f"too many events of kind {event.kind}: these events were only counted"
        if key[1] is not None:
            text = f"rank {key[1]}: {text}"
        self._left_out[key] = Event(event.time_s, event.kind, text, key[1], attempt=event.attempt, count=count)

    def roll(self, now_s: float) -> list[Event]:
        """Return, once a minute, one line for each kind and rank that has events without a line.

        Args:
            now_s: monotonic time; ``math.inf`` at the end.
        """
        if self._since_s is None:
            self._since_s = now_s if math.isfinite(now_s) else 0.0
        if now_s - self._since_s < MINUTE_S:
            return []
        self._since_s = now_s if math.isfinite(now_s) else self._since_s
        left_out, self._left_out, self._lines = list(self._left_out.values()), {}, {}
        self._left = {kind: min(left + MORE_OF_KIND, MAX_OF_KIND) for kind, left in self._left.items()}
        return left_out
