"""Has the job stopped, who is where, and when does it go on: pure, beats and reports and time in, verdicts out.

A rank is where its agent last said that its loop stands.  Nobody is accused of what happened since: only what an agent
said itself counts as standing, and whose agent is silent is said to be silent, not stuck.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from effllm.schema import Beat, RankReport
from effllm.training import ring

STALL_S = 30.0
ITERATIONS = 3  # ... or so many median iterations, the longer
#: A marked phase may take this many times the stall's seconds (10 minutes), or 10 times the longest seen, the longer.
PHASE_STALLS, PHASE_TIMES = 20, 10
#: Start-up is all until the first iteration has ended: it loads, compiles and meets the others (30 minutes).
STARTUP_STALLS = 60
BEATS = 6  # an agent beats so many times in the seconds of a stall ...
LOOKS = 15  # ... and a stall is looked for so many times
UNDER_WAY_S = 5.0  # no beat takes longer to come: whoever was seen later than another has moved later
SLEPT_S = 10.0  # the aggregator looks twice a second, unless it was stopped
TOLD_AGAIN_S = (300.0, 1800.0)
TOLD_EVERY_S = 7200.0

STARTUP, BETWEEN, STEP = ring.STATE_NAMES[ring.STARTUP], ring.STATE_NAMES[ring.BETWEEN], ring.STATE_NAMES[ring.STEP]
FINISHED = ring.STATE_NAMES[ring.FINISHED]
#: What the agent of a process that serves says instead of "between iterations": nobody knows when the next one comes.
WAITING = "waiting for requests"
STOPPED = "T"  # state of a process that a signal or a debugger has stopped


class Stand(Struct):
    """Where a rank stands, by its agent's own words."""

    role: str = ""
    last_iteration: int | None = None  # ordinal after which its loop is over, where that is known
    ordinal: int = 0
    state: str = ""  # empty: it has not said
    process: str = ""  # state of the trainer's process, as /proc has it
    since_s: float = 0.0  # when it came to stand there ...
    seen_s: float = 0.0  # ... and when its agent last said so
    said_s: float = 0.0  # for how long, by the agent's own clock
    joined_s: float = 0.0
    ended_s: float = 0.0  # it has ended an iteration since then
    utilization: float | None = None
    power_w: float | None = None

    @property
    def completed(self) -> int:
        """Iterations behind it."""
        return self.ordinal - 1 if self.state == STEP else self.ordinal

    @property
    def place(self) -> tuple[int, bool, str, bool]:
        """What a group of ranks has in common: iterations behind, whether in the next, which state, whether stopped."""
        return (self.completed, self.state == STEP, self.state, self.process == STOPPED)

    @property
    def stood_s(self) -> float:
        """For how long it is known to have stood."""
        return self.seen_s - self.since_s


class Stall(NamedTuple):
    """Ranks stand: whoever is furthest behind first."""

    groups: Sequence[tuple[Stand, Sequence[int]]]  # of ranks at one place, one of them for all
    stood_s: float
    is_partial: bool = False  # others go on


class Resumed(NamedTuple):
    """The loop goes on."""

    stood_s: float
    rank: int | None = None  # that stood alone


Verdict = Stall | Resumed


class Hang:
    """Watches where the ranks of a job stand.

    Args:
        stall_s: from when on a loop that does not move has stopped, unless its iterations are longer.
        earlier_s: what an iteration took before this began to watch; 0 where that is not known.
    """

    def __init__(self, stall_s: float = STALL_S, earlier_s: float = 0.0) -> None:
        self._stall_s = stall_s
        self._earlier_s = earlier_s
        self.ranks: dict[int, Stand] = {}
        self._windows: dict[str, deque[tuple[int, float]]] = {}  # by role: seconds of an iteration, one of a window
        self._durations_s: dict[str, deque[float]] = {}  # by role: of iterations between beats, until there are windows
        self._longest_s: dict[str, float] = {}  # by phase
        self._twice_s = 0.0  # since when somebody has ended two iterations more
        self._moved_s = 0.0  # when somebody last moved
        self._next_look_s = self._next_alone_s = 0.0
        self._looked_s = 0.0
        self._since_s: float | None = None  # since when the job stands
        self._tell_s = 0.0  # when to say so again
        self._alone: dict[int, tuple[float, float]] = {}  # ranks that stand while others go on: since when, tell when
        self._resumed: list[Resumed] = []
        self.stalled_s = 0.0  # of the stalls that are over

    # --- what comes in ---

    def join(self, rank: int, role: str, last_iteration: int | None, is_new: bool, now_s: float) -> None:
        """Take an introduction.

        Args:
            rank: whose.
            role: what it does; iterations of different roles take different times.
            last_iteration: ordinal after which its loop is over, where that is known.
            is_new: whether it is another agent's than before.
            now_s: when.
        """
        if is_new or rank not in self.ranks:
            self.ranks[rank] = Stand(since_s=now_s, seen_s=now_s, joined_s=now_s, ended_s=now_s)
        stand = self.ranks[rank]
        stand.role, stand.last_iteration = role, last_iteration

    def leave(self, rank: int, completed: bool, now_s: float) -> None:
        """Take a farewell: a rank that is done has moved, one that was killed has not."""
        if rank in self.ranks:
            if completed:
                self._move(rank, now_s)
            self._alone.pop(rank, None)
            del self.ranks[rank]

    def beat(self, beat: Beat, now_s: float) -> None:
        """Take where a rank stands."""
        stand = self.ranks.get(beat.rank)
        if stand is None:
            return
        if (beat.ordinal, beat.state) == (stand.ordinal, stand.state) and beat.since_s >= stand.said_s:
            # A beat may have waited somewhere, but none came before it was sent.
            stand.since_s = min(stand.since_s, now_s - beat.since_s)
        else:
            since_s = now_s - beat.since_s  # before it joined, for all we know
            since_s = max(since_s, stand.since_s) if stand.state else since_s
            self._place(beat.rank, stand, beat.ordinal, beat.state, since_s)
        stand.seen_s, stand.said_s, stand.process = now_s, beat.since_s, beat.process
        stand.utilization, stand.power_w = beat.utilization, beat.power_w

    def row(self, row: RankReport, now_s: float) -> None:
        """Take a window of a rank."""
        stand = self.ranks.get(row.rank)
        if stand is None:
            return
        if row.phases_s:
            for name, seconds in row.phases_s.items():
                self._longest_s[name] = max(self._longest_s.get(name, 0.0), seconds)
        last = row.iteration_last
        if last >= row.iteration_first:
            of_role = self._windows.get(stand.role)
            if of_role is None:  # a deque is not made for each of ten thousand rows
                of_role = self._windows[stand.role] = deque(maxlen=16)
            if not of_role or of_role[-1][0] < row.window:
                of_role.append((row.window, row.time_s / row.iterations))
        if last > stand.completed:
            # Where the rank was when the window ended, which is a while ago: nobody has seen it stand there.
            self._place(row.rank, stand, last, BETWEEN, now_s)
            stand.said_s = 0.0

    def _place(self, rank: int, stand: Stand, ordinal: int, state: str, since_s: float) -> None:
        """Note that a rank has moved, and where it stands since then."""
        before, had_said, stood_since_s = stand.completed, bool(stand.state), stand.since_s
        stand.ordinal, stand.state, stand.since_s = ordinal, state, since_s
        ended = stand.completed - before
        if ended > 0 and had_said:
            if before == 0:
                self._longest_s[STARTUP] = max(self._longest_s.get(STARTUP, 0.0), since_s - stand.joined_s)
            if stand.role not in self._windows:
                # The first is longer than the others, and for the second it is all that is known.
                self._durations_s.setdefault(stand.role, deque(maxlen=33)).append((since_s - stood_since_s) / ended)
            # All of them after it was last heard.
            self._twice_s = max(self._twice_s, stand.seen_s if ended > 1 else stand.ended_s)
            stand.ended_s = stand.seen_s
        if state != FINISHED:
            if since_s > self._moved_s:
                self._moved_s = since_s
            if self._alone or self._since_s is not None:
                self._move(rank, since_s)

    # --- what goes out ---

    def look(self, now_s: float, silent: Collection[int]) -> list[Verdict]:
        """Return what there is to say now: that the job, or a rank alone, stands, or goes on.

        Args:
            now_s: the time.
            silent: ranks whose agents have not been heard of late; of these nothing is known.
        """
        if now_s - self._looked_s > SLEPT_S:
            # What has come meanwhile came all at once: nobody knows who moved after whom.
            self._twice_s = 0.0
            for one in self.ranks.values():
                one.ended_s = now_s
        self._looked_s = now_s
        told: list[Verdict] = list(self._resumed)
        self._resumed = []
        may_stand = now_s - self._moved_s >= self._stall_s and now_s >= self._next_look_s
        if not may_stand and now_s < self._next_alone_s:
            return told
        self._next_look_s, self._next_alone_s = now_s + self._stall_s / LOOKS, now_s + self._stall_s
        here = {rank: one for rank, one in self.ranks.items() if rank not in silent}
        heard = {rank: one for rank, one in here.items() if one.state not in ("", FINISHED)}
        if not heard:
            return told
        limits: dict[tuple[str, ...], float | None] = {}  # 10,000 ranks have few of them
        stuck = {rank for rank, one in heard.items() if self._stands(one, limits)}
        if len(stuck) == len(heard):
            self._alone = {}
            if self._since_s is None:
                self._since_s, self._tell_s = max(one.since_s for one in heard.values()), now_s
            if now_s >= self._tell_s:
                stood_s = now_s - self._since_s
                self._tell_s = self._since_s + _again_s(stood_s)
                told.append(Stall(_groups(heard), stood_s))
        elif self._since_s is None:
            alone = {rank: heard[rank] for rank in stuck if heard[rank].since_s < self._twice_s - UNDER_WAY_S}
            due = {rank: one for rank, one in alone.items() if now_s >= self._alone.get(rank, (0.0, 0.0))[1]}
            for rank, one in due.items():
                self._alone[rank] = (one.since_s, one.since_s + _again_s(now_s - one.since_s))
            if due:
                longest_s = max(now_s - one.since_s for one in due.values())
                others = {rank: one for rank, one in heard.items() if rank not in alone}
                told.append(Stall([*_groups(due), *_groups(others)], longest_s, is_partial=True))
        return told

    @property
    def since_s(self) -> float | None:
        """Since when the job stands; ``None`` where it does not."""
        return self._since_s

    def total_s(self, now_s: float) -> float:
        """Return for how long the job has stood: the stalls that are over, and the one that is not."""
        return self.stalled_s + (now_s - self._since_s if self._since_s is not None else 0.0)

    # --- the rules ---

    def _stands(self, one: Stand, limits: dict[tuple[str, ...], float | None]) -> bool:
        kind = self._kind(one)
        if kind not in limits:
            limits[kind] = self._limit_s(kind)
        limit_s = limits[kind]
        return limit_s is not None and one.stood_s >= limit_s

    def _kind(self, one: Stand) -> tuple[str, ...]:
        """Return by what a rank is judged: its role and its state, or what that stands for."""
        if one.state == WAITING and one.process != STOPPED:
            return (one.role, WAITING)
        if one.process == STOPPED:  # whatever it was at, it is not at it now
            return (one.role, STEP)
        if one.state == STARTUP or one.completed < 1:
            return (one.role, STARTUP)
        if one.state == BETWEEN and one.last_iteration is not None and one.ordinal >= one.last_iteration:
            return (one.role, FINISHED)  # it saves what it has trained, and the like
        return (one.role, one.state)

    def _limit_s(self, kind: tuple[str, ...]) -> float | None:
        """Return for how long a rank may stand so; ``None``: for ever."""
        role, state = kind
        if state == WAITING:
            return None
        if state in (STEP, BETWEEN):
            return max(self._stall_s, ITERATIONS * self._iteration_s(role))
        least_s = (STARTUP_STALLS if state == STARTUP else PHASE_STALLS) * self._stall_s
        return max(least_s, PHASE_TIMES * self._longest_s.get(state, 0.0))

    def _iteration_s(self, role: str) -> float:
        if windows := self._windows.get(role):
            return statistics.median(seconds for _, seconds in windows)
        durations_s = self._durations_s.get(role)
        return statistics.median(durations_s) if durations_s else self._earlier_s

    def _move(self, rank: int, at_s: float) -> None:
        if self._since_s is not None:
            stood_s = max(at_s - self._since_s, 0.0)
            self.stalled_s += stood_s
            self._since_s = None
            self._resumed.append(Resumed(stood_s))
        elif rank in self._alone:
            since_s, _ = self._alone.pop(rank)
            self._resumed.append(Resumed(at_s - since_s, rank))


def _again_s(stood_s: float) -> float:
    """Return how long after its beginning a stall is told again."""
    for after_s in TOLD_AGAIN_S:
        if stood_s < after_s:
            return after_s
    return (stood_s // TOLD_EVERY_S + 1) * TOLD_EVERY_S


IDLE, BUSY = 0.1, 0.5


def _groups(heard: Mapping[int, Stand]) -> list[tuple[Stand, list[int]]]:
    """Return ranks by where they stand, those furthest behind first; where all stand alike, those that are idle."""
    by_place: dict[tuple[int, bool, str, bool], list[int]] = {}
    for rank, one in heard.items():
        by_place.setdefault(one.place, []).append(rank)
    # Of those at one iteration the stopped come first, for they are why the others wait.
    order = sorted(by_place, key=lambda place: (*place[:2], not place[3], len(by_place[place])))
    if len(order) == 1:
        idle = [rank for rank, one in heard.items() if one.utilization is not None and one.utilization < IDLE]
        busy = [rank for rank, one in heard.items() if one.utilization is not None and one.utilization > BUSY]
        if idle and len(idle) < len(busy) and len(idle) + len(busy) == len(heard):
            return [(heard[idle[0]], sorted(idle)), (heard[busy[0]], sorted(busy))]
    return [(heard[by_place[place][0]], sorted(by_place[place])) for place in order]
