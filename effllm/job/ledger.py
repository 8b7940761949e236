"""The running state of a job, from which a restarted aggregator continues. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from effllm.job.account import Account, Rows
from effllm.job.audit import AuditState
from effllm.job.energy_account import EnergyTotals
from effllm.job.forecast import Progress
from effllm.job.goodput import Goodput
from effllm.job.host_lines import HostLines
from effllm.job.iteration_losses import IterationLosses
from effllm.job.memory_pressure import MemoryPressure
from effllm.job.slow_clocks import SlowClocks
from effllm.records.columns import from_json, to_json
from effllm.records.job import SCHEMA_VERSION, HealthTotals, Overhead, version_error
from effllm.records.rank import MARKED_PHASES, SHUTDOWN, STARTUP, ValueStatistics
from effllm.records.verdict import LastRanks, StragglerVerdict
from effllm.records.wire import Bye, Reports

CLASSES = ("iterations", *MARKED_PHASES, STARTUP, SHUTDOWN)  # of time and of energy, in the order of the output
_COSTS = attrgetter("agent_cpu_s", "sent_bytes", "recorder_cpu_s")  # of a `RankState`


class RankState(Struct):
    """The state of one rank."""

    agent: str  # random id of the rank's agent
    last_sequence: int = 0  # sequence of the last accepted report
    last_window: int = 0  # last window that the rank has passed
    iteration: int = 0  # last iteration in its accepted reports
    bye: str = ""  # status in its BYE; empty before the BYE
    lost: int = 0  # number of its reports that never arrived
    agent_cpu_s: float = 0.0
    sent_bytes: int = 0
    recorder_cpu_s: float | None = None
    core_wait_s: float | None = None
    gaps: int = 0  # missing reports before the last accepted report
    newest_gap: int = 0  # missing reports in the newest gap
    newest_gap_before: int = 0  # sequence of the report after the newest gap
    is_over: bool = False  # whether the last report of the rank was accepted
    last_ordinal: int | None = None  # last iteration of the rank, by its BYE
    covered_s: float = 0.0  # sum of the times of its reports, since the last start of the aggregator
    implausible: int = 0  # values out of their plausible range, which were rejected

    @property
    def is_counted(self) -> bool:
        """Whether the reports up to the rank's last iteration were accepted."""
        return self.is_over or (self.last_ordinal is not None and self.iteration >= self.last_ordinal)

    def update_costs(self, message: Reports | Bye) -> None:
        """Update the costs of the rank's agent and recorder, and its wait for a core; a lower cost changes nothing."""
        if message.agent_cpu_s > self.agent_cpu_s:
            self.agent_cpu_s = message.agent_cpu_s
        if message.sent_bytes > self.sent_bytes:
            self.sent_bytes = message.sent_bytes
        if message.recorder_cpu_s is not None:
            self.recorder_cpu_s = max(self.recorder_cpu_s or 0.0, message.recorder_cpu_s)
        if message.core_wait_s is not None:
            self.core_wait_s = max(self.core_wait_s or 0.0, message.core_wait_s)

    def record_report(self, sequence: int, final: bool = False) -> None:
        """Record the receipt of a report, and the number of missing reports before it."""
        self.is_over = self.is_over or final
        missing = sequence - self.last_sequence - 1
        if missing > 0:
            self.gaps += missing
            self.newest_gap, self.newest_gap_before = missing, sequence
        self.last_sequence = sequence

    def reject_report(self, sequence: int) -> None:
        """Record a report that is not added to any sum, and count it as lost."""
        self.record_report(sequence)
        self.gaps += 1
        self.lost = max(self.lost, self.gaps)

    def as_of(self, sequence: int, closed: int) -> RankState:
        """Return the state after the report ``sequence``, if the later reports were not received; a copy if changed."""
        if sequence == self.last_sequence:
            return self
        gaps = self.gaps - (self.newest_gap if self.newest_gap_before > sequence else 0)
        state = replace(self, last_sequence=sequence, last_window=closed, gaps=gaps, bye="", is_over=False)
        return replace(state, last_ordinal=None, covered_s=0.0)


class Spent(Struct):
    """Costs and losses of the measurement in processes that have ended, and their waits for a core."""

    agents_cpu_s: float = 0.0
    recorder_cpu_s: float = 0.0
    core_wait_s: float = 0.0
    sent_bytes: int = 0
    aggregator_cpu_s: float = 0.0
    received_bytes: int = 0
    reports_lost: int = 0
    unfinished: int = 0  # ranks without a last report
    uncounted: int = 0  # ranks without the report of their last iteration

    def add_agent(self, rank: RankState) -> None:
        """Add the cost of a rank's replaced agent."""
        self.reports_lost += rank.lost
        self.unfinished += not rank.is_over
        self.uncounted += not rank.is_counted
        self.agents_cpu_s += rank.agent_cpu_s
        self.recorder_cpu_s += rank.recorder_cpu_s or 0.0
        self.core_wait_s += rank.core_wait_s or 0.0
        self.sent_bytes += rank.sent_bytes


class Ledger(Struct):
    """The sums of a job, and the state of each of its ranks."""

    attempt: int
    job: str
    started_time_s: float
    world_size: int = 0  # 0 before the first HELLO
    closed: int = 0  # last closed window of this attempt
    joined_until: int = 0  # last agent window in the last joined window, if windows are joined
    reports: int = 0  # number of reports of windows so far, with corrections
    ranks: dict[int, RankState] = {}
    run: Account = msgspec.field(default_factory=Account)  # run to date: without warm-up, and after the last reset
    whole: Account = msgspec.field(default_factory=lambda: Account(wall=True))  # base job
    devices: EnergyTotals = msgspec.field(default_factory=EnergyTotals)  # by device
    classes_j: dict[str, float] = {}  # joules by class of `CLASSES`
    classes_s: dict[str, float] = {}  # rank-seconds by class
    host_lines: HostLines = msgspec.field(default_factory=HostLines)
    late: int = 0  # number of reports that arrived after their window had closed
    loss: float | None = None  # the last finite loss
    is_loss_finite: bool = True  # whether the losses of the last window with a loss were finite
    first_not_finite: int | None = None  # displayed iteration of the first loss that was NaN or infinite
    iteration_last: int = 0  # ordinal of the last iteration in a closed window
    iteration_shown: int = 0  # displayed number of the last iteration of the last window
    events: dict[str, int] = {}  # number of events by kind
    warmed_s: float = 0.0  # iteration time of the warm-up so far
    run_after: int = 0  # last window that run-to-date values exclude, because of warm-up or a reset
    warm_until: int = 0  # last window of the warm-up of this attempt
    warmup_j: float = 0.0  # energy of warm-up iterations, of all attempts
    scope: str = ""  # power scope of the sums; empty before the first sum
    hang_s: float = 0.0  # seconds of all stalls of the job, including the current stall
    goodput: Goodput = msgspec.field(default_factory=Goodput)
    spent: Spent = msgspec.field(default_factory=Spent)
    serving_cpu_s: float = 0.0  # CPU time of the current aggregator
    serving_bytes: int = 0  # bytes that the current aggregator received
    stragglers: dict[str, StragglerVerdict] = {}  # verdicts by ranks, with the total cost
    straggling_s: float | None = None  # wait of each rank for named stragglers
    straggling_gpu_s: float = 0.0  # sum of the waits of all other ranks for named stragglers
    straggling_j: float | None = 0.0  # energy during these waits; None if a part was not measured
    waited: HealthTotals = HealthTotals()  # the waits for stragglers in the last window
    schema_version: int = SCHEMA_VERSION  # version of state.json
    last_ranks: LastRanks = LastRanks()
    values: dict[str, ValueStatistics] = {}  # values of instruments in the whole run, by name
    slow_clocks: SlowClocks = msgspec.field(default_factory=SlowClocks)
    memory_pressure: MemoryPressure = msgspec.field(default_factory=MemoryPressure)
    audit: AuditState = msgspec.field(default_factory=AuditState)
    iteration_losses: IterationLosses = msgspec.field(default_factory=IterationLosses)
    progress: Progress = msgspec.field(default_factory=Progress)

    def begin_next_attempt(self, job: str) -> None:
        """End the attempt and begin the next one: the sums stay, the ranks are reset."""
        self.goodput.end_attempt(self.status())
        for rank in self.ranks.values():
            self.spent.add_agent(rank)
        absent = max(self.world_size - len(self.ranks), 0)
        self.spent.unfinished += absent
        self.spent.uncounted += absent
        self.attempt, self.job = self.attempt + 1, job
        self.world_size = self.closed = self.joined_until = self.run_after = self.warm_until = 0
        self.ranks, self.warmed_s, self.waited = {}, 0.0, HealthTotals()
        self.audit, self.progress = AuditState(doubts=self.audit.doubts), Progress()
        self.iteration_losses.begin_attempt()
        for sums in (self.run.energy, self.whole.energy, self.devices):
            sums.end_attempt()

    def accounts_of(self, window: int) -> Sequence[Account]:
        """Return the accounts to which a window is added."""
        return (self.whole,) if window <= self.run_after else (self.whole, self.run)

    def note_warmup(self, window: int, rows: Rows, warmup_iterations: int, warmup_s: float) -> bool:
        """Count the time of a window; return whether it is in the warm-up, which run-to-date values exclude."""
        is_warmup = bool(rows.columns["iteration_first"].min() <= warmup_iterations) or self.warmed_s < warmup_s
        self.warmed_s += float(rows.columns["time_s"].max())
        if is_warmup:
            self.run_after = self.warm_until = window
        return is_warmup

    def iteration_s(self) -> float:
        """Return the mean time of an iteration in the run to date; 0 without iterations."""
        rank_sums = self.run.ranks
        iterations = float(rank_sums.column("iterations").sum())
        return float(rank_sums.column("time_s").sum()) / iterations if iterations else 0.0

    def note_hang(self, seconds: float) -> None:
        """Add seconds in which no rank of the job made progress."""
        if seconds > 0:
            self.hang_s += seconds
            attempt = self.goodput.attempt
            attempt.move_to_hang(self.closed + 1, seconds * max(attempt.world_size, 1))  # in the window that is open

    def note_waits(self, waited: HealthTotals) -> None:
        """Add the waits for stragglers in the last window to those of the run."""
        self.waited = waited
        if waited.straggling_s is not None:
            self.straggling_s = (self.straggling_s or 0.0) + waited.straggling_s
        if waited.straggling_gpu_s:
            has_both = self.straggling_j is not None and waited.straggling_j is not None
            self.straggling_j = self.straggling_j + waited.straggling_j if has_both else None  # type: ignore[operator]
        self.straggling_gpu_s += waited.straggling_gpu_s

    @property
    def health(self) -> HealthTotals:
        """The waits for stragglers and the stalls of the run, with the number of stragglers in the last window."""
        num_stragglers = self.waited.stragglers
        return HealthTotals(self.straggling_s, self.straggling_gpu_s, self.straggling_j, self.hang_s, num_stragglers)

    def note_aggregator_costs(self, cpu_s: float, received_bytes: int) -> None:
        self.serving_cpu_s, self.serving_bytes = cpu_s, received_bytes

    def overhead(self) -> Overhead:
        """Return the cost of the measurement so far, over all processes and attempts."""
        rank_costs, spent = list(map(_COSTS, self.ranks.values())), self.spent
        recorders_s = [recorder_s for _, _, recorder_s in rank_costs if recorder_s is not None]
        return Overhead(
            recorder_cpu_s=spent.recorder_cpu_s + sum(recorders_s) if recorders_s or spent.recorder_cpu_s else None,
            agents_cpu_s=spent.agents_cpu_s + sum(agent_s for agent_s, _, _ in rank_costs),
            aggregator_cpu_s=spent.aggregator_cpu_s + self.serving_cpu_s,
            sent_bytes=spent.sent_bytes + sum(sent_bytes for _, sent_bytes, _ in rank_costs),
            received_bytes=spent.received_bytes + self.serving_bytes,
        )

    def core_wait_s(self) -> float | None:
        """Return the waits of all training threads for a core so far; ``None`` if no rank measures them."""
        waits_s = [rank.core_wait_s for rank in self.ranks.values() if rank.core_wait_s is not None]
        return self.spent.core_wait_s + sum(waits_s) if waits_s or self.spent.core_wait_s else None

    def note_loss_and_iteration(self, rows: Rows) -> None:
        self.loss = self.loss if rows.loss is None else rows.loss
        self.iteration_last = max(self.iteration_last, int(rows.columns["iteration_last"].max()))
        self.iteration_shown = max(map(attrgetter("iteration_shown"), rows))

    @property
    def reports_lost(self) -> int:
        """Number of reports that never arrived, over all attempts."""
        return self.spent.reports_lost + sum(rank.lost for rank in self.ranks.values())

    def num_unfinished(self, is_over: bool) -> int:
        """Return the number of ranks without a last report, over all attempts; ``is_over`` means the job has ended."""
        in_attempt = self.world_size - sum(rank.is_over for rank in self.ranks.values()) if is_over else 0
        return self.spent.unfinished + max(in_attempt, 0)

    def num_uncounted(self, is_over: bool) -> int:
        """Return the number of ranks without the report of their last iteration, like `num_unfinished`."""
        in_attempt = self.world_size - sum(rank.is_counted for rank in self.ranks.values()) if is_over else 0
        return self.spent.uncounted + max(in_attempt, 0)

    def time_by_class(self) -> dict[str, float]:
        """Return the seconds of each class, mean over ranks."""
        num_ranks = len(self.whole.ranks) or 1
        return {name: self.classes_s[name] / num_ranks for name in CLASSES if name in self.classes_s}

    def energy_by_class(self) -> dict[str, float | None]:
        """Return the measured joules of each class."""
        return {name: self.classes_j[name] for name in CLASSES if name in self.classes_j}

    def status(self, without_bye: str = "killed") -> str:
        """Return the final status of the job, from the BYEs of its ranks.

        A rank without a BYE has the status ``without_bye``: killed, if its job ended without an aggregator.
        """
        statuses = [rank.bye or without_bye for rank in self.ranks.values()]
        # The first of these that a rank has is that of the job: if one rank fails, the launcher kills the others.
        for status in ("failed", "interrupted", "killed", "ended"):
            if status in statuses:
                return status
        return "completed" if statuses else without_bye

    def ranks_by_status(self) -> dict[str, list[int]]:
        """Return the ranks by their final status; a rank without a BYE was killed."""
        by_status: dict[str, list[int]] = {}
        for number, rank in sorted(self.ranks.items()):
            by_status.setdefault(rank.bye or "killed", []).append(number)
        return by_status

    def encode(self, safe_sequences: Mapping[int, int]) -> bytes:
        """Return the state as JSON, for a restarted aggregator.

        Reports of open windows are not in the state and count as not received, so the agents send them again.  The safe
        sequence of a rank is the last one up to which all its reports are in the sums.
        """
        ranks = {rank: state.as_of(safe_sequences[rank], self.closed) for rank, state in self.ranks.items()}
        return msgspec.json.encode(replace(self, ranks=ranks, schema_version=SCHEMA_VERSION), enc_hook=to_json)


_decode: Callable[[bytes], Ledger] = msgspec.json.Decoder(Ledger, dec_hook=from_json).decode


def restore(state: bytes) -> Ledger:
    """Return the ledger of an earlier process from its state.

    Raises:
        msgspec.MsgspecError: the state is not a ledger, or has another version.
    """
    ledger = _decode(state)
    if problem := version_error(ledger.schema_version):
        raise msgspec.ValidationError(problem)
    ledger.goodput.clock.is_resumed = True
    ledger.spent.aggregator_cpu_s += ledger.serving_cpu_s
    ledger.spent.received_bytes += ledger.serving_bytes
    ledger.serving_cpu_s, ledger.serving_bytes = 0.0, 0
    return ledger
