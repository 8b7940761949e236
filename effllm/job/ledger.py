"""The running state of a job, from which a restarted aggregator continues. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

import msgspec
from msgspec import Struct

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

CLASSES = ("iterations", *MARKED_PHASES, STARTUP, SHUTDOWN)
_COSTS = attrgetter("agent_cpu_s", "sent_bytes", "recorder_cpu_s")


class RankState(Struct):
    """The state of one rank."""

    agent: str
    last_sequence: int = 0  # sequence of the last accepted report
    last_window: int = 0
    iteration: int = 0
    bye: str = ""
    lost: int = 0
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
        """Update the costs of the rank's agent and recorder, and its wait for a core; an older message lowers none."""
        if message.agent_cpu_s > self.agent_cpu_s:
            self.agent_cpu_s = message.agent_cpu_s
        if message.sent_bytes > self.sent_bytes:
            self.sent_bytes = message.sent_bytes
        if message.recorder_cpu_s is not None:
            self.recorder_cpu_s = max(self.recorder_cpu_s or 0.0, message.recorder_cpu_s)
        if message.core_wait_s is not None:
            self.core_wait_s = max(self.core_wait_s or 0.0, message.core_wait_s)

    def record_report(self, sequence: int, final: bool = False) -> None:
        """Record a report, and the number of missing reports before it."""
        self.is_over = self.is_over or final
        missing = sequence - self.last_sequence - 1
        if missing > 0:
            self.gaps += missing
            self.newest_gap, self.newest_gap_before = missing, sequence
        self.last_sequence = sequence

    def reject_report(self, sequence: int) -> None:
        """Count a report as lost that is not added to any sum."""
        self.record_report(sequence)
        self.gaps += 1
        self.lost = max(self.lost, self.gaps)


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
    world_size: int = 0
    closed: int = 0
    joined_until: int = 0  # last agent window in the last joined window, if windows are joined
    reports: int = 0
    ranks: dict[int, RankState] = {}
    run: Account = msgspec.field(default_factory=Account)
    whole: Account = msgspec.field(default_factory=lambda: Account(wall=True))
    devices: EnergyTotals = msgspec.field(default_factory=EnergyTotals)
    classes_j: dict[str, float] = {}
    classes_s: dict[str, float] = {}
    host_lines: HostLines = msgspec.field(default_factory=HostLines)
    late: int = 0
    loss: float | None = None  # the last finite loss
    is_loss_finite: bool = True  # whether the losses of the last window with a loss were finite
    first_not_finite: int | None = None  # displayed iteration of the first loss that was NaN or infinite
    iteration_last: int = 0
    iteration_shown: int = 0
    events: dict[str, int] = {}
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
    straggling_s: float | None = None  # wait of each rank for named ranks
    straggling_gpu_s: float = 0.0
    straggling_j: float | None = 0.0  # None if a part was not measured
    waited: HealthTotals = HealthTotals()  # the waits for stragglers in the last window
    schema_version: int = SCHEMA_VERSION  # version of state.json
    last_ranks: LastRanks = LastRanks()
    values: dict[str, ValueStatistics] = {}  # values of instruments in the whole run, by name
    slow_clocks: SlowClocks = msgspec.field(default_factory=SlowClocks)
    memory_pressure: MemoryPressure = msgspec.field(default_factory=MemoryPressure)
    audit: AuditState = msgspec.field(default_factory=AuditState)
    iteration_losses: IterationLosses = msgspec.field(default_factory=IterationLosses)
    progress: Progress = msgspec.field(default_factory=Progress)

    def begin_next_attempt(self, job: str) -> Ledger:
        """End the attempt; return this ledger for the next one: the sums stay, the ranks are reset."""
        self.goodput.end_attempt(self.status())
        for rank in self.ranks.values():
            self.spent.add_agent(rank)
        absent = max(self.world_size - len(self.ranks), 0)
        self.spent.unfinished += absent
        self.spent.uncounted += absent
        self.attempt, self.job = self.attempt + 1, job
        self.world_size = self.closed = self.joined_until = self.run_after = self.warm_until = 0
        self.ranks, self.warmed_s, self.waited, self.audit = (
            {},
            0.0,
            HealthTotals(),
            AuditState(doubts=self.audit.doubts),
        )
        self.progress = Progress()
        self.iteration_losses.begin_attempt()
        for sums in (self.run.energy, self.whole.energy, self.devices):
            sums.end_attempt()
        return self

    def accounts_of(self, window: int) -> Sequence[Account]:
        return (self.whole,) if window <= self.run_after else (self.whole, self.run)

    def note_warmup(self, window: int, rows: Rows, iterations: int, seconds: float) -> bool:
        """Count the time of a window; return whether it is in the warm-up, which run-to-date values exclude."""
        numbers = rows.columns
        warming = bool(numbers["iteration_first"].min() <= iterations) or self.warmed_s < seconds
        self.warmed_s += float(numbers["time_s"].max())
        if warming:
            self.run_after = self.warm_until = window
        return warming

    def iteration_s(self) -> float:
        """Return the mean time of an iteration so far; 0 without iterations."""
        ranks = self.run.ranks
        iterations = float(ranks.column("iterations").sum())
        return float(ranks.column("time_s").sum()) / iterations if iterations else 0.0

    def note_hang(self, seconds: float) -> None:
        """Add seconds in which no rank of the job made progress."""
        if seconds > 0:
            self.hang_s += seconds
            attempt = self.goodput.attempt
            attempt.move_to_hang(self.closed + 1, seconds * max(attempt.world_size, 1))

    def note_waits(self, waited: HealthTotals) -> None:
        self.waited = waited
        if waited.straggling_s is not None:
            self.straggling_s = (self.straggling_s or 0.0) + waited.straggling_s
        if waited.straggling_gpu_s:
            is_known = self.straggling_j is not None and waited.straggling_j is not None
            self.straggling_j = self.straggling_j + waited.straggling_j if is_known else None  # type: ignore[operator]
        self.straggling_gpu_s += waited.straggling_gpu_s

    @property
    def health(self) -> HealthTotals:
        """The waits for stragglers and the stalls of the run."""
        number = self.waited.stragglers
        return HealthTotals(self.straggling_s, self.straggling_gpu_s, self.straggling_j, self.hang_s, number)

    def note_own_costs(self, cpu_s: float, received_bytes: int) -> None:
        self.serving_cpu_s, self.serving_bytes = cpu_s, received_bytes

    def overhead(self) -> Overhead:
        """Return the cost of the measurement so far, over all processes and attempts."""
        ranks, spent = list(map(_COSTS, self.ranks.values())), self.spent
        recorders = [recorder_s for _, _, recorder_s in ranks if recorder_s is not None]
        return Overhead(
            recorder_cpu_s=spent.recorder_cpu_s + sum(recorders) if recorders or spent.recorder_cpu_s else None,
            agents_cpu_s=spent.agents_cpu_s + sum(agent_s for agent_s, _, _ in ranks),
            aggregator_cpu_s=spent.aggregator_cpu_s + self.serving_cpu_s,
            sent_bytes=spent.sent_bytes + sum(sent for _, sent, _ in ranks),
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
        now = self.world_size - sum(rank.is_over for rank in self.ranks.values()) if is_over else 0
        return self.spent.unfinished + max(now, 0)

    def num_uncounted(self, is_over: bool) -> int:
        """Return the number of ranks without the report of their last iteration, like `num_unfinished`."""
        now = self.world_size - sum(rank.is_counted for rank in self.ranks.values()) if is_over else 0
        return self.spent.uncounted + max(now, 0)

    def time_by_class(self) -> dict[str, float]:
        """Return the seconds of each class, mean over ranks."""
        ranks = len(self.whole.ranks) or 1
        return {name: self.classes_s[name] / ranks for name in CLASSES if name in self.classes_s}

    def energy_by_class(self) -> dict[str, float | None]:
        """Return the measured joules of each class."""
        return {name: self.classes_j[name] for name in CLASSES if name in self.classes_j}

    def status(self, without_bye: str = "killed") -> str:
        """Return the final status of the job, from the BYEs of its ranks.

        A rank without a BYE has the status ``without_bye``; a job whose aggregator has not seen the end was killed.
        """
        ends = [rank.bye or without_bye for rank in self.ranks.values()]
        # One rank is enough for the first two, because the launcher then kills the other ranks.
        for word in ("failed", "interrupted", "killed", "ended"):
            if word in ends:
                return word
        return "completed" if ends else without_bye

    def ranks_by_status(self) -> dict[str, list[int]]:
        """Return the ranks by their final status; a rank without a BYE was killed."""
        by_status: dict[str, list[int]] = {}
        for number, rank in sorted(self.ranks.items()):
            by_status.setdefault(rank.bye or "killed", []).append(number)
        return by_status

    def encode(self, safe: Mapping[int, int]) -> bytes:
        """Return the state as JSON, for a restarted aggregator.

        Reports of open windows are not in the state and count as not received, so the agents send them again.  ``safe``
        is for each rank the last sequence up to which all reports are in the sums.
        """
        replace = msgspec.structs.replace
        ranks = {
            rank: state
            if safe[rank] == state.last_sequence
            else replace(
                state,
                last_sequence=safe[rank],
                last_window=self.closed,
                bye="",
                is_over=False,
                last_ordinal=None,
                covered_s=0.0,
                gaps=state.gaps - (state.newest_gap if state.newest_gap_before > safe[rank] else 0),
            )
            for rank, state in self.ranks.items()
        }
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
