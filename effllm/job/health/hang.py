"""Detects stalls of the job from heartbeats and reports. No I/O.

Heartbeats and reports contain the position of a rank.  Only heartbeats are evidence of a stall: a rank whose agent
sends no heartbeats is reported as lost, not as stalled.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from effllm.records import ring
from effllm.records.rank import RankReport
from effllm.records.wire import Heartbeat, Hello

STALL_S = 30.0  # timeout of progress: this time or ITERATIONS median iterations, the longer of the two
ITERATIONS = 3  # multiple of the median iteration
#: Timeout of a marked phase: 20 times `STALL_S` (10 minutes) or 10 times the longest such phase, the longer of the two.
PHASE_STALLS, PHASE_TIMES = 20, 10
#: Timeout of the first iteration: 60 times `STALL_S` (30 minutes); until then ranks load, compile and connect.
STARTUP_STALLS = 60
BEATS = 6  # heartbeats of an agent per STALL_S
CHECKS = 15  # checks for a stall per STALL_S
NUM_WINDOWS, NUM_DURATIONS = 16, 33  # newest ones, of which the median iteration is taken
IDLE, BUSY = 0.1, 0.5  # an idle rank has a lower utilization, a busy rank a higher one

STARTUP, BETWEEN, STEP = ring.STATE_NAMES[ring.STARTUP], ring.STATE_NAMES[ring.BETWEEN], ring.STATE_NAMES[ring.STEP]
FINISHED = ring.STATE_NAMES[ring.FINISHED]
#: State of a serving process between requests, in place of "between iterations"; this state has no timeout.
WAITING = "waiting for requests"
STOPPED = "T"  # state of a process that a signal or a debugger has stopped


class RankPosition(Struct):
    """The position of a rank's loop, from its agent's heartbeats."""

    role: str = ""  # iterations of different roles take different times
    last_iteration: int | None = None  # ordinal of the loop's last iteration, if known
    ordinal: int = 0
    state: str = ""  # empty before the first heartbeat
    process: str = ""  # state of the trainer's process in /proc
    since_s: float = 0.0  # time at which the rank reached this position
    seen_s: float = 0.0  # time of the last heartbeat with this position
    beat_s: float = 0.0  # seconds at this position by the agent's clock, in the last heartbeat
    joined_s: float = 0.0  # time of the HELLO
    utilization: float | None = None
    power_w: float | None = None

    @property
    def completed(self) -> int:
        """Number of completed iterations."""
        return self.ordinal - 1 if self.state == STEP else self.ordinal


class Stall(NamedTuple):
    """Ranks that make no progress, the furthest behind first."""

    groups: Sequence[tuple[RankPosition, Sequence[int]]]  # ranks with the same position are a group
    unmoved_s: float  # seconds without progress so far


class Resumed(NamedTuple):
    """End of a stall."""

    unmoved_s: float  # duration of the stall


HangVerdict = Stall | Resumed


class Hang:
    """Detects stalls from the positions of a job's ranks.

    Args:
        stall_s: seconds without progress before a stall is reported; long iterations have a longer timeout.
        earlier_iteration_s: seconds per iteration in an earlier attempt; 0 if unknown.
    """

    def __init__(self, stall_s: float = STALL_S, earlier_iteration_s: float = 0.0) -> None:
        self._stall_s = stall_s
        self._earlier_iteration_s = earlier_iteration_s
        self.ranks: dict[int, RankPosition] = {}
        self._windows: dict[str, deque[tuple[int, float]]] = {}  # by role: last windows, with seconds per iteration
        self._durations_s: dict[str, deque[float]] = {}  # by role: seconds per iteration before the first window
        self._max_phase_s: dict[str, float] = {}  # by phase: its longest duration in a window
        self._moved_s = 0.0  # time of the last progress of any rank
        self._next_check_s = 0.0
        self.since_s: float | None = None  # start of the job's current stall
        self._resumed: list[Resumed] = []  # ends of stalls, for the next `check`
        self.stalled_s = 0.0  # total seconds of ended stalls

    # --- inputs ---

    def join(self, message: Hello, is_new: bool, now_s: float) -> None:
        """Add a rank after its HELLO; ``is_new`` means that it has a new agent."""
        rank, total = message.rank, message.total_iterations
        if is_new or rank not in self.ranks:
            self.ranks[rank] = RankPosition(since_s=now_s, seen_s=now_s, joined_s=now_s)
        position = self.ranks[rank]
        position.role, position.last_iteration = message.role, total - message.offset if total else None

    def leave(self, rank: int, completed: bool, now_s: float) -> None:
        """Remove a rank after its BYE; only completion of the rank counts as progress."""
        if rank in self.ranks:
            if completed:
                self._end_stall(now_s)
            del self.ranks[rank]

    def heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        position = self.ranks.get(beat.rank)
        if position is None:
            return
        if (beat.ordinal, beat.state) == (position.ordinal, position.state) and beat.since_s >= position.beat_s:
            # A heartbeat may be late, never early: so the earliest time is right.
            position.since_s = min(position.since_s, now_s - beat.since_s)
        else:
            since_s = now_s - beat.since_s  # this may be earlier than the HELLO
            since_s = max(since_s, position.since_s) if position.state else since_s  # but not than the last position
            self._set_position(position, beat.ordinal, beat.state, since_s)
        position.seen_s, position.beat_s, position.process = now_s, beat.since_s, beat.process
        position.utilization, position.power_w = beat.utilization, beat.power_w

    def row(self, row: RankReport, now_s: float) -> None:
        position = self.ranks.get(row.rank)
        if position is None:
            return
        if row.phases_s:
            for name, seconds in row.phases_s.items():
                self._max_phase_s[name] = max(self._max_phase_s.get(name, 0.0), seconds)
        last = row.iteration_last
        if last >= row.iteration_first:
            windows = self._windows.get(position.role)
            if windows is None:  # `setdefault` would create a deque for each of ten thousand reports
                windows = self._windows[position.role] = deque(maxlen=NUM_WINDOWS)
            if not windows or windows[-1][0] < row.window:
                windows.append((row.window, row.time_s / row.iterations))
        if last > position.ordinal - (position.state == STEP):  # `completed`, without a call for each of 10,000 reports
            # This was the position at the end of the window; no heartbeat has confirmed it.
            self._set_position(position, last, BETWEEN, now_s)
            position.beat_s = 0.0

    def _set_position(self, position: RankPosition, ordinal: int, state: str, since_s: float) -> None:
        """Record that a rank has reached another position, which ends a stall, and the duration of its iterations."""
        earlier_completed, had_position, earlier_s = position.completed, bool(position.state), position.since_s
        position.ordinal, position.state, position.since_s = ordinal, state, since_s
        newly_completed = position.completed - earlier_completed
        if newly_completed > 0 and had_position:
            if earlier_completed == 0:
                self._max_phase_s[STARTUP] = max(self._max_phase_s.get(STARTUP, 0.0), since_s - position.joined_s)
            if position.role not in self._windows:
                # The first iteration is the longest; during the second iteration no other duration is known.
                durations_s = self._durations_s.setdefault(position.role, deque(maxlen=NUM_DURATIONS))
                durations_s.append((since_s - earlier_s) / newly_completed)
        if state != FINISHED:  # the end of a rank's loop ends no stall of other ranks
            if since_s > self._moved_s:
                self._moved_s = since_s
            self._end_stall(since_s)

    # --- outputs ---

    def take_verdicts(self, now_s: float, lost: Collection[int]) -> list[HangVerdict]:
        """Return the new verdicts: the beginning and the end of a stall.

        The state of lost ranks, which have no recent heartbeat, is unknown.
        """
        verdicts: list[HangVerdict] = list(self._resumed)
        self._resumed = []
        if now_s - self._moved_s < self._stall_s or now_s < self._next_check_s:
            return verdicts
        self._next_check_s = now_s + self._stall_s / CHECKS
        alive = {rank: position for rank, position in self.ranks.items() if rank not in lost}
        active = {rank: position for rank, position in alive.items() if position.state not in ("", FINISHED)}
        if not active:
            return verdicts
        timeouts_s: dict[tuple[str, ...], float | None] = {}  # by `_timeout_key`; 10,000 ranks have few keys
        if self.since_s is None and all(self._has_stalled(position, timeouts_s) for position in active.values()):
            self.since_s = max(position.since_s for position in active.values())
            verdicts.append(Stall(_by_position(active), now_s - self.since_s))
        return verdicts

    def total_s(self, now_s: float) -> float:
        """Return the seconds of all stalls of the job, including the current stall."""
        return self.stalled_s + (now_s - self.since_s if self.since_s is not None else 0.0)

    # --- rules ---

    def _has_stalled(self, position: RankPosition, timeouts_s: dict[tuple[str, ...], float | None]) -> bool:
        """Whether a rank was at its position for the timeout, up to its last heartbeat; ``timeouts_s`` is a cache."""
        key = self._timeout_key(position)
        if key not in timeouts_s:
            timeouts_s[key] = self._timeout_s(key)
        timeout_s = timeouts_s[key]
        return timeout_s is not None and position.seen_s - position.since_s >= timeout_s

    def _timeout_key(self, position: RankPosition) -> tuple[str, ...]:
        """Return the key of a rank's timeout: role and state; some states share the timeout of another state."""
        if position.state == WAITING and position.process != STOPPED:
            return (position.role, WAITING)
        if position.process == STOPPED:  # in any state
            return (position.role, STEP)
        if position.state == STARTUP or position.completed < 1:
            return (position.role, STARTUP)
        is_last = position.last_iteration is not None and position.ordinal >= position.last_iteration
        if position.state == BETWEEN and is_last:
            return (position.role, FINISHED)  # the rank may be saving the model
        return (position.role, position.state)

    def _timeout_s(self, key: tuple[str, ...]) -> float | None:
        """Return the timeout of a state in seconds; ``None`` without a timeout."""
        role, state = key
        if state == WAITING:
            return None
        if state in (STEP, BETWEEN):
            return max(self._stall_s, ITERATIONS * self._iteration_s(role))
        min_s = (STARTUP_STALLS if state == STARTUP else PHASE_STALLS) * self._stall_s
        return max(min_s, PHASE_TIMES * self._max_phase_s.get(state, 0.0))

    def _iteration_s(self, role: str) -> float:
        if windows := self._windows.get(role):
            return statistics.median(seconds for _, seconds in windows)
        durations_s = self._durations_s.get(role)
        return statistics.median(durations_s) if durations_s else self._earlier_iteration_s

    def _end_stall(self, moved_s: float) -> None:
        """End the current stall, if there is one, at the time of the first progress."""
        if self.since_s is not None:
            unmoved_s = max(moved_s - self.since_s, 0.0)
            self.stalled_s += unmoved_s
            self.since_s = None
            self._resumed.append(Resumed(unmoved_s))


def _by_position(active: Mapping[int, RankPosition]) -> list[tuple[RankPosition, list[int]]]:
    """Return ranks by position, the furthest behind first; if all positions are equal, a minority of idle ranks."""
    groups: dict[tuple[int, bool, bool, str], list[int]] = {}
    for rank, position in active.items():
        # The lower, the further behind: in the same iteration, the other ranks wait for stopped ranks.
        key = position.completed, position.state == STEP, position.process != STOPPED, position.state
        groups.setdefault(key, []).append(rank)
    if len(groups) == 1:
        measured = {rank: loop.utilization for rank, loop in active.items() if loop.utilization is not None}
        idle = [rank for rank, utilization in measured.items() if utilization < IDLE]
        busy = [rank for rank, utilization in measured.items() if utilization > BUSY]
        if idle and len(idle) < len(busy) and len(idle) + len(busy) == len(active):
            return [(active[idle[0]], sorted(idle)), (active[busy[0]], sorted(busy))]
    order = sorted(groups, key=lambda key: (*key[:3], len(groups[key])))
    return [(active[groups[key][0]], sorted(groups[key])) for key in order]
