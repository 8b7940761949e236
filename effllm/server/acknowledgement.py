"""Acknowledges reports after a state of the aggregator with these reports was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from effllm.job.aggregator import Aggregator
from effllm.job.closed_windows import Closed
from effllm.job.pacing import Pace, is_large
from effllm.records.clock import Now

MAX_UNSAVED = 64  # limit of the states that wait for a write

Sequences = dict[int, int]  # rank -> last sequence of its reports in a state


class Acknowledgement:
    """Writes windows and states through the store, and acknowledges the reports in a state after it was written.

    This order makes a crash at any moment harmless.  First late reports are added to the sums, because a state cannot
    record that older reports of a rank are missing.  Then the closed windows are written, and after them the state.
    Agents send unacknowledged reports again.  The sequences in the state show which reports the state includes.

    Args:
        aggregator: the source of windows and states.
        history_size: number of unacknowledged reports that an agent can store.
        write: writes closed windows, oldest first.
        save: writes a state after all earlier windows, then calls `saved` with the given sequences; ``None`` without a
            store, so that reports are acknowledged at once.
        send: sends acknowledgements.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        history_size: int,
        write: Callable[[Sequence[Closed]], None],
        save: Callable[[bytes, Sequences], None] | None,
        send: Callable[[Sequences], None],
    ) -> None:
        self._aggregator = aggregator
        self._history_size = history_size
        self._write, self._save, self._send = write, save, send
        self._pace = Pace(history_size)
        self._unsaved: list[Sequences] = []  # sequences of states that are queued for writing, oldest first
        self._acknowledged: Sequences = {}

    def hand_out(self, now: Now) -> None:
        """Write the closed windows, and the state if it is due."""
        aggregator = self._aggregator
        has_closed, is_slow = self._put(aggregator.closed.take()), is_large(aggregator.ledger.world_size)
        if has_closed and (is_slow or len(self._unsaved) > 1):  # the newest values are sent before the acknowledgement
            self._send_values()
        if not self._pace.is_due(now.mono_s, aggregator.ledger.world_size, aggregator.presence.num_left > 0):
            return
        aggregator.settle(now)
        self._put(aggregator.closed.take())
        self._pace.kept(now.mono_s)
        self.save_state()

    def save_state(self) -> None:
        sequences = self._aggregator.open.safe()
        if self._save is None:
            self._acknowledge(sequences)
            return
        self._unsaved.append(sequences)
        self._relieve()
        self._save(self._aggregator.snapshot(sequences), sequences)

    def saved(self, sequences: Sequences) -> None:
        """Acknowledge the reports in a state that was written."""
        for i, one in enumerate(self._unsaved):
            if one is sequences:
                del self._unsaved[: i + 1]  # a later state includes all earlier states
                break
        self._acknowledge(sequences)

    def _put(self, closed: Sequence[Closed]) -> bool:
        if closed:
            self._write(closed)
            self._pace.closed(len(closed))
        return bool(closed)

    def _acknowledge(self, sequences: Sequences) -> None:
        self._acknowledged = sequences
        self._send(sequences)

    def _send_values(self) -> None:
        """Send the newest values, without a new acknowledgement, to the ranks whose loops show values."""
        shown = {0, self._aggregator.ledger.world_size - 1}
        self._send({rank: self._acknowledged.get(rank, 0) for rank in shown})

    def _relieve(self) -> None:
        """Acknowledge the reports in unwritten states if an agent's buffer is half full because of a stalled disk."""
        while len(self._unsaved) > 1:
            oldest, newest = self._unsaved[0], self._unsaved[-1]
            waiting = max((sequence - oldest.get(rank, 0) for rank, sequence in newest.items()), default=0)
            if waiting <= self._history_size // 2:
                break
            self.saved(oldest)
        if len(self._unsaved) > MAX_UNSAVED:
            del self._unsaved[1:-1:2]
