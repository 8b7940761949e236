"""The events of a run, and the state of its ranks after the events up to a moment."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from effllm.records.rank import Event

#: Maximum number of events that are kept for the screen; the oldest are dropped.
MAX_EVENTS = 20_000
#: Maximum number of changes of ranks that are kept; the older half then becomes one state, without its history.
MAX_CHANGES = 200_000
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
        self._count = 0  # number of all changes
        self._base, self._base_s = _Fold(), -math.inf  # state before the kept changes, and its time

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind not in NOT_SHOWN:
                self._shown.append(event)
            if event.kind in _OF_JOB or (event.kind in _OF_RANKS | _OF_DEVICES and event.rank is not None):
                self._changes.append(event)
                self._count += 1
        if len(self._changes) > MAX_CHANGES:
            old, self._changes = self._changes[: MAX_CHANGES // 2], self._changes[MAX_CHANGES // 2 :]
            self._base.add(old, math.inf)
            self._base_s = max(change.time_s for change in old)

    def newest(self, until_s: float, count: int) -> Sequence[Event]:
        """Return the last events up to a moment, newest first."""
        return list(islice((event for event in reversed(self._shown) if event.time_s <= until_s), count))

    def states(self, until_s: float) -> RankStates:
        """Return the states of the ranks at a moment."""
        key = self._count, until_s
        if key not in self._states:
            fold = copy.deepcopy(self._base) if until_s >= self._base_s else _Fold()
            fold.add(self._changes, until_s)
            self._states = {key: fold.states()}
        return self._states[key]


class _Fold:
    """The state of the ranks after changes."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._failed: dict[int, str] = {}
        self._errors: dict[int, str] = {}
        self._stall, self._loss_is_finite, self._attempt = "", True, 0

    def states(self) -> RankStates:
        return RankStates(frozenset(self._lost), self._failed, self._errors, self._stall, self._loss_is_finite)

    def add(self, changes: Iterable[Event], until_s: float) -> None:
        """Apply the changes up to a moment."""
        for change in changes:
            if change.time_s <= until_s:
                self._apply(change)

    def _apply(self, change: Event) -> None:
        if change.attempt > self._attempt:
            self._attempt, self._stall = change.attempt, ""
            for of_attempt in (self._lost, self._failed, self._errors):
                of_attempt.clear()
        kind, rank = change.kind, -1 if change.rank is None else change.rank  # -1: of the job
        if kind == "rank_lost":
            self._lost.add(rank)
        elif kind in _OF_RANKS:
            self._lost.discard(rank)
            if kind == "left" and change.text and not change.text.endswith((f": {COMPLETED}", ": ended")):
                self._failed[rank] = change.text.removeprefix(f"rank {rank} ")
        elif kind in _OF_DEVICES:
            self._errors[rank] = f"{kind}: {change.text}"
        elif kind.startswith("loss"):
            self._loss_is_finite = kind == "loss_finite"
        else:
            self._stall = change.text if kind == "stalled" else ""
