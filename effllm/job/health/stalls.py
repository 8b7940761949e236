"""Reports stalls, requests stacks from agents, and counts the time of stalls. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from effllm.config.settings import Config
from effllm.job.health.hang import BETWEEN, STARTUP, STEP, STOPPED, Hang, RankPosition, Stall
from effllm.job.ledger import Ledger
from effllm.job.roster import Roster
from effllm.records.clock import Now
from effllm.records.rank import Event, RankReport
from effllm.records.wire import Heartbeat, Hello, Stack
from effllm.views.text.numbers import duration as long_duration

MAX_NAMED = 8  # maximum number of ranks by name in an event
MAX_GROUPS = 3  # maximum number of positions by name in an event
IN_STARTUP = "in start-up"
MAX_STACKS = 100  # maximum number of stack files per aggregator
ANSWER_S = 30.0  # timeout of a request for a stack


class StackFile(NamedTuple):
    """A file of stacks in the run folder."""

    name: str
    text: str


class Stalls:
    """The stalls of a job."""

    def __init__(self, config: Config, roster: Roster, ledger: Ledger, report: Callable[[Event], None]) -> None:
        self._hang = Hang(config.stall_seconds, ledger.iteration_s())
        self._roster, self._ledger, self._report = roster, ledger, report
        self._shown_minus_ordinal: int | None = None  # of the iterations in reports; None before the first one
        self._deadlines: dict[int, float] = {}  # rank with a requested stack -> deadline of the answer
        self._tops: dict[int, str] = {}  # innermost frame of each received stack
        self._ranks_to_ask: list[int] = []  # for the next call of `take_ranks_to_ask`
        self._files: list[StackFile] = []  # for the next call of `take_files`
        self._num_stacks = 0  # number of files so far
        self._taken_s = 0.0  # seconds of stalls that `take_new_stall_s` has returned
        self._failed_before_stall = False  # whether a rank had failed before the newest stall
        self._incomplete: dict[int, str] = {}  # ranks that left without completing -> status of the BYE

    # --- inputs ---

    def hello(self, message: Hello, is_new: bool, now_s: float) -> None:
        if is_new:
            self._incomplete.pop(message.rank, None)
        self._hang.join(message, is_new, now_s)

    def heartbeat(self, message: Heartbeat, now_s: float) -> None:
        self._hang.heartbeat(message, now_s)

    def row(self, row: RankReport, now_s: float) -> None:
        self._hang.row(row, now_s)
        last = row.iteration_last
        if last >= row.iteration_first:
            self._shown_minus_ordinal = row.iteration_shown - last

    def bye(self, rank: int, status: str, now_s: float) -> None:
        self._hang.leave(rank, status == "completed", now_s)
        if status != "completed":
            self._incomplete[rank] = status

    def stack(self, message: Stack, time_s: float) -> bool:
        """Store the stack of a rank; return ``False`` if it was not requested."""
        if self._deadlines.pop(message.rank, None) is None:
            return False
        if self._num_stacks < MAX_STACKS:
            self._num_stacks += 1
            name = f"rank-{message.rank}-iteration-{message.ordinal + self._displayed_offset}.txt"
            self._files.append(StackFile(name, message.text))
        self._tops[message.rank] = message.top
        self._report_stacks(time_s)
        return True

    def tick(self, now: Now) -> None:
        for verdict in self._hang.take_verdicts(now.mono_s, self._roster.presence.lost):
            if isinstance(verdict, Stall):
                self._report_stall(verdict, now)
            else:
                self._report(Event(now.unix_s, "resumed", f"resumed after {seconds_text(verdict.unmoved_s)}"))
                self._deadlines, self._tops = {}, {}
        overdue = [rank for rank, deadline_s in self._deadlines.items() if now.mono_s > deadline_s]
        for rank in overdue:
            del self._deadlines[rank]
            self._tops[rank] = "the agent has not answered"
        if overdue:
            self._report_stacks(now.unix_s)

    # --- outputs ---

    def take_new_stall_s(self, now_s: float) -> float:
        """Return the seconds of stalls since the last call; an excess of a result is subtracted from the next ones."""
        new_s = max(self._hang.total_s(now_s) - self._taken_s, 0.0)
        self._taken_s += new_s
        return new_s

    def take_ranks_to_ask(self) -> list[int]:
        """Return the ranks whose stacks must be requested; each rank is returned once."""
        ranks, self._ranks_to_ask = self._ranks_to_ask, []
        return ranks

    def take_files(self) -> list[StackFile]:
        files, self._files = self._files, []
        return files

    @property
    def is_job_stalled(self) -> bool:
        """Whether the job is stalled, and no rank failed before the stall; if so, the job's final status is stalled."""
        return self._hang.since_s is not None and not self._failed_before_stall

    # --- events ---

    @property
    def _displayed_offset(self) -> int:
        """Displayed number of an iteration minus its ordinal."""
        if self._shown_minus_ordinal is not None:
            return self._shown_minus_ordinal
        return next((hello.offset for hello in self._roster.hellos.values()), 0)

    def _report_stall(self, stall: Stall, now: Now) -> None:
        roster, world_size = self._roster, self._ledger.world_size
        heard_s, lost = roster.presence.heard_s, roster.presence.lost
        lost_s = {rank: now.mono_s - heard_s[rank] for rank in lost if rank not in self._incomplete}
        left = {rank: status for rank, status in self._incomplete.items() if rank < world_size}
        num_missing = max(world_size - len(roster.hellos), 0)
        names = PositionNames(self._host_and_device, self._displayed_offset)
        text = stall_text(stall, self._hang.ranks, names, now.mono_s, lost_s, left, num_missing)
        (_, behind), *_ = stall.groups
        self._report(Event(now.unix_s, "stalled", text, behind[0] if len(behind) == 1 else None))
        self._failed_before_stall = "failed" in self._incomplete.values()
        self._request_stacks(stall, now.mono_s)

    def _request_stacks(self, stall: Stall, now_s: float) -> None:
        """Request the stacks of the ranks that are behind and of a rank that is furthest ahead, once per stall."""
        (_, behind), *others = stall.groups
        ahead = others[-1][1] if others else ()
        new = [rank for rank in (*behind[:MAX_NAMED], *ahead[:1]) if rank not in {*self._deadlines, *self._tops}]
        self._ranks_to_ask += new
        self._deadlines |= dict.fromkeys(new, now_s + ANSWER_S)

    def _report_stacks(self, time_s: float) -> None:
        """Report the innermost frames of the stacks, after the last answer to the requests."""
        if self._deadlines or not self._tops:
            return
        ranks_by_top: dict[str, list[int]] = {}
        for rank, top in self._tops.items():
            ranks_by_top.setdefault(top or "unknown", []).append(rank)
        names = {top: ", ".join(map(str, sorted(ranks))) for top, ranks in ranks_by_top.items()}
        parts = [f"rank{'s' if len(ranks_by_top[top]) > 1 else ''} {names[top]}: {top}" for top in names]
        self._report(Event(time_s, "stack", f"stacks are in stacks/ of the run folder: {'; '.join(parts)}"))

    def _host_and_device(self, rank: int) -> str:
        hello = self._roster.hellos[rank]
        device = next((device.key for device in hello.devices if not device.only_power), "")
        return f"node {hello.host}, {device}" if device else f"node {hello.host}"


class PositionNames(NamedTuple):
    """Names of ranks and iterations."""

    host_and_device: Callable[[int], str]  # of a rank
    shown_minus_ordinal: int  # displayed number of an iteration minus its ordinal

    def text_of(self, position: RankPosition) -> str:
        """Return the current or last iteration of a rank, and its state."""
        if position.state == STARTUP or (position.state == STEP and not position.ordinal):
            return IN_STARTUP
        number = str(position.ordinal + self.shown_minus_ordinal)
        state = "ended" if position.state == BETWEEN else position.state
        return number if position.state == STEP else f"{number} ({state})"


def stall_text(
    stall: Stall,
    ranks: Mapping[int, RankPosition],
    names: PositionNames,
    now_s: float,
    lost_s: Mapping[int, float],
    left: Mapping[int, str],
    num_missing: int,
) -> str:
    """Return the text of a stall: the ranks that are furthest behind, other ranks, and ranks of unknown state.

    Lost ranks have the seconds since their last heartbeat.  Ranks that have ``left`` sent a BYE with this status, but
    did not complete; missing ranks never joined.
    """
    (_, behind), *others = stall.groups
    parts = [f"stalled: {_behind_text(behind, [ranks[rank] for rank in behind], names, now_s, not others)}"]
    for position, group in others[:MAX_GROUPS]:
        position_text = names.text_of(position)
        stopped = ", stopped" if position.process == STOPPED else ""
        where = position_text if position_text == IN_STARTUP else f"at {position_text}"
        parts.append(f"{len(group)} other{'s' if len(group) > 1 else ''} {where}{stopped}")
    if len(others) > MAX_GROUPS:
        parts.append(f"{sum(len(group) for _, group in others[MAX_GROUPS:])} at other positions")
    parts += [
        f"rank {rank} ({names.host_and_device(rank)}): no heartbeat for {seconds_text(lost_s[rank])}"
        for rank in sorted(lost_s)[:MAX_NAMED]
    ]
    if len(lost_s) > MAX_NAMED:
        parts.append(f"{len(lost_s) - MAX_NAMED} more ranks without a heartbeat")
    if left:
        named = ", ".join(f"{rank} ({left[rank]})" for rank in sorted(left)[:MAX_NAMED])
        parts.append(f"left: rank{'s' if len(left) > 1 else ''} {named}{', ...' if len(left) > MAX_NAMED else ''}")
    if num_missing:
        parts.append(f"{num_missing} ranks never joined")
    return "; ".join(parts)


def _behind_text(
    behind: Sequence[int], positions: Sequence[RankPosition], names: PositionNames, now_s: float, is_all: bool
) -> str:
    """Return the text of the ranks that are furthest behind, at equal positions: names, position and readings."""
    unmoved_s = now_s - max(position.since_s for position in positions)
    position_text = names.text_of(positions[0])
    where = position_text if position_text == IN_STARTUP else f"at iteration {position_text}"
    facts = [f"{where} for {seconds_text(unmoved_s)}"]
    if positions[0].process == STOPPED:
        facts.append("stopped by a signal")
    facts += _readings_texts(positions)
    if len(behind) == 1:
        who = f"rank {behind[0]} ({names.host_and_device(behind[0])})"
    elif is_all:
        who = f"all {len(behind)} ranks"
    elif len(behind) <= MAX_NAMED:
        who = "ranks " + ", ".join(f"{rank} ({names.host_and_device(rank)})" for rank in behind)
    else:
        who = f"{len(behind)} ranks ({', '.join(map(str, behind[:MAX_NAMED]))}, ...)"
    return f"{who} {', '.join(facts)}"


def _readings_texts(positions: Sequence[RankPosition]) -> list[str]:
    readings = []
    if busy := _range_text((position.utilization for position in positions), 100):
        readings.append(f"utilization {busy} %")
    if watts := _range_text((position.power_w for position in positions), 1):
        readings.append(f"{watts} W")
    return readings


def _range_text(values: Iterable[float | None], factor: float) -> str:
    numbers = [round(value * factor) for value in values if value is not None]
    if not numbers:
        return ""
    return str(numbers[0]) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text: in seconds below 15 minutes, else in hours and minutes."""
    return f"{seconds:.0f} s" if seconds < 900 else long_duration(seconds)
