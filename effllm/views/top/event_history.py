"""The events of a run, and the state of its ranks after the events up to a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from effllm.records.rank import Event

#: Maximum number of events that are kept for the screen; the oldest are dropped.
MAX_EVENTS = 20_000
#: Events of single ranks that a job of many ranks has in large numbers: they change states, but are not shown.
NOT_SHOWN = frozenset({"joined", "left", "late", "missing"})
_OF_RANKS = frozenset({"joined", "left", "rank_lost", "back"})
_OF_DEVICES = frozenset({"xid", "ecc", "stale"})
_OF_JOB = frozenset({"stalled", "resumed", "restarted", "loss_not_finite", "loss_finite"})
COMPLETED = "completed"


class RankStates(NamedTuple):
    """Ranks with a problem, by the events up to a moment."""

    lost: frozenset[int] = frozenset()
    failed: Mapping[int, str] = {}  # ranks that left with a status other than completed
    device_errors: Mapping[int, str] = {}
    stall: str = ""  # text of the event, while no rank, or not every rank, makes progress
    loss_is_finite: bool = True


class EventHistory:
    """The events of a run in the order of their file."""

    def __init__(self) -> None:
        self._shown: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._changes: list[Event] = []  # that change the state of a rank or of the job
        self._states: dict[tuple[int, float], RankStates] = {}

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind not in NOT_SHOWN:
                self._shown.append(event)
            if event.kind in _OF_JOB or (event.kind in _OF_RANKS | _OF_DEVICES and event.rank is not None):
                self._changes.append(event)

    def newest(self, until_s: float, count: int) -> Sequence[Event]:
        """Return the last events up to a moment, newest first."""
        return list(islice((event for event in reversed(self._shown) if event.time_s <= until_s), count))

    def states(self, until_s: float) -> RankStates:
        """Return the states of the ranks at a moment."""
        key = len(self._changes), until_s
        if key not in self._states:
            self._states = {key: _states_after(change for change in self._changes if change.time_s <= until_s)}
        return self._states[key]


def _states_after(changes: Iterable[Event]) -> RankStates:
    lost: set[int] = set()
    failed: dict[int, str] = {}
    errors: dict[int, str] = {}
    stall, loss_is_finite, attempt = "", True, 0
    for change in changes:
        if change.attempt > attempt:
            attempt, stall = change.attempt, ""
            for of_attempt in (lost, failed, errors):
                of_attempt.clear()
        kind, rank = change.kind, -1 if change.rank is None else change.rank  # -1: of the job
        if kind == "rank_lost":
            lost.add(rank)
        elif kind in _OF_RANKS:
            lost.discard(rank)
            if kind == "left" and change.text and not change.text.endswith((f": {COMPLETED}", ": ended")):
                failed[rank] = change.text.removeprefix(f"rank {rank} ")
        elif kind in _OF_DEVICES:
            errors[rank] = f"{kind}: {change.text}"
        elif kind.startswith("loss"):
            loss_is_finite = kind == "loss_finite"
        else:
            stall = change.text if kind == "stalled" else ""
    return RankStates(frozenset(lost), failed, errors, stall, loss_is_finite)
