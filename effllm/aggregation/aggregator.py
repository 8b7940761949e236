"""Messages and time in, reports of the cluster out: pure, so every rule here is tested without a socket.

A window is keyed by its number, which is equal on all ranks, never by wall clock.  Windows close in
order and once: when every live rank has passed them, or when their deadline has.
"""

from __future__ import annotations

import heapq
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from effllm.aggregation.gathered import Gathered
from effllm.aggregation.joining import Joined, WindowJoiner, put
from effllm.aggregation.ledger import Ledger, RankState
from effllm.aggregation.merged import merge_devices
from effllm.aggregation.pacing import is_large, late_every_s
from effllm.aggregation.presence import ABSENT_AFTER_S
from effllm.aggregation.reporting import Window, doubts, report_of, summary_of
from effllm.aggregation.roster import Roster
from effllm.aggregation.rows import Rows
from effllm.aggregation.window_energy import window_energy
from effllm.config import Config
from effllm.event_limit import EventLimit
from effllm.events import KINDS
from effllm.health import losses
from effllm.health.energy_watch import EnergyWatch
from effllm.health.stalls import StackFile, Stalls
from effllm.health.straggler_watch import StragglerWatch
from effllm.health.waste import WasteWatch
from effllm.records.job import ClusterReport, Summary
from effllm.records.rank import MAX_EVENT_COUNT, Event, RankReport
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Hello, Reports, Stack
from effllm.runs.plain_text import one_line

MIN_DEADLINE_S = 5.0
RECENT = 8  # closed windows that a late report can still complete
MAX_STATED = 1000  # sentences of a kind that are remembered as stated
MAX_KINDS = 100  # of events; further ones are counted as OTHER
OTHER = "other"
MOST = 0.5
MAX_NAMED = 8  # ranks in a line
MAX_PENDING_BYTES = 2 * 2**20  # of one rank's reports, as they came: in memory they take eight times as much
MAX_LATE = 32  # late windows at a time: each is a report, which takes about a millisecond ...
LATE_WINDOW_S = 0.005  # ... and then the next ones wait for so long for each of them
MAX_CLOSING_ROWS = 1000  # in windows that close at a time without all ranks: nothing is handed out meanwhile
CLOSING_ROWS = 30  # a window costs as much as so many of its rows
MAX_BACKLOG_S = 15.0  # for so long at most nobody is late because we are


class Closed(NamedTuple):
    """A window that closed, with the reports of its ranks."""

    report: ClusterReport
    rows: Sequence[RankReport]


class _Pending(Struct):
    first_s: float  # when its first row came
    rows: dict[int, RankReport] = {}
    gathered: Gathered = msgspec.field(default_factory=Gathered)


class _Held:
    """How many reports of a rank wait for their windows to close, and how many bytes they took on the wire."""

    __slots__ = ("num_bytes", "num_rows")

    def __init__(self) -> None:
        self.num_rows = self.num_bytes = 0

    def release(self, num_rows: int = 1) -> None:
        """Let reports go, of mean size."""
        self.num_bytes -= self.num_bytes * num_rows // self.num_rows if self.num_rows else 0
        self.num_rows = max(self.num_rows - num_rows, 0)


def named(ranks: Sequence[int]) -> str:
    """Return ranks by their numbers, a few of them."""
    return ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")


class Aggregator:
    """Combines what ranks report into the metrics of the whole job.

    Args:
        config: the job's settings.
        job: random id of the job; empty takes the first that comes.
        attempt: which start of the job this is, from 1.
        time_s: unix time of the start.
        ledger: what a killed predecessor left.
        boot: tells this machine's monotonic clock from others; empty where nobody knows.
    """

    def __init__(
        self, config: Config, job: str, attempt: int, time_s: float, ledger: Ledger | None = None, boot: str = ""
    ) -> None:
        self._config = config
        self._ledger = ledger or Ledger(attempt=attempt, job=job, started_time_s=time_s)
        self._roster = Roster(config, self._ledger)
        self._presence = self._roster.presence
        known, min_s = self._ledger, config.min_window_s
        self._joiner = WindowJoiner(min_s, known.closed, max(known.joined_until, known.closed)) if min_s else None
        self._pending: dict[int, _Pending] = {}
        self._recent: dict[int, Window] = {}
        self._spans_s: list[float] = []  # of the last windows, for the deadline
        self._closed: list[Closed] = []
        self._order: list[int] = []  # a heap of the pending windows
        self._held: dict[int, _Held] = {}  # by rank
        self._most_late = MAX_LATE
        self._is_closing = False
        self._closed_s = -math.inf  # when the last window closed
        self._late_s = -math.inf  # when late rows were last taken in
        self._late_rows: dict[int, dict[int, RankReport]] = {}  # of windows that have closed
        self._events: list[Event] = []
        self._limit = EventLimit()
        self._stated: dict[str, set[str]] = {}  # by kind: what one kind floods, others are not silenced by
        self._last_report: ClusterReport | None = None
        self._boot = boot
        self._heard_s: float | None = None  # when any rank was heard last
        self._stalls = Stalls(config, self._roster, self._ledger, self.record)
        self._stragglers = StragglerWatch(self._ledger, self.record)
        self._waste = WasteWatch(self._ledger.events, self.record)
        self._energy = EnergyWatch(self._ledger.events.__contains__, self.record)
        self.garbage = 0  # frames that were not messages
        self.duplicates = 0

    # --- what comes in ---

    def hello(self, message: Hello, now_s: float, time_s: float) -> str:
        """Take an introduction; return why it is refused, or an empty string."""
        reason = self._roster.objection(message, now_s)
        if reason:
            text = f"rank {message.rank} on {message.host} was refused: {reason}"
            self.record(Event(time_s, "refused", text, message.rank))
            return reason
        is_new = self._roster.admit(message, now_s)
        if is_new:
            self.record(Event(time_s, "joined", f"rank {message.rank} joined from {message.host}", message.rank))
        self._stalls.hello(message, is_new, now_s)
        self._stragglers.hello(message, is_new)
        self._hear(message.rank, now_s, time_s)
        self._pass_time(now_s, time_s)
        self._ledger.goodput.join(
            message.rank, message.world_size, message.offset, message.is_numbered, is_new, message.time_s,
            message.start_time_s,
        )  # fmt: skip
        for device in message.devices:
            for sentence in device.not_measured:
                self._state(Event(time_s, "not_measured", sentence))
        disagreement = self._roster.disagreement(message)
        if disagreement:
            self._state(Event(time_s, "disagreement", disagreement, message.rank), once="parameters")
        return ""

    def reports(self, message: Reports, now_s: float, time_s: float, num_bytes: int = 0) -> bool:
        """Take windows of a rank; those taken before are dropped and counted.

        Args:
            message: the windows.
            now_s: the time.
            time_s: unix time.
            num_bytes: of the message.

        Returns:
            ``False`` where the rank has more open windows than an agent keeps: the rest of the message is not taken,
            nor may what follows be, until the agent has sent it again.
        """
        # What is done here is done ten thousand times a second.
        rows, joiner = message.rows, self._joiner
        most_rows, row_bytes, is_all = self._config.history_size, num_bytes // (len(message.rows) or 1), True
        for row in rows:
            number, sequence = row.rank, row.sequence
            rank = self._roster.rank_of(number, row.agent)
            if rank is None:
                self.garbage += 1
                continue
            self._hear(number, now_s, time_s)
            if row is rows[-1]:
                self._spend(rank, message)
            if message.lost > rank.lost:
                self._lose(number, rank, message.lost, time_s)
            if sequence <= rank.last_sequence:
                self.duplicates += 1
                continue
            held = self._held.get(number)
            if held is None:
                held = self._held[number] = _Held()
            if held.num_rows >= most_rows or held.num_bytes + row_bytes > MAX_PENDING_BYTES:
                is_all = False
                break
            held.num_rows += 1
            held.num_bytes += row_bytes
            rank.take(sequence, row.final)
            if rank.gaps > rank.lost:
                self._lose(number, rank, rank.gaps, time_s)
            rank.iteration = row.iteration_last
            self._stalls.row(row, now_s)
            if joiner is None:
                self._enter(row, now_s)
            else:
                is_full = 2 * held.num_rows >= most_rows or 2 * held.num_bytes >= MAX_PENDING_BYTES
                num_ranks = self._ledger.world_size - self._presence.num_away
                self._enter_joined(joiner.add(row, num_ranks, self._ledger.closed, is_full, now_s), now_s)
        if self._late_rows and now_s >= self._late_s and not is_large(self._ledger.world_size):
            self._take_late(now_s, time_s)
        if self._may_close():
            self._close_ready(now_s)
        return is_all

    def _enter(self, row: RankReport, now_s: float) -> None:
        """Enter a row into its window, which is late where that has closed."""
        number, window = row.rank, row.window
        rank = self._ledger.ranks[number]
        if window > rank.last_window:
            rank.last_window = window
        if window <= self._ledger.closed:
            rows = self._late_rows.setdefault(window, {})
        else:
            pending = self._pending.get(window)
            if pending is None:
                pending = self._pending[window] = _Pending(first_s=now_s)
                heapq.heappush(self._order, window)
            rows = pending.rows
            pending.gathered.add(row)
        if self._joiner is None:
            rows[number] = row
        else:
            put(rows, row)

    def _enter_joined(self, ready: Iterable[Joined], now_s: float) -> None:
        for number, passed, row, num_rows in ready:
            rank = self._ledger.ranks[number]
            rank.last_window = max(rank.last_window, passed)
            if row is not None:
                self._held[number].release(num_rows - 1)
                self._enter(row, now_s)

    def beat(self, message: Heartbeat, now_s: float, time_s: float) -> None:
        """Take a sign of life."""
        rank = self._roster.rank_of(message.rank, message.agent)
        if rank is not None:
            self._hear(message.rank, now_s, time_s)
            self._lose(message.rank, rank, message.lost, time_s)
            if message.time_s is not None and not rank.bye:
                self._pass_time(now_s, time_s)
                self._ledger.goodput.hear_rank(message.rank, message.time_s)
            self._stalls.beat(message, now_s)
            self._stragglers.beat(message, now_s)

    def stack(self, message: Stack, now_s: float, time_s: float) -> None:
        """Take what a trainer that stands was doing; what nobody has asked for is counted as garbage."""
        rank = self._roster.rank_of(message.rank, message.agent)
        if rank is None or not self._stalls.stack(message, time_s):
            self.garbage += 1
        else:
            self._hear(message.rank, now_s, time_s)

    def agent_event(self, message: AgentEvent, now_s: float, time_s: float) -> None:
        """Take an event of an agent: it keeps its own time, but for a clock that is ahead or far behind."""
        if self._roster.rank_of(message.rank, message.agent) is not None:
            self._hear(message.rank, now_s, time_s)
            event, count = message.event, min(message.event.count, MAX_EVENT_COUNT)
            happened_s = min(max(event.time_s, self._ledger.started_time_s), time_s)
            text = f"rank {message.rank}: {event.text}"
            self.record(replace(event, time_s=happened_s, text=text, rank=message.rank, count=count))

    def bye(self, message: Bye, now_s: float, time_s: float) -> bool:
        """Take a farewell; ``False`` where it comes from a stranger."""
        rank = self._roster.rank_of(message.rank, message.agent)
        if rank is None:
            self.garbage += 1
            return False
        self._hear(message.rank, now_s, time_s)
        self._lose(message.rank, rank, message.lost, time_s)
        self._spend(rank, message)
        self._pass_time(now_s, time_s)
        self._ledger.goodput.leave(message.rank, message.end_time_s, message.last_ordinal)
        if self._presence.leave(rank, message.status, now_s):
            self.record(Event(time_s, "left", f"rank {message.rank} left: {rank.bye}", message.rank))
            self._stalls.bye(message.rank, rank.bye, now_s)
        if self._may_close():
            self._close_ready(now_s)
        return True

    def reject(self, time_s: float, reason: str) -> None:
        """Count a frame that was no message of ours."""
        self.garbage += 1
        self.record(Event(time_s, "garbage", f"a frame was rejected: {reason}"))

    def record(self, event: Event) -> None:
        """Count an event, and make a line of it unless there are too many of them."""
        counts, kind, rank = self._ledger.events, event.kind, event.rank
        if kind not in KINDS and kind not in counts and len(counts) >= MAX_KINDS:
            kind = OTHER
        counts[kind] = counts.get(kind, 0) + event.count
        if rank is not None and not 0 <= rank < self._ledger.world_size:
            rank = None  # a peer may claim any
        event = replace(event, kind=kind, text=one_line(event.text), rank=rank, attempt=self._ledger.attempt)
        if self._limit.admits(event):
            self._events.append(event)

    def may_join(self, message: Hello, now_s: float) -> bool:
        """Whether nothing speaks against an introduction."""
        return not self._roster.objection(message, now_s)

    def is_too_late(self, message: Hello) -> bool:
        """Whether who introduces itself when rank 0's trainer has ended is rather an agent of the next attempt.

        It may be a late one of ours where that trainer came to a good end, or was over before rank 0's agent came.
        """
        first = self._ledger.ranks.get(0)
        is_known = self._roster.rank_of(message.rank, message.agent) is not None
        return not is_known and first is not None and first.bye != "completed"

    def tick(self, now_s: float, time_s: float, heard_until_s: float | None = None) -> None:
        """Let time pass: name ranks that fell silent, close windows whose deadline has passed.

        Args:
            now_s: the time.
            time_s: unix time.
            heard_until_s: all that had arrived by then has been taken; nobody is late for what waits with us.
        """
        until_s = now_s if heard_until_s is None else max(heard_until_s, now_s - MAX_BACKLOG_S)
        for rank, seconds in self._presence.fall_silent(until_s).items():
            self.record(Event(time_s, "silent", f"rank {rank} has said nothing for {seconds:.0f} s", rank))
        self._pass_time(now_s, time_s)
        if self._late_rows and now_s - self._late_s >= late_every_s(self._ledger.world_size):
            self._take_late(now_s, time_s)
        self._stalls.tick(now_s, time_s)
        self._ledger.note_hang(self._stalls.take_s(now_s))
        if self._joiner is not None:
            num_ranks, is_over = (
                self._ledger.world_size - self._presence.num_away,
                self._presence.everyone_left(now_s),
            )
            self._enter_joined(self._joiner.tick(now_s, num_ranks, is_over), now_s)
        self._close_ready(now_s, until_s)
        self._events += self._limit.roll(now_s)

    # --- what goes out ---

    def take_closed(self) -> list[Closed]:
        """Return the windows that closed since the last call, in order."""
        closed, self._closed = self._closed, []
        return closed

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def settle(self, now_s: float, time_s: float) -> None:
        """Take in what came late: a state cannot say that an older row of a rank is missing from its sums."""
        if self._late_rows and (now_s >= self._late_s or is_large(self._ledger.world_size)):
            self._take_late(now_s, time_s)

    @property
    def is_stalled(self) -> bool:
        """Whether no rank moves on, by all that is known."""
        return self._stalls.is_status

    def take_asked(self) -> list[int]:
        """Return the ranks whose stacks are wanted, since the last call."""
        return self._stalls.take_asked()

    def take_stacks(self) -> list[StackFile]:
        """Return the stacks that have come since the last call."""
        return self._stalls.take_files()

    def snapshot(self, safe: dict[int, int] | None = None) -> bytes:
        """Return the state as JSON, for a replacement."""
        return self._ledger.encode(self.safe() if safe is None else safe)

    @property
    def world_size(self) -> int:
        """How many ranks the job has; 0 before the first has joined."""
        return self._ledger.world_size

    @property
    def is_closing(self) -> bool:
        """Whether windows are left to the next `tick` that may be ready to close now."""
        return self._is_closing

    @property
    def is_ending(self) -> bool:
        """Whether ranks have left."""
        return self._presence.num_left > 0

    @property
    def attempt(self) -> int:
        """Which start of the job this is."""
        return self._ledger.attempt

    @property
    def job(self) -> str:
        """Id of the job; empty before the first rank has joined."""
        return self._ledger.job

    @property
    def last_report(self) -> ClusterReport | None:
        """The newest report."""
        return self._last_report

    @property
    def report_count(self) -> int:
        """How many reports have been made, over restarts of the aggregator."""
        return self._ledger.reports

    def hellos(self) -> Iterable[Hello]:
        """Return the introductions of all ranks."""
        return self._roster.hellos.values()

    def parameters(self) -> int | None:
        """Return P: the whole model's, or the sum of all ranks' shares once all have come."""
        return self._roster.job.parameters

    def finished(self, now_s: float) -> bool:
        """Whether every rank has left, or will not come any more, and nothing is pending."""
        is_waiting = self._joiner is not None and self._joiner.is_waiting
        return not self._pending and not self._late_rows and not is_waiting and self._presence.everyone_left(now_s)

    def awaited(self, before_s: float) -> list[int]:
        """Return the ranks that have come and not left, and of whom nothing was heard since then."""
        return self._presence.awaited(before_s)

    def give_up(self, rank: int, time_s: float) -> None:
        """Wait no more for a rank whose agent is known to be gone."""
        self._presence.give_up(rank)
        self.record(Event(time_s, "silent", f"rank {rank}: its agent has gone without a farewell", rank))

    @property
    def nobody_is_there(self) -> bool:
        """Whether ranks have come, and all of them have left or are silent."""
        return self._presence.nobody_is_there

    def all_silent(self, now_s: float) -> bool:
        """Whether nobody that has not left has been heard for long."""
        return self._presence.all_silent(now_s)

    def close_all(self) -> None:
        """Close whatever is pending: the end has come."""
        if self._joiner is not None:
            self._enter_joined(self._joiner.tick(math.inf, 0, is_over=True), math.inf)
        for window in sorted(self._pending):
            self._close(window)
        self._late_s, self._most_late = -math.inf, sys.maxsize
        self._events += self._limit.roll(math.inf)

    def summary(self, time_s: float, ended: bool) -> Summary:
        """Return the run as it stands."""
        kind = self._config.parameters
        summary = summary_of(self._ledger, self._roster, kind, self._last_report, time_s, ended)
        counts = {"rejected": self.garbage, "duplicate": self.duplicates}  # told once, counted each time
        events = summary.events | {kind: count for kind, count in counts.items() if count}
        status = "stalled" if self._stalls.is_status and summary.status != "completed" else summary.status
        return replace(summary, events=events, status=status)

    # --- windows ---

    def _may_close(self) -> bool:
        # A count, because this is asked for every report of up to 10,000 ranks; what it misses, a tick finds.
        if not self._pending:
            return False
        return len(self._pending[self._order[0]].rows) + self._presence.num_away >= self._ledger.world_size

    def _close_ready(self, now_s: float, heard_until_s: float = -math.inf) -> None:
        self._is_closing, room = True, MAX_CLOSING_ROWS
        while self._pending and room > 0:
            window = self._order[0]
            pending = self._pending[window]
            # Windows far ahead that few ranks report are closed one by one, not all before the others come to them.
            is_shared = 2 * len(pending.rows) > self._ledger.world_size - self._presence.num_away
            since_s = pending.first_s if is_shared else max(pending.first_s, self._closed_s)
            overdue = heard_until_s - since_s > self._deadline_s()
            is_whole = len(pending.rows) == self._ledger.world_size
            if not overdue and not is_whole and self._presence.is_behind(window, now_s):
                self._is_closing = False
                return
            self._pass_time(now_s)
            self._closed_s = now_s
            room -= 0 if is_whole else CLOSING_ROWS + len(pending.rows)
            self._close(window)
        self._is_closing = bool(self._pending)

    def _deadline_s(self) -> float:
        return max(3 * statistics.median(self._spans_s), MIN_DEADLINE_S) if self._spans_s else ABSENT_AFTER_S

    def _close(self, number: int) -> None:
        ledger = self._ledger
        if self._joiner is not None:
            ledger.joined_until = self._joiner.end_of(number)
            self._enter_joined(self._joiner.take(number), self._closed_s)  # of ranks that are behind
        ledger.closed = number
        heapq.heappop(self._order)  # windows close in order
        pending = self._pending.pop(number)
        for rank in pending.rows:
            self._held[rank].release()
        window = self._weigh(number, pending.rows, pending.gathered)
        rows = window.ordered
        window.warming = ledger.warm(number, rows, self._config.warmup_iterations, self._config.warmup_seconds)
        ledger.count_rows(number, rows)
        self._count_devices(window)
        ledger.advance(rows)
        self._judge_losses(rows, rows[-1].end_time_s)
        self._recent[number] = window.without_reports() if is_large(len(window.rows)) else window
        while len(self._recent) > RECENT:
            del self._recent[min(self._recent)]
        if rows.iterations > 0:
            self._spans_s = [*self._spans_s[-15:], float(rows.numbers["wall_s"].max())]
        absent = sorted(self._roster.absent(window.ranks))
        if absent:
            self.record(Event(rows[-1].end_time_s, "missing", f"window {number} closed without rank {named(absent)}"))
        self._stragglers.close(rows)
        self._emit(window)
        if any(map(attrgetter("reset"), rows)):
            ledger.reset_run(number)

    def _judge_losses(self, rows: Rows, time_s: float) -> None:
        if (event := losses.judge(rows, self._ledger, time_s)) is not None:
            self.record(event)

    def _weigh(self, number: int, rows: dict[int, RankReport], gathered: Gathered | None = None) -> Window:
        window = Window(number, rows, None, None)
        window.by_rank = Rows.by_rank(rows, gathered)
        window.merged = merge_devices(window.ordered, self._roster.expected(rows), self._roster.sitting(rows))
        self._weigh_energy(window)
        return window

    def _weigh_energy(self, window: Window) -> None:
        roster, ranks = self._roster, window.ranks
        assert window.merged is not None
        devices = roster.expected(ranks)
        unknown, blind = roster.absent(ranks) - roster.hellos.keys(), roster.blind(ranks)
        # Their energy is unknown while others train; what ranks do after the last iteration differs by little.
        left = (
            roster.devices.keys() - devices.keys()
            if self._presence.num_left and window.ordered.iterations > 0
            else set()
        )
        # The first window decides: of the scopes that every node has, the widest that was measured for most of it.
        weighed = [
            (scope, window_energy(window.merged, devices, len(unknown), len(blind), scope, left))
            for scope in roster.job.scopes
        ]
        scope, window.energy = max(weighed, key=lambda one: min(one[1].coverage or 0.0, MOST))
        roster.settle(scope)

    def _count_devices(self, window: Window, sign: int = 1) -> None:
        if window.merged is not None and window.energy is not None:
            least = self._config.min_coverage
            self._ledger.count_devices(window.number, window.ordered, window.merged, window.energy, least, sign)

    def _take_late(self, now_s: float, time_s: float) -> None:
        """Let late rows into the totals; the windows that they belong to stay as they were shown."""
        self._pass_time(now_s, time_s)
        is_limited = not is_large(self._ledger.world_size)  # there they are taken together, and seldom
        numbers = sorted(self._late_rows)[: self._most_late if is_limited else None]
        self._late_s = now_s + (LATE_WINDOW_S * len(numbers) if is_limited else 0.0)
        for number in numbers:
            rows = self._late_rows.pop(number)
            for rank in rows:
                self._held[rank].release()
            self._complete(number, rows, time_s)

    def _complete(self, number: int, rows: dict[int, RankReport], time_s: float) -> None:
        self._ledger.late += len(rows)
        ranks = sorted(rows)
        for rank in ranks if len(ranks) <= MAX_NAMED else ():
            self.record(Event(time_s, "late", f"rank {rank} reported window {number} after it had closed", rank))
        if len(ranks) > MAX_NAMED:
            text = f"{len(ranks)} ranks reported window {number} after it had closed: {named(ranks)}"
            self.record(Event(time_s, "late", text))
        window = late = Window(number, rows, None, None)
        self._ledger.count_rows(number, window.ordered)
        self._judge_losses(window.ordered, time_s)
        if recent := self._recent.get(number):
            self._count_devices(recent, sign=-1)
            window = self._weigh(number, self._both(recent.rows, rows)) if recent.rows else self._join(recent, rows)
            self._recent[number] = window
            self._count_devices(window)
        if self._last_report:
            window.warming = self._last_report.warming_up
            self._emit(window, late)

    def _both(self, known: dict[int, RankReport], late: dict[int, RankReport]) -> dict[int, RankReport]:
        """Return the rows of a window with late ones, which may be the rest of what a rank had sent of it."""
        if self._joiner is None:
            return {**known, **late}
        rows = dict(known)
        for row in late.values():
            put(rows, row)
        return rows

    def _join(self, recent: Window, rows: dict[int, RankReport]) -> Window:
        """Return a window whose rows are forgotten with more of them: a device that it has stays as it is."""
        assert recent.merged is not None
        known = recent.merged.positions
        news = [
            replace(row, devices=tuple(one for one in row.devices if one.device not in known)) for row in rows.values()
        ]
        window = Window(recent.number, {}, None, None)
        window.by_rank = recent.ordered.merge(Rows(news))
        devices = self._roster.expected(window.ranks)
        window.merged = recent.merged.merge(merge_devices(news, devices, self._roster.sitting(window.ranks)))
        self._weigh_energy(window)
        return window

    def _emit(self, window: Window, late: Window | None = None) -> None:
        """Report a window; of its correction the late rows alone are given out, for the others have been."""
        least, last, correction = self._config.min_coverage, self._last_report, late is not None
        report = report_of(window, self._ledger, self._roster, least, last, correction)
        self._ledger.reports += 1
        self._last_report = report
        self._closed.append(Closed(report, (late or window).ordered))
        if not correction:
            for kind, text in doubts(report, self._roster):
                self._state(Event(report.time_s, kind, text), once=kind)
            self._energy.close(window.ordered, report)
            self._waste.close(report)

    def safe(self) -> dict[int, int]:
        """Return the last sequence of each rank whose report, and all before it, is in a window that has closed."""
        pending: dict[int, int] = self._joiner.sequences if self._joiner is not None else {}
        for rows in (*(one.rows for one in self._pending.values()), *self._late_rows.values()):
            for rank, row in rows.items():
                pending[rank] = min(pending.get(rank, row.sequence), row.sequence)
        return {
            rank: pending[rank] - 1 if rank in pending else known.last_sequence
            for rank, known in self._ledger.ranks.items()
        }

    # --- what is said ---

    def _pass_time(self, now_s: float, time_s: float | None = None) -> None:
        set_by_s = self._ledger.goodput.clock.advance(now_s, time_s, self._boot)
        if self._heard_s is not None:
            self._ledger.goodput.hear(now_s - self._heard_s)
        if set_by_s is not None and time_s is not None:
            text = f"the clock of the aggregator's host was set by {set_by_s:+.0f} s: no time of this run counts that"
            self.record(Event(time_s, "clock", text))

    @staticmethod
    def _spend(rank: RankState, message: Reports | Bye) -> None:
        if message.agent_cpu_s > rank.agent_cpu_s:
            rank.agent_cpu_s = message.agent_cpu_s
        if message.sent_bytes > rank.sent_bytes:
            rank.sent_bytes = message.sent_bytes
        if message.recorder_cpu_s is not None:
            rank.recorder_cpu_s = max(rank.recorder_cpu_s or 0.0, message.recorder_cpu_s)

    def note_own(self, cpu_s: float, received_bytes: int) -> None:
        """Take what this process has cost so far."""
        self._ledger.serving_cpu_s, self._ledger.serving_bytes = cpu_s, received_bytes

    def _hear(self, rank: int, now_s: float, time_s: float) -> None:
        if not self._ledger.ranks[rank].bye:  # an agent stays on a while, for the summary
            self._heard_s = now_s
        if self._presence.hear(rank, now_s):
            self.record(Event(time_s, "back", f"rank {rank} is back", rank))

    def _lose(self, number: int, rank: RankState, lost: int, time_s: float) -> None:
        if lost > rank.lost:
            why = "an aggregator died before they were written" if lost == rank.gaps else "its buffer was full"
            self.record(Event(time_s, "lost", f"rank {number} lost {lost - rank.lost} reports: {why}", number))
            rank.lost = lost

    def _state(self, event: Event, once: str = "") -> None:
        """Record the event of a state that is stated again and again, the first time."""
        stated = self._stated.setdefault(event.kind, set())
        if (once or event.text) not in stated and len(stated) < MAX_STATED:
            stated.add(once or event.text)
            self.record(event)
