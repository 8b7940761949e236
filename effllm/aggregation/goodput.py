"""Where the elapsed time of a job went, and its joules, over restarts; pure.

Every rank's rows tile its wall time.  What no row tells of the time between the first start and now is idle
where the rank had not come or had left, else unknown; what lies between two attempts is the restart gap.  So
the classes add up to the elapsed time.  Definitions: docs/goodput.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from operator import attrgetter

import msgspec
import numpy as np
from msgspec import Struct

from effllm.aggregation.columns import Array, Table, fields_of
from effllm.records.job import AttemptSummary, GoodputSummary
from effllm.records.rank import CHECKPOINT, EVALUATION, GENERATION, MARKED_PHASES, OTHER, SHUTDOWN, STARTUP, RankReport

KEPT, REDONE, DATA, STRAGGLING, HANG = "kept", "redone", "data", "straggling", "hang"
RESTART_GAP, IDLE, UNKNOWN = "restart_gap", "idle", "unknown"
CLASSES = (
    KEPT, GENERATION, REDONE, EVALUATION, CHECKPOINT, OTHER, DATA, STARTUP, SHUTDOWN,
    STRAGGLING, HANG, RESTART_GAP, IDLE, UNKNOWN,
)  # fmt: skip
#: What the job is there for.
PRODUCTIVE = (KEPT, GENERATION)
#: A smaller share of the elapsed time, or less of it, is what rounding leaves of a difference of unix times.
MIN_SHARE, MIN_CLASS_S = 1e-9, 1e-6
#: In these nothing is measured, because nothing reports.
UNTOLD = (RESTART_GAP, IDLE, UNKNOWN)

MAX_SPANS = 512  # of the newest attempts; when there are twice as many, the older half is merged by twos
MAX_OLD_SPANS = 4096  # of all earlier ones
MAX_ATTEMPTS = 1000  # that are told apart
MAX_HANGS = 1000  # that no row has told of
#: A wall clock that disagrees with the monotonic one by more than this was set.
SET_BY_S = 2.0


class Axis(Struct):
    """One axis of time for a whole run, in seconds since its first sign of life.

    It follows the monotonic clock as long as that is the same one; over another boot or another host unix time is
    all there is.
    """

    boot: str = ""  # what tells monotonic clocks apart; empty for a clock of nobody else
    now_s: float = 0.0
    time_s: float = 0.0
    at_s: float | None = None
    is_resumed: bool = False  # another process has gone on since it was read

    def advance(self, now_s: float, time_s: float | None, boot: str = "") -> float | None:
        """Move on to a moment; return by how much the wall clock was set, where that is known.

        Args:
            now_s: of the monotonic clock.
            time_s: unix time; ``None`` where nobody has looked.
            boot: of the machine that these were read on.
        """
        set_by_s = None
        is_same = not self.is_resumed or (bool(self.boot) and boot == self.boot and now_s >= self.now_s)
        step_s = max(now_s - self.now_s, 0.0)
        wall_s = step_s if time_s is None else time_s - self.time_s
        if self.at_s is None:
            self.at_s, wall_s = 0.0, (time_s or 0.0)
        elif is_same:
            self.at_s += step_s
            set_by_s = wall_s - step_s if abs(wall_s - step_s) > SET_BY_S else None
        else:
            self.at_s += max(wall_s, 0.0)
            set_by_s = wall_s if wall_s < -SET_BY_S else None
        self.boot, self.now_s, self.time_s, self.is_resumed = boot, now_s, self.time_s + wall_s, False
        return set_by_s


class Tiles(Table):
    """What the rows of each rank cover in one attempt.

    Rows carry times of their agent's clock.  Its offset to the axis of the run is learnt from the messages: none is
    taken before it was sent, so the smallest difference that any message shows is the best estimate, and messages that
    waited for the aggregator change nothing.  Positions are on the axis, times are by the agent's clock.
    """

    NAMES = (
        "told_s",
        "clock_s",  # position less time of the same moment: the smallest difference so far
        "start_s",  # time: beginning of the first row
        "end_s",  # time: end of the newest row
        "begin_s",  # position: beginning of the first row
        "heard_s",  # position: when the last message was sent
        "left_s",  # position: when the farewell was taken
        "away_s",  # between goodbyes and returns
        "is_broken",  # rows were lost before the first that came, or it went and came back
        "is_over",  # `end_s` is the end of the rank
    )
    EMPTY = (0.0, *[np.nan] * 6, 0.0, 0.0, 0.0)

    def lay(self, ranks: Sequence[int], columns: Mapping[str, Array], seconds: Array, at_s: float) -> float:
        """Lay rows behind those of their ranks, taken at a position; return where the earliest of all begins.

        Args:
            ranks: whose they are.
            columns: of `NUMBERS`.
            seconds: that each row accounts for.
            at_s: when they were taken, at the latest.
        """
        at = self.find(ranks)
        told_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over = self.values[at].T
        is_first = np.isnan(end_s)
        broken = np.maximum(broken, is_first & (columns["sequence"] > 1) & np.isnan(start_s))
        start_s = np.fmin(start_s, np.where(is_first, columns["start_time_s"], np.nan))
        end_s, over = np.fmax(end_s, columns["end_time_s"]), np.maximum(over, columns["final"])
        clock_s, told_s = np.fmin(clock_s, at_s - columns["end_time_s"]), told_s + seconds
        # Rows end before they come, and before their rank says goodbye.
        begin_s = np.fmin(begin_s, np.fmin(start_s + clock_s, np.fmin(left_s, at_s) - told_s - away_s))
        heard_s = np.fmax(heard_s, end_s + clock_s)
        self.values[at] = np.stack(
            (told_s, clock_s, start_s, end_s, begin_s, heard_s, left_s, away_s, broken, over), axis=1
        )
        return float(begin_s.min())

    def hear(self, rank: int, at_s: float, time_s: float | None) -> None:
        """Take a message of a rank at a position, sent at a time by its agent's clock."""
        at, clock_s, heard_s = self.position(rank), self.column("clock_s"), self.column("heard_s")
        if time_s is not None:
            clock_s[at] = np.fmin(clock_s[at], at_s - time_s)
            at_s = time_s + clock_s[at]
        heard_s[at] = np.fmax(heard_s[at], at_s)

    def begin(self, rank: int, start_s: float | None) -> float:
        """Take the beginning of a rank's first row, by its agent's clock; return its position, nan where unknown."""
        at = self.position(rank)
        start_s = math.nan if start_s is None else start_s
        if not self.column("is_broken")[at] and math.isnan(self.column("start_s")[at]):
            self.column("start_s")[at] = start_s
        begin_s = self.column("begin_s")
        begin_s[at] = np.fmin(begin_s[at], self.column("start_s")[at] + self.column("clock_s")[at])
        return float(begin_s[at])

    def leave(self, rank: int, at_s: float, end_s: float | None = None) -> None:
        """Take a farewell at a position, with the end of the rank by its agent's clock."""
        at = self.position(rank)
        left_s = self.column("left_s")
        if math.isnan(left_s[at]):
            left_s[at] = at_s
        if end_s is not None:
            self.column("end_s")[at] = np.fmax(self.column("end_s")[at], end_s)
            self.column("is_over")[at] = 1.0

    def come_back(self, rank: int, at_s: float) -> None:
        """Take another agent of a rank that has had one: its clock is another one too."""
        at = self.position(rank)
        if np.isfinite(self.column("end_s")[at]):
            self.column("away_s")[at] += max(np.nan_to_num(at_s - self.ends_s[at]), 0.0)
            self.column("is_broken")[at], self.column("is_over")[at] = 1.0, 0.0
            for name in ("clock_s", "start_s", "end_s", "left_s"):
                self.column(name)[at] = np.nan

    @property
    def _told_until_s(self) -> Array:
        until_s: Array = self.column("begin_s") + self.column("told_s") + self.column("away_s")
        return until_s

    @property
    def ends_s(self) -> Array:
        """Where the rows of ranks end that are over; without their end, when they left; nan if they have not."""
        end_s = self.column("end_s") + self.column("clock_s")
        ends_s: Array = np.where(self.column("is_over") > 0, np.fmax(end_s, self._told_until_s), self.column("left_s"))
        return ends_s

    @property
    def last_s(self) -> float:
        """Where the last rank ends, or was alive as far as is known; nan where nothing is."""
        alive_s = np.fmax(self.column("heard_s"), self._told_until_s)
        last_s = np.where(np.isnan(self.ends_s), alive_s, self.ends_s)
        return float(np.fmax.reduce(last_s, initial=np.nan))

    def idle_s(self, begin_s: float, end_s: float) -> float:
        """Return the rank-seconds between these before ranks came, after they left, and while they were away."""
        before_s = np.where(self.column("is_broken") > 0, 0.0, np.nan_to_num(self.column("begin_s") - begin_s))
        after_s = np.maximum(np.nan_to_num(end_s - self.ends_s), 0.0)
        return float(before_s.sum() + after_s.sum() + self.column("away_s").sum())


class Span(Struct, array_like=True):
    """Iterations of one window, or of neighbouring ones: rank-seconds, and the joules of all of these."""

    window_first: int
    window_last: int
    first: int = 1  # ordinals of the attempt; first > last where no iteration ended
    last: int = 0
    kept_s: float = 0.0
    data_s: float = 0.0
    straggling_s: float = 0.0
    hang_s: float = 0.0
    shutdown_s: float = 0.0  # is in no sum of this span: what a hang may be taken from
    joules: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float, float]:
        """In the order of `PARTS`."""
        return self.kept_s, self.data_s, self.straggling_s, self.hang_s

    @property
    def parts_j(self) -> tuple[float, float, float, float]:
        """The joules, divided by time: what a device draws while it waits for data is not measured apart."""
        whole_s = self.kept_s + self.data_s + self.straggling_s + self.hang_s
        if whole_s <= 0:
            return self.joules, 0.0, 0.0, 0.0
        kept, data, straggling, hang = (seconds / whole_s * self.joules for seconds in self.seconds)
        return kept, data, straggling, hang

    def share_from(self, ordinal: float) -> float:
        """Return the share of its iterations whose ordinal is at least this."""
        count = self.last - self.first + 1
        return min(max((self.last - ordinal + 1) / count, 0.0), 1.0) if count > 0 else 0.0

    def absorb(self, later: Span) -> None:
        """Take the span that follows into this one."""
        self.window_last = later.window_last
        if later.last >= later.first:
            self.first = min(self.first, later.first) if self.last >= self.first else later.first
            self.last = max(self.last, later.last)
        self.kept_s += later.kept_s
        self.data_s += later.data_s
        self.straggling_s += later.straggling_s
        self.hang_s += later.hang_s
        self.shutdown_s += later.shutdown_s
        self.joules += later.joules


NUMBERS = (
    "iteration_first", "iteration_last", "iteration_shown", "busy_s", "wait_s", "sequence", "final",
    "start_time_s", "end_time_s",
)  # fmt: skip
PARTS = (KEPT, DATA, STRAGGLING, HANG)


class Attempt(Struct):
    """One start of the job."""

    number: int
    begin_s: float | None = None  # on the axis of the run
    heard_s: float = 0.0
    end_s: float | None = None
    zero_time_s: float = 0.0  # unix time of the axis' zero, as this attempt has it
    world_size: int = 0
    status: str = "running"
    ranks: Tiles = msgspec.field(default_factory=Tiles)
    told_s: float = 0.0  # rank-seconds of all rows
    seconds: dict[str, float] = {}  # by class: rank-seconds
    joules: dict[str, float] = {}
    spans: list[Span] = []
    hangs: dict[int, float] = {}  # by window: rank-seconds of which no row has told yet
    hang_at_end_s: float = 0.0  # rank-seconds that were taken from the shut-down
    offset: int = 0  # number shown less ordinal
    offset_at_start: int = 0
    is_numbered: bool = False  # somebody who knows has told it
    first: int = 0  # ordinals of the iterations so far
    last: int = 0
    reached: int = 0  # the last one that only a farewell reported
    idle_s: float = 0.0  # rank-seconds, once it is over
    redone_from: float | None = None  # what `redone` below was computed for: the least number done again
    redone: tuple[float, float, int] = (0.0, 0.0, 0)  # rank-seconds, joules, iterations

    @property
    def ended_s(self) -> float:
        """Where the last rank's rows end, or its last message was sent if it has not left."""
        last_s = self.ranks.last_s
        return self.heard_s if math.isnan(last_s) else last_s


class Goodput(Struct):
    """The time of a run by class, with what is needed to tell later that work was lost."""

    clock: Axis = msgspec.field(default_factory=Axis)
    attempts: list[Attempt] = msgspec.field(default_factory=lambda: [Attempt(1)])

    @property
    def attempt(self) -> Attempt:
        """The one that runs."""
        return self.attempts[-1]

    # --- what comes in ---

    def hear(self, ago_s: float = 0.0) -> None:
        """Note that so long ago was the last sign of life of any rank."""
        attempt, at_s = self.attempt, self.clock.at_s or 0.0
        if not attempt.zero_time_s:
            attempt.zero_time_s = self.clock.time_s - at_s
        at_s -= max(ago_s, 0.0)
        if attempt.begin_s is None:
            attempt.begin_s = at_s
        attempt.heard_s = max(attempt.heard_s, at_s)

    def join(
        self,
        rank: int,
        world_size: int,
        offset: int,
        is_numbered: bool,
        is_new: bool,
        time_s: float | None = None,
        start_time_s: float | None = None,
    ) -> None:
        """Take an introduction; ``is_new`` where it is the agent's first.

        Args:
            rank: whose it is.
            world_size: of the job.
            offset: iteration number less ordinal.
            is_numbered: whether the offset was stated.
            is_new: whether the agent is new.
            time_s: when it was sent, by the agent's clock.
            start_time_s: when the rank's first row begins, by the same.
        """
        attempt = self.attempt
        attempt.world_size = max(attempt.world_size, world_size)
        attempt.is_numbered = attempt.is_numbered or is_numbered
        if not attempt.last:
            attempt.offset = attempt.offset_at_start = offset
        if is_new:
            attempt.ranks.come_back(rank, self.clock.at_s or 0.0)
        self.hear_rank(rank, time_s)
        begin_s = attempt.ranks.begin(rank, start_time_s)
        if attempt.begin_s is not None and begin_s < attempt.begin_s:
            attempt.begin_s = begin_s

    def hear_rank(self, rank: int, time_s: float | None) -> None:
        """Take a message of a rank, sent at a time by its agent's clock."""
        self.attempt.ranks.hear(rank, self.clock.at_s or 0.0, time_s)

    def leave(self, rank: int, end_time_s: float | None = None, last_ordinal: int = 0) -> None:
        """Take a farewell, with the end of the rank by its agent's clock and its last iteration."""
        self.attempt.reached = max(self.attempt.reached, last_ordinal)
        self.attempt.ranks.leave(rank, self.clock.at_s or 0.0, end_time_s)

    def count_rows(
        self,
        window: int,
        rows: Sequence[RankReport],
        numbers: Mapping[str, Array] | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Enter the rows of a window, each of which may be entered once.

        ``numbers`` are the columns of `NUMBERS`, and ``ranks`` whose they are, where somebody has them already.
        """
        attempt = self.attempt
        if numbers is None:
            numbers = dict(zip(NUMBERS, fields_of(rows, NUMBERS).T, strict=True))
        firsts, lasts, shown, busy_s, wait_s = (numbers[name] for name in NUMBERS[:5])
        seconds = busy_s + wait_s
        phases: dict[str, float] = {}
        for i, phases_s in enumerate(map(attrgetter("phases_s"), rows)):
            if phases_s:
                seconds[i] += sum(phases_s.values())
                for name, spent_s in phases_s.items():
                    known = name if name in CLASSES else OTHER
                    phases[known] = phases.get(known, 0.0) + spent_s
        ranks = [row.rank for row in rows] if ranks is None else ranks
        begin_s = attempt.ranks.lay(ranks, numbers, seconds, attempt.heard_s)
        attempt.begin_s = begin_s if attempt.begin_s is None else min(attempt.begin_s, begin_s)
        attempt.told_s += float(seconds.sum())
        for name, spent_s in phases.items():
            attempt.seconds[name] = attempt.seconds.get(name, 0.0) + spent_s
        worked = lasts >= firsts
        first, last = (int(firsts[worked].min()), int(lasts[worked].max())) if worked.any() else (1, 0)
        if last:
            attempt.first, attempt.last = min(attempt.first or first, first), max(attempt.last, last)
        # Any rank's word for the numbers that people know, where it is not what all said at the start.
        offsets = (shown - lasts)[shown - lasts != attempt.offset_at_start]
        if offsets.size:
            attempt.offset = int(offsets[0])
        added = Span(window, window, first, last, float(busy_s.sum()), float(wait_s.sum()))
        added.shutdown_s = phases.get(SHUTDOWN, 0.0)
        self._enter(window, added)
        if window in attempt.hangs:
            self._hang(window, attempt.hangs.pop(window))

    def _enter(self, window: int, added: Span) -> Span:
        """Add to the span of a window, which is made where there is none."""
        attempt = self.attempt
        i = bisect_left(attempt.spans, window, key=lambda span: span.window_last)
        if i == len(attempt.spans) or attempt.spans[i].window_first > window:
            attempt.spans.insert(i, Span(window, window))
        span = attempt.spans[i]
        window_last = span.window_last
        self._tally(span, -1)
        span.absorb(added)
        span.window_last = window_last
        self._tally(span, 1)
        if len(attempt.spans) > 2 * MAX_SPANS:
            self._merge(attempt, MAX_SPANS)
        return span

    def _tally(self, span: Span, sign: int) -> None:
        attempt = self.attempt
        for name, seconds, joules in zip(PARTS, span.seconds, span.parts_j, strict=True):
            if seconds or joules:
                attempt.seconds[name] = attempt.seconds.get(name, 0.0) + sign * seconds
                attempt.joules[name] = attempt.joules.get(name, 0.0) + sign * joules

    @staticmethod
    def _merge(attempt: Attempt, most: int) -> None:
        """Merge neighbours by twos, the older ones first, for a restart seldom goes far back."""
        spans = attempt.spans
        while len(spans) > most:
            pairs = min(len(spans) - most, max(len(spans) // 4, 1))
            for i in range(pairs):
                spans[2 * i].absorb(spans[2 * i + 1])
            del spans[1 : 2 * pairs : 2]

    def count_energy(self, window: int, iterations_j: float, phases_j: Mapping[str, float], sign: int = 1) -> None:
        """Enter the joules of a window; with a sign of -1 take them back, for a late row changes all of them."""
        self._enter(window, Span(window, window, joules=sign * iterations_j))
        attempt = self.attempt
        for name, joules in phases_j.items():
            known = name if name in CLASSES else OTHER
            attempt.joules[known] = attempt.joules.get(known, 0.0) + sign * joules

    def note_straggling(self, window: int, rank_seconds: float) -> None:
        """Take from the kept time of a window that has closed what its ranks lost to the slowest, over all of them."""
        span = self._find(window)
        if span is not None:
            self._take(span, straggling_s=max(rank_seconds, 0.0))

    def note_hang(self, window: int, seconds: float) -> None:
        """Take a stretch in which no rank moved on out of the class in which it lay.

        Args:
            window: the one that was under way: its iterations have it, or the shut-down of its last rows; until it
                closes, and where it never does, the time is unknown but for the hang.
            seconds: of the whole job.
        """
        self._hang(window, max(seconds, 0.0) * max(self.attempt.world_size, 1))

    def _hang(self, window: int, rank_seconds: float) -> None:
        attempt, span = self.attempt, self._find(window)
        if span is not None:
            from_shutdown_s = min(rank_seconds, span.shutdown_s)
            if from_shutdown_s:
                span.shutdown_s -= from_shutdown_s
                attempt.hang_at_end_s += from_shutdown_s
                attempt.seconds[SHUTDOWN] -= from_shutdown_s
                attempt.seconds[HANG] = attempt.seconds.get(HANG, 0.0) + from_shutdown_s
            taken_s = min(rank_seconds - from_shutdown_s, span.kept_s)
            self._take(span, hang_s=taken_s)
            rank_seconds -= from_shutdown_s + taken_s
        if rank_seconds > 0 and (len(attempt.hangs) < MAX_HANGS or window in attempt.hangs):
            attempt.hangs[window] = attempt.hangs.get(window, 0.0) + rank_seconds

    def _find(self, window: int) -> Span | None:
        spans = self.attempt.spans
        i = bisect_left(spans, window, key=lambda span: span.window_last)
        return spans[i] if i < len(spans) and spans[i].window_first <= window else None

    def _take(self, span: Span, straggling_s: float = 0.0, hang_s: float = 0.0) -> None:
        self._tally(span, -1)
        hang_s = min(hang_s, span.kept_s)
        span.kept_s -= hang_s
        span.hang_s += hang_s
        straggling_s = min(straggling_s, span.kept_s)
        span.kept_s -= straggling_s
        span.straggling_s += straggling_s
        self._tally(span, 1)

    # --- restarts ---

    def end_attempt(self, status: str) -> None:
        """Let the next start of the job begin: what the one before did is settled, but for what is done again."""
        attempt = self.attempt
        self._settle(attempt, status)
        self.attempts.append(Attempt(attempt.number + 1))
        if len(self.attempts) > MAX_ATTEMPTS:
            self._fold()
        for old in self.attempts[:-2]:
            self._merge(old, max(MAX_OLD_SPANS // len(self.attempts), 1))
        self.clock.is_resumed = True

    @staticmethod
    def _settle(attempt: Attempt, status: str) -> None:
        attempt.end_s = attempt.ended_s
        if attempt.begin_s is not None:
            idle_s = attempt.ranks.idle_s(attempt.begin_s, attempt.end_s)
            attempt.idle_s = min(idle_s, _untold_s(attempt, attempt.end_s))
        attempt.status, attempt.ranks = status, Tiles()

    def _fold(self) -> None:
        """Make one of the two oldest attempts, with what lay between them as unknown."""
        first, second = self.attempts[0], self.attempts[1]
        first.end_s = second.end_s
        for mine, other in ((first.seconds, second.seconds), (first.joules, second.joules)):
            for name, value in other.items():
                mine[name] = mine.get(name, 0.0) + value
        first.told_s += second.told_s
        first.hang_at_end_s += second.hang_at_end_s
        first.idle_s += second.idle_s
        shift = second.offset - first.offset
        for span in second.spans:
            span.first, span.last = span.first + shift, span.last + shift
        first.first, first.last = first.first or second.first + shift, max(first.last, second.last + shift)
        first.spans, first.redone_from, first.status = first.spans + second.spans, None, second.status
        del self.attempts[1]

    # --- what goes out ---

    def summary(self, is_over: bool = False, measures_energy: bool = True, status: str = "running") -> GoodputSummary:
        """Return the classes so far.

        Args:
            is_over: the job has ended: nothing after its last sign of life is its time.
            measures_energy: whether any device does.
            status: of the attempt that runs.
        """
        seconds, rank_seconds = dict.fromkeys(CLASSES, 0.0), dict.fromkeys(CLASSES, 0.0)
        joules: dict[str, float | None] = dict.fromkeys(CLASSES, 0.0)
        told: list[AttemptSummary] = []
        elapsed_s, before, again = 0.0, None, self._least_shown_after()
        for attempt, least in zip(self.attempts, again, strict=True):
            end_s = self._end_of(attempt, is_over)
            span_s = max(end_s - attempt.begin_s, 0.0) if attempt.begin_s is not None else 0.0
            gap_s = 0.0
            if before is not None and attempt.begin_s is not None:
                gap_s = max(attempt.begin_s - (before.end_s or 0.0), 0.0)
                seconds[RESTART_GAP] += gap_s
                rank_seconds[RESTART_GAP] += gap_s * before.world_size
            self._redo(attempt, least)
            for name, value in _classes(attempt, span_s, end_s).items():
                rank_seconds[name] += value
                seconds[name] += value / max(attempt.world_size, 1)
            for name, value in _joules(attempt).items():
                joules[name] = (joules[name] or 0.0) + value
            elapsed_s += span_s + gap_s
            told.append(_told(attempt, span_s, gap_s, attempt.status if attempt.end_s is not None else status))
            before = attempt if attempt.begin_s is not None else before
        for name in CLASSES:
            if seconds[name] < max(MIN_SHARE * elapsed_s, MIN_CLASS_S):
                seconds[name] = rank_seconds[name] = 0.0
            if not measures_energy or (name in UNTOLD and seconds[name] > 0):
                joules[name] = None
        productive_s = sum(seconds[name] for name in PRODUCTIVE)
        return GoodputSummary(
            elapsed_s=elapsed_s,
            ratio=productive_s / elapsed_s if elapsed_s > 0 else None,
            seconds=seconds,
            rank_seconds=rank_seconds,
            joules=joules,
            redone_iterations=sum(one.redone_iterations for one in told) if self._knows_repeats else None,
            attempts=tuple(told),
        )

    @property
    def _knows_repeats(self) -> bool:
        return all(attempt.is_numbered for attempt in self.attempts[1:] if attempt.last)

    def _end_of(self, attempt: Attempt, is_over: bool) -> float:
        if attempt.end_s is not None:
            return attempt.end_s
        return attempt.ended_s if is_over else max(attempt.heard_s, self.clock.at_s or 0.0)

    def _least_shown_after(self) -> list[float | None]:
        """Return for each attempt the least number with which a later one began, where that is known."""
        found: list[float | None] = []
        least: float | None = None
        for attempt in reversed(self.attempts):
            found.append(least)
            if attempt.is_numbered and attempt.begin_s is not None:
                least = attempt.offset + 1 if least is None else min(least, attempt.offset + 1)
        return found[::-1]

    @staticmethod
    def _redo(attempt: Attempt, least: float | None) -> None:
        """Know what of an attempt was lost: its iterations from that number on were done again."""
        if least is None or attempt.redone_from == least:
            return
        seconds = joules = 0.0
        iterations = 0
        for span in attempt.spans:
            share = span.share_from(least - attempt.offset)
            seconds += share * span.kept_s
            joules += share * span.parts_j[0]
            iterations += round(share * (span.last - span.first + 1)) if share else 0
        attempt.redone, attempt.redone_from = (seconds, joules, iterations), least


def _untold_s(attempt: Attempt, end_s: float) -> float:
    if attempt.begin_s is None:
        return 0.0
    return max(max(attempt.world_size, 1) * (end_s - attempt.begin_s) - attempt.told_s, 0.0)


def _classes(attempt: Attempt, span_s: float, end_s: float) -> dict[str, float]:
    """Return the rank-seconds of an attempt by class; they add up to its length times its ranks."""
    classes = {name: max(value, 0.0) for name, value in attempt.seconds.items()}
    redone_s = min(attempt.redone[0], classes.get(KEPT, 0.0))
    classes[KEPT] = classes.get(KEPT, 0.0) - redone_s
    classes[REDONE] = redone_s
    untold_s = _untold_s(attempt, end_s) if span_s > 0 else 0.0
    if attempt.end_s is None:
        idle_s = min(attempt.ranks.idle_s(attempt.begin_s or 0.0, end_s), untold_s)
    else:
        idle_s = min(attempt.idle_s, untold_s)
    hang_s = min(sum(attempt.hangs.values()), untold_s - idle_s)
    classes[IDLE] = idle_s
    classes[HANG] = classes.get(HANG, 0.0) + hang_s
    classes[UNKNOWN] = untold_s - idle_s - hang_s
    return classes


def _joules(attempt: Attempt) -> dict[str, float]:
    joules = {name: max(value, 0.0) for name, value in attempt.joules.items()}
    if attempt.hang_at_end_s > 0:
        share = attempt.hang_at_end_s / (attempt.hang_at_end_s + max(attempt.seconds.get(SHUTDOWN, 0.0), 0.0))
        hang_j = share * joules.get(SHUTDOWN, 0.0)
        joules[SHUTDOWN] = joules.get(SHUTDOWN, 0.0) - hang_j
        joules[HANG] = joules.get(HANG, 0.0) + hang_j
    redone_j = min(attempt.redone[1], joules.get(KEPT, 0.0))
    joules[KEPT] = joules.get(KEPT, 0.0) - redone_j
    joules[REDONE] = redone_j
    return joules


def _told(attempt: Attempt, span_s: float, gap_s: float, status: str) -> AttemptSummary:
    begin_s = attempt.zero_time_s + (attempt.begin_s or 0.0)
    return AttemptSummary(
        attempt=attempt.number,
        status=status,
        start_time_s=begin_s,
        end_time_s=begin_s + span_s,
        elapsed_s=span_s,
        gap_before_s=gap_s,
        world_size=attempt.world_size,
        iterations=attempt.last - attempt.first + 1 if attempt.last else 0,
        first=attempt.first + attempt.offset if attempt.last else None,
        last=attempt.last + attempt.offset if attempt.last else None,
        redone_iterations=attempt.redone[2],
    )


assert set(MARKED_PHASES) <= set(CLASSES)
