"""Makes reports of the job from messages of ranks and from time. No I/O, so tests need no socket."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from effllm.config.settings import Config
from effllm.job.closed_windows import ClosedWindows, EventLog
from effllm.job.goodput_tiles import MAX_BEFORE_S
from effllm.job.health.stalls import Stalls
from effllm.job.health.stragglers import Stragglers
from effllm.job.ledger import Ledger, RankState
from effllm.job.open_windows import OpenWindows
from effllm.job.pacing import is_large, late_every_s
from effllm.job.reporting import summary_of
from effllm.job.roster import Roster
from effllm.job.verdict import verdict_of
from effllm.records.clock import Now
from effllm.records.host_lines import RecordedStacks
from effllm.records.job import SCHEMA_VERSION, Summary
from effllm.records.rank import MAX_EVENT_COUNT, Event
from effllm.records.wire import AgentEvent, Bye, Heartbeat, Hello, HostSamples, Reports, Stack

MAX_RECORDINGS = 16  # maximum number of recordings of stacks that wait for the run folder
MAX_BACKLOG_S = 15.0  # a processing delay of the aggregator up to this limit makes no rank late


class Statements:
    """Adds what ranks state about themselves, such as lost reports, to their states; rejects impossible statements."""

    def __init__(self, ledger: Ledger, record: Callable[[Event], None]) -> None:
        self._ledger, self._record = ledger, record

    @property
    def max_covered_s(self) -> float:
        """Time that the reports of a rank can cover so far."""
        return (self._ledger.goodput.clock.at_s or 0.0) + MAX_BEFORE_S

    def reject_report(self, rank: int, sequence: int, covered_s: float, time_s: float) -> None:
        """Reject a report with which the reports of its rank would cover ``covered_s``, more than `max_covered_s`."""
        state = self._ledger.ranks[rank]
        state.reject_report(sequence)
        self._count_implausible(rank, state, f"reports of {covered_s:,.0f} s", time_s)

    def note_dropped(self, rank: int, state: RankState, total_lost: int, max_made: int, time_s: float) -> None:
        """Record how many reports an agent has dropped so far; it has made ``max_made`` reports at most."""
        if total_lost > max_made:
            self._count_implausible(rank, state, f"{total_lost:,} lost reports", time_s)
        else:
            self.note_lost(rank, state, total_lost, "the agent's buffer was full", time_s)

    def note_lost(self, rank: int, state: RankState, total_lost: int, why: str, time_s: float) -> None:
        """Record the number of reports that a rank has lost so far; an event if it has grown."""
        if total_lost > state.lost:
            text = f"rank {rank} lost {total_lost - state.lost} reports: {why}"
            self._record(Event(time_s, "reports_lost", text, rank))
            state.lost = total_lost

    def _count_implausible(self, rank: int, state: RankState, what: str, time_s: float) -> None:
        """Count an impossible statement by rank; the first one of a rank is an event."""
        state.implausible += 1
        if state.implausible == 1:
            text = f"rank {rank} stated {what}, which is not possible: rejected, like all such values of this rank"
            self._record(Event(time_s, "implausible", text, rank))


class Aggregator:
    """Combines the reports of ranks into the metrics of the whole job.

    Args:
        job: random id of the job; if empty, the id in the first HELLO.
        time_s: unix time of the start.
        ledger: state of a killed aggregator.
        boot: id of this machine's monotonic clock; empty if unknown.
    """

    def __init__(
        self, config: Config, job: str, attempt: int, time_s: float, ledger: Ledger | None = None, boot: str = ""
    ) -> None:
        self._config, self._boot = config, boot
        self.ledger = ledger = ledger or Ledger(attempt=attempt, job=job, started_time_s=time_s)
        self.roster = Roster(config, ledger)
        self.presence = self.roster.presence
        self.events = EventLog(ledger)
        self._statements = Statements(ledger, self.events.record)
        self.stalls = Stalls(config, self.roster, ledger, self.events.record)
        self._stragglers = Stragglers(ledger.stragglers, ledger.last_ranks)
        self.open_windows = OpenWindows(config, ledger, self.presence)
        self.closed_windows = ClosedWindows(config, ledger, self.roster, self.events, self._stragglers)
        self._recordings: list[RecordedStacks] = []  # which are not in the run folder yet
        self._heard_s: float | None = None  # time of the last message of any rank that has not left
        self.garbage = 0  # number of rejected frames, and of messages and reports of unknown agents
        self.duplicates = 0  # number of reports that had already been received

    # --- received messages ---

    def hello(self, message: Hello, now: Now) -> str:
        """Handle a HELLO; return the reason why it is rejected, or an empty string."""
        rank = message.rank
        reason = self.roster.rejection_reason(message, now.mono_s)
        if reason:
            text = f"rank {rank} on {message.host} was rejected: {reason}"
            self.events.record(Event(now.unix_s, "rejected", text, rank))
            return reason
        is_new = self.roster.admit(message, now.mono_s)
        if is_new:
            self.events.record(Event(now.unix_s, "joined", f"rank {rank} joined from {message.host}", rank))
        self.stalls.hello(message, is_new, now.mono_s)
        self._stragglers.peers.hello(message)
        self._note_message(rank, self.ledger.ranks[rank], now)
        self._advance_time(now.mono_s, now.unix_s)
        self.ledger.goodput.note_hello(message, is_new)
        for device in message.devices:
            for sentence in device.not_measured:
                self.events.record_once(Event(now.unix_s, "not_measured", sentence))
        disagreement = self.roster.note_parameters(message)
        if disagreement:
            self.events.record_once(Event(now.unix_s, "disagreement", disagreement, rank), "parameters")
        return ""

    def reports(self, message: Reports, now: Now, num_bytes: int = 0) -> bool:
        """Handle reports of a rank, in a message of ``num_bytes``; duplicates are dropped and counted.

        Returns:
            ``False`` if the rank has more open windows than an agent stores.  Then the rest of the message and all
            following reports must be rejected until the agent sends the rest again.
        """
        # This method is called up to ten thousand times a second.
        rows, now_s, open_windows, states = message.rows, now.mono_s, self.open_windows, self.ledger.ranks
        row_bytes, has_room, max_covered_s = num_bytes // (len(rows) or 1), True, self._statements.max_covered_s
        for row in rows:
            rank, sequence = row.rank, row.sequence
            state = states.get(rank)
            if state is None or state.agent != row.agent:
                self.garbage += 1
                continue
            self._note_message(rank, state, now)
            if row is rows[-1]:  # once per message
                state.update_costs(message)
            if message.lost > state.lost:
                self._statements.note_dropped(rank, state, message.lost, rows[-1].sequence, now.unix_s)
            if sequence <= state.last_sequence:
                self.duplicates += 1
                continue
            covered_s = state.covered_s + max(row.wall_s, row.busy_s + row.wait_s)
            if covered_s > max_covered_s:
                self._statements.reject_report(rank, sequence, covered_s, now.unix_s)
                continue
            if not open_windows.reserve_room(rank, row_bytes):
                has_room = False
                break
            state.record_report(sequence, row.final)
            if state.gaps > state.lost:
                why = "an aggregator died before it wrote them"
                self._statements.note_lost(rank, state, state.gaps, why, now.unix_s)
            state.covered_s, state.iteration = covered_s, row.iteration_last
            self.stalls.row(row, now_s)
            open_windows.add_report(row, now_s)
        if open_windows.has_late(now_s) and not is_large(self.ledger.world_size):
            self._complete_late_windows(now)
        if open_windows.may_close():
            self._close_ready_windows(now_s)
        return has_room

    def heartbeat(self, message: Heartbeat, now: Now) -> None:
        state = self.roster.state_of(message.rank, message.agent)
        if state is not None:
            self._note_message(message.rank, state, now)
            max_made = message.ordinal + 1  # each report contains an iteration, except perhaps the last report
            self._statements.note_dropped(message.rank, state, message.lost, max_made, now.unix_s)
            if message.time_s is not None and not state.bye:
                self._advance_time(now.mono_s, now.unix_s)
                self.ledger.goodput.note_message(message.rank, message.time_s)
            self.stalls.heartbeat(message, now.mono_s)

    def stack(self, message: Stack, now: Now) -> None:
        """Handle the stack of a trainer in a stall; a stack without a request is counted as garbage."""
        state = self.roster.state_of(message.rank, message.agent)
        if state is None or not self.stalls.stack(message, now.unix_s):
            self.garbage += 1
        else:
            self._note_message(message.rank, state, now)

    def host_samples(self, message: HostSamples, now: Now) -> None:
        """Add the lines of code of a recording."""
        if (state := self.roster.state_of(message.rank, message.agent)) is not None:
            self._note_message(message.rank, state, now)
            self.ledger.host_lines.add_samples(message)
            if message.stacks and len(self._recordings) < MAX_RECORDINGS:
                origin = SCHEMA_VERSION, now.unix_s, message.rank, self.ledger.attempt
                self._recordings.append(RecordedStacks(*origin, message.samples, message.torn, message.stacks))

    def take_recordings(self) -> list[RecordedStacks]:
        recordings, self._recordings = self._recordings, []
        return recordings

    def agent_event(self, message: AgentEvent, now: Now) -> None:
        """Record an event of an agent with its own time, limited to the time of the run."""
        if (state := self.roster.state_of(message.rank, message.agent)) is not None:
            self._note_message(message.rank, state, now)
            event, count = message.event, min(message.event.count, MAX_EVENT_COUNT)
            happened_s = min(max(event.time_s, self.ledger.started_time_s), now.unix_s)
            text = f"rank {message.rank}: {event.text}"
            self.events.record(replace(event, time_s=happened_s, text=text, rank=message.rank, count=count))

    def bye(self, message: Bye, now: Now) -> bool:
        """Handle a BYE; return ``False`` if the agent is unknown."""
        state = self.roster.state_of(message.rank, message.agent)
        if state is None:
            self.garbage += 1
            return False
        self._note_message(message.rank, state, now)
        state.last_ordinal = message.last_ordinal
        self._statements.note_dropped(message.rank, state, message.lost, message.last_ordinal + 1, now.unix_s)
        self._record_gpu_events(now)  # the devices of a short job may be known only since the last tick
        state.update_costs(message)
        self._advance_time(now.mono_s, now.unix_s)
        self.ledger.goodput.note_bye(message.rank, message.end_time_s, message.last_ordinal)
        if self.presence.note_bye(state, message.status, now.mono_s):
            self.events.record(Event(now.unix_s, "left", f"rank {message.rank} left: {state.bye}", message.rank))
            self.stalls.bye(message.rank, state.bye, now.mono_s)
        if self.open_windows.may_close():
            self._close_ready_windows(now.mono_s)
        return True

    def reject_frame(self, time_s: float, reason: str) -> None:
        """Count a frame that is not a message, and record the reason."""
        self.garbage += 1
        self.events.record(Event(time_s, "garbage", f"a frame was rejected: {reason}"))

    def tick(self, now: Now, heard_until_s: float | None = None) -> None:
        """Advance the time: record lost ranks, and close windows whose deadline has passed.

        Ranks are late as of ``heard_until_s``: all frames that arrived before this time have been handled.
        """
        now_s, ledger = now.mono_s, self.ledger
        heard_until_s = now_s if heard_until_s is None else max(heard_until_s, now_s - MAX_BACKLOG_S)
        for rank, seconds in self.presence.take_newly_lost(heard_until_s).items():
            text = f"rank {rank} is lost: no heartbeat for {seconds:.0f} s"
            self.events.record(Event(now.unix_s, "rank_lost", text, rank))
        self._advance_time(now_s, now.unix_s)
        if self.open_windows.has_late(now_s, for_s=late_every_s(ledger.world_size)):
            self._complete_late_windows(now)
        self.stalls.tick(now)
        self._record_gpu_events(now)
        ledger.note_hang(self.stalls.take_new_stall_s(now_s))
        self.open_windows.join_overdue(now_s)
        self._close_ready_windows(now_s, heard_until_s)
        self.events.add_suppressed_counts(now_s)

    # --- results ---

    def add_late_reports(self, now: Now) -> None:
        """Add late reports to the totals before the state is saved, because the state cannot record missing reports."""
        # In a large world, which collects them for seconds, they do not wait for their turn.
        if self.open_windows.has_late(now.mono_s, for_s=-math.inf if is_large(self.ledger.world_size) else 0.0):
            self._complete_late_windows(now)

    def snapshot(self, safe: dict[int, int] | None = None) -> bytes:
        """Return the state as JSON, for a restarted aggregator; ``safe`` is from `OpenWindows.safe_sequences`."""
        return self.ledger.encode(self.open_windows.safe_sequences() if safe is None else safe)

    def is_finished(self, now_s: float) -> bool:
        """Whether no window is open, and every rank has left or will not join."""
        return self.open_windows.is_empty and self.presence.everyone_left(now_s)

    def mark_lost(self, rank: int, time_s: float) -> None:
        """Mark a rank as lost, because its agent has ended."""
        self.presence.mark_lost(rank)
        self.events.record(Event(time_s, "rank_lost", f"rank {rank} is lost: its agent ended without a BYE", rank))

    def close_all(self) -> None:
        for window in self.open_windows.take_all_windows():
            self.closed_windows.close_window(window)
        self.events.add_suppressed_counts()

    def summary(self, time_s: float, ended: bool) -> Summary:
        summary = summary_of(self.ledger, self.roster, self.closed_windows.last_report, time_s, ended)
        implausible = sum(rank.implausible for rank in self.ledger.ranks.values())
        counts = {"rejected": self.garbage, "duplicate": self.duplicates, "implausible": implausible}
        events = summary.events | {kind: count for kind, count in counts.items() if count}
        status = "stalled" if self.stalls.is_job_stalled and summary.status != "completed" else summary.status
        summary = replace(summary, events=events, status=status)
        facts, ranks_by_status = self.roster.job.facts, self.ledger.ranks_by_status() if ended else {}
        verdict = verdict_of(summary, facts, self.ledger.goodput, self._config.profile_every, ranks_by_status)
        return replace(summary, verdict=verdict)

    # --- windows and time ---

    def _close_ready_windows(self, now_s: float, heard_until_s: float = -math.inf) -> None:
        for window in self.open_windows.take_ready_windows(now_s, self.closed_windows.timeout_s, heard_until_s):
            self._advance_time(now_s)
            self.closed_windows.close_window(window)

    def _complete_late_windows(self, now: Now) -> None:
        self._advance_time(now.mono_s, now.unix_s)
        for number, rows in self.open_windows.take_late_reports(now.mono_s):
            self.closed_windows.complete_window(number, rows, now.unix_s)

    def _record_gpu_events(self, now: Now) -> None:
        for text in self.roster.record_unused_gpus():
            self.events.record(Event(now.unix_s, "gpus_unused", text))
        # Before the first window, a process may have shown a GPU that it only touched.
        if self.closed_windows.last_merged is not None and (text := self.roster.job.shared_gpu):
            self.events.record_once(Event(now.unix_s, "gpu_shared", text), "gpu")

    def _advance_time(self, now_s: float, time_s: float | None = None) -> None:
        self.ledger.goodput.clock.advance(now_s, time_s, self._boot)
        if self._heard_s is not None:
            self.ledger.goodput.note_last_message(now_s - self._heard_s)

    def _note_message(self, rank: int, state: RankState, now: Now) -> None:
        if not state.bye:  # after its BYE an agent still runs until the summary is written
            self._heard_s = now.mono_s
        if self.presence.note_message(rank, now.mono_s):
            self.events.record(Event(now.unix_s, "back", f"rank {rank} is back", rank))
