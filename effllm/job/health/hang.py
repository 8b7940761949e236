"""Detect stalls of the job and hangs of ranks, with each rank's position: heartbeats and reports in, verdicts out.

The position of a rank is the one in its last heartbeat.  Only heartbeats are evidence of a stall: a rank whose agent
sends none is reported as lost, not as stalled.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from effllm.records import ring
from effllm.records.rank import RankReport
from effllm.records.wire import Heartbeat

STALL_S = 30.0
ITERATIONS = 3  # ... or this many median iterations, the longer
#: A marked phase may take this many times the stall's seconds (10 minutes), or 10 times the longest seen, the longer.
PHASE_STALLS, PHASE_TIMES = 20, 10
#: Start-up is all until the first iteration has ended: it loads, compiles and meets the others (30 minutes).
STARTUP_STALLS = 60
BEATS = 6  # heartbeats of an agent in the seconds of a stall ...
CHECKS = 15  # ... and checks for a stall
MAX_BEAT_DELAY_S = 5.0  # beyond it, of two ranks the one that was seen later has moved later
SUSPENDED_S = 10.0  # the aggregator checks twice a second, unless it was stopped
REPORT_AGAIN_S = (300.0, 1800.0)
REPORT_EVERY_S = 7200.0

STARTUP, BETWEEN, STEP = ring.STATE_NAMES[ring.STARTUP], ring.STATE_NAMES[ring.BETWEEN], ring.STATE_NAMES[ring.STEP]
FINISHED = ring.STATE_NAMES[ring.FINISHED]
#: State of a process that serves, instead of "between iterations": when the next request comes is unknown.
WAITING = "waiting for requests"
STOPPED = "T"  # state of a process that a signal or a debugger has stopped


class RankPosition(Struct):
    """The position of a rank's loop, from its agent's heartbeats."""

    role: str = ""
    last_iteration: int | None = None  # ordinal after which its loop is over, where that is known
    ordinal: int = 0
    state: str = ""  # empty: no heartbeat yet
    process: str = ""  # state of the trainer's process, as /proc has it
    since_s: float = 0.0  # when it came to this position ...
    seen_s: float = 0.0  # ... and the time of the last heartbeat with it
    beat_s: float = 0.0  # time at this position, by the agent's own clock
    joined_s: float = 0.0
    ended_s: float = 0.0  # it has ended an iteration since then
    utilization: float | None = None
    power_w: float | None = None

    @property
    def completed(self) -> int:
        return self.ordinal - 1 if self.state == STEP else self.ordinal

    @property
    def place(self) -> tuple[int, bool, str, bool]:
        """What a group of ranks has in common: iterations behind, whether in the next, which state, whether stopped."""
        return (self.completed, self.state == STEP, self.state, self.process == STOPPED)

    @property
    def unmoved_s(self) -> float:
        """For how long it is known to have made no progress."""
        return self.seen_s - self.since_s


class Stall(NamedTuple):
    """Ranks that make no progress, the furthest behind first."""

    groups: Sequence[tuple[RankPosition, Sequence[int]]]  # of ranks at one place, one of them for all
    unmoved_s: float
    is_partial: bool = False  # others go on


class Resumed(NamedTuple):
    """The loop goes on."""

    unmoved_s: float
    rank: int | None = None  # where a single rank had stalled


Verdict = Stall | Resumed


class Hang:
    """Detects stalls from the positions of a job's ranks.

    Args:
        stall_s: seconds without progress that make a stall, unless iterations are longer.
        earlier_s: seconds of an iteration in an earlier attempt; 0 where that is not known.
    """

    def __init__(self, stall_s: float = STALL_S, earlier_s: float = 0.0) -> None:
        self._stall_s = stall_s
        self._earlier_s = earlier_s
        self.ranks: dict[int, RankPosition] = {}
        self._windows: dict[str, deque[tuple[int, float]]] = {}  # by role: seconds of an iteration, one of a window
        self._durations_s: dict[str, deque[float]] = {}  # by role: of iterations between beats, until there are windows
        self._max_phase_s: dict[str, float] = {}  # by phase
        self._two_more_s = 0.0  # since when some rank has ended two iterations more
        self._moved_s = 0.0  # last progress of any rank
        self._next_check_s = self._next_alone_s = 0.0
        self._checked_s = 0.0
        self._since_s: float | None = None  # beginning of the stall of the job
        self._report_s = 0.0  # when to report it again
        self._alone: dict[int, tuple[float, float]] = {}  # stalled while others go on: since when, when to report
        self._resumed: list[Resumed] = []
        self.stalled_s = 0.0  # of the stalls that are over

    # --- what comes in ---

    def join(self, rank: int, role: str, last_iteration: int | None, is_new: bool, now_s: float) -> None:
        """Take a rank's HELLO.

        Args:
            rank: the rank.
            role: its role; iterations of different roles take different times.
            last_iteration: ordinal after which its loop is over, where that is known.
            is_new: whether the agent is another one than before.
            now_s: the time.
        """
        if is_new or rank not in self.ranks:
            self.ranks[rank] = RankPosition(since_s=now_s, seen_s=now_s, joined_s=now_s, ended_s=now_s)
        position = self.ranks[rank]
        position.role, position.last_iteration = role, last_iteration

    def leave(self, rank: int, completed: bool, now_s: float) -> None:
        """Take a rank's BYE: a rank that completed has made progress, one that was killed has not."""
        if rank in self.ranks:
            if completed:
                self._move(rank, now_s)
            self._alone.pop(rank, None)
            del self.ranks[rank]

    def heartbeat(self, beat: Heartbeat, now_s: float) -> None:
        position = self.ranks.get(beat.rank)
        if position is None:
            return
        if (beat.ordinal, beat.state) == (position.ordinal, position.state) and beat.since_s >= position.beat_s:
            # A heartbeat may be late, never early.
            position.since_s = min(position.since_s, now_s - beat.since_s)
        else:
            since_s = now_s - beat.since_s  # possibly before it joined
            since_s = max(since_s, position.since_s) if position.state else since_s
            self._place(beat.rank, position, beat.ordinal, beat.state, since_s)
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
            of_role = self._windows.get(position.role)
            if of_role is None:  # a deque is not made for each of ten thousand rows
                of_role = self._windows[position.role] = deque(maxlen=16)
            if not of_role or of_role[-1][0] < row.window:
                of_role.append((row.window, row.time_s / row.iterations))
        if last > position.completed:
            # The position at the end of the window, some time ago: no heartbeat has confirmed it.
            self._place(row.rank, position, last, BETWEEN, now_s)
            position.beat_s = 0.0

    def _place(self, rank: int, position: RankPosition, ordinal: int, state: str, since_s: float) -> None:
        before, had_beaten, before_s = position.completed, bool(position.state), position.since_s
        position.ordinal, position.state, position.since_s = ordinal, state, since_s
        ended = position.completed - before
        if ended > 0 and had_beaten:
            if before == 0:
                self._max_phase_s[STARTUP] = max(self._max_phase_s.get(STARTUP, 0.0), since_s - position.joined_s)
            if position.role not in self._windows:
                # The first is longer than the others, and for the second it is all that is known.
                self._durations_s.setdefault(position.role, deque(maxlen=33)).append((since_s - before_s) / ended)
            # All of them after its last heartbeat.
            self._two_more_s = max(self._two_more_s, position.seen_s if ended > 1 else position.ended_s)
            position.ended_s = position.seen_s
        if state != FINISHED:
            if since_s > self._moved_s:
                self._moved_s = since_s
            if self._alone or self._since_s is not None:
                self._move(rank, since_s)

    # --- what goes out ---

    def check(self, now_s: float, lost: Collection[int]) -> list[Verdict]:
        """Return the verdicts that are due: the job or a single rank has stalled, or goes on.

        Args:
            now_s: the time.
            lost: ranks without a recent heartbeat; their state is unknown.
        """
        if now_s - self._checked_s > SUSPENDED_S:
            # The messages of the pause came all at once: their order in time is unknown.
            self._two_more_s = 0.0
            for one in self.ranks.values():
                one.ended_s = now_s
        self._checked_s = now_s
        verdicts: list[Verdict] = list(self._resumed)
        self._resumed = []
        may_have_stalled = now_s - self._moved_s >= self._stall_s and now_s >= self._next_check_s
        if not may_have_stalled and now_s < self._next_alone_s:
            return verdicts
        self._next_check_s, self._next_alone_s = now_s + self._stall_s / CHECKS, now_s + self._stall_s
        here = {rank: one for rank, one in self.ranks.items() if rank not in lost}
        active = {rank: one for rank, one in here.items() if one.state not in ("", FINISHED)}
        if not active:
            return verdicts
        limits: dict[tuple[str, ...], float | None] = {}  # 10,000 ranks have few of them
        stalled = {rank for rank, one in active.items() if self._has_stalled(one, limits)}
        if len(stalled) == len(active):
            self._alone = {}
            if self._since_s is None:
                self._since_s, self._report_s = max(one.since_s for one in active.values()), now_s
            if now_s >= self._report_s:
                unmoved_s = now_s - self._since_s
                self._report_s = self._since_s + _again_s(unmoved_s)
                verdicts.append(Stall(_groups(active), unmoved_s))
        elif self._since_s is None:
            alone = {
                rank: active[rank] for rank in stalled if active[rank].since_s < self._two_more_s - MAX_BEAT_DELAY_S
            }
            due = {rank: one for rank, one in alone.items() if now_s >= self._alone.get(rank, (0.0, 0.0))[1]}
            for rank, one in due.items():
                self._alone[rank] = (one.since_s, one.since_s + _again_s(now_s - one.since_s))
            if due:
                unmoved_s = max(now_s - one.since_s for one in due.values())
                others = {rank: one for rank, one in active.items() if rank not in alone}
                verdicts.append(Stall([*_groups(due), *_groups(others)], unmoved_s, is_partial=True))
        return verdicts

    @property
    def since_s(self) -> float | None:
        """Beginning of the job's stall; ``None`` where there is none."""
        return self._since_s

    def total_s(self, now_s: float) -> float:
        """Return the seconds of all stalls of the job: those that are over, and the present one."""
        return self.stalled_s + (now_s - self._since_s if self._since_s is not None else 0.0)

    # --- the rules ---

    def _has_stalled(self, one: RankPosition, limits: dict[tuple[str, ...], float | None]) -> bool:
        kind = self._kind(one)
        if kind not in limits:
            limits[kind] = self._limit_s(kind)
        limit_s = limits[kind]
        return limit_s is not None and one.unmoved_s >= limit_s

    def _kind(self, one: RankPosition) -> tuple[str, ...]:
        """Return the key of a rank's timeout: its role, and the state that decides."""
        if one.state == WAITING and one.process != STOPPED:
            return (one.role, WAITING)
        if one.process == STOPPED:  # whatever its state
            return (one.role, STEP)
        if one.state == STARTUP or one.completed < 1:
            return (one.role, STARTUP)
        if one.state == BETWEEN and one.last_iteration is not None and one.ordinal >= one.last_iteration:
            return (one.role, FINISHED)  # it saves the model, or the like
        return (one.role, one.state)

    def _limit_s(self, kind: tuple[str, ...]) -> float | None:
        """Return the timeout of a state in seconds; ``None`` where there is none."""
        role, state = kind
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
        return statistics.median(durations_s) if durations_s else self._earlier_s

    def _move(self, rank: int, at_s: float) -> None:
        if self._since_s is not None:
            unmoved_s = max(at_s - self._since_s, 0.0)
            self.stalled_s += unmoved_s
            self._since_s = None
            self._resumed.append(Resumed(unmoved_s))
        elif rank in self._alone:
            since_s, _ = self._alone.pop(rank)
            self._resumed.append(Resumed(at_s - since_s, rank))


def _again_s(unmoved_s: float) -> float:
    """Return how long after its beginning a stall is reported again."""
    for after_s in REPORT_AGAIN_S:
        if unmoved_s < after_s:
            return after_s
    return (unmoved_s // REPORT_EVERY_S + 1) * REPORT_EVERY_S


IDLE, BUSY = 0.1, 0.5


def _groups(active: Mapping[int, RankPosition]) -> list[tuple[RankPosition, list[int]]]:
    """Return ranks by their position, the furthest behind first; where all are alike, idle ones first."""
    by_place: dict[tuple[int, bool, str, bool], list[int]] = {}
    for rank, one in active.items():
        by_place.setdefault(one.place, []).append(rank)
    # At one iteration the stopped ranks come first: they are why the others wait.
    order = sorted(by_place, key=lambda place: (*place[:2], not place[3], len(by_place[place])))
    if len(order) == 1:
        idle = [rank for rank, one in active.items() if one.utilization is not None and one.utilization < IDLE]
        busy = [rank for rank, one in active.items() if one.utilization is not None and one.utilization > BUSY]
        if idle and len(idle) < len(busy) and len(idle) + len(busy) == len(active):
            return [(active[idle[0]], sorted(idle)), (active[busy[0]], sorted(busy))]
    return [(active[by_place[place][0]], sorted(by_place[place])) for place in order]
