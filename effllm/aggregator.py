"""Messages and time in, reports of the cluster out: pure, so every rule here is tested without a socket.

A window is keyed by its number, which is equal on all ranks, never by wall clock.  Windows close in
order and once: when every live rank has passed them, or when their deadline has.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec import Struct

from effllm import metrics
from effllm.account import Account, MergedDevice, WindowEnergy, merge_devices, window_energy
from effllm.config import Config
from effllm.schema import (
    SHUTDOWN,
    STARTUP,
    Beat,
    Bye,
    ClusterReport,
    ClusterTotals,
    Coverage,
    Device,
    EnergySummary,
    Event,
    Hello,
    Note,
    Overhead,
    Parameters,
    RankReport,
    Reports,
    Straggler,
    Summary,
    Value,
)

SILENT_AFTER_S = 15.0  # three beats: a rank that says nothing for so long is waited for no more
ABSENT_AFTER_S = 30.0  # a rank that never joined; starting a large job takes its time
ABSENT_AFTER_BYE_S = 2.0  # ... but once ranks leave, nobody joins any more
LEAST_DEADLINE_S = 5.0
MOST_RANKS = 2**20
RECENT = 8  # closed windows that a late report can still complete

CLASSES = ("iterations", "evaluation", "checkpoint", "other", STARTUP, SHUTDOWN)


class RankState(Struct):
    """What the aggregator knows of one rank."""

    agent: str
    last_sequence: int = 0  # of the reports taken
    last_window: int = 0
    iteration: int = 0
    bye: str = ""
    lost: int = 0
    agent_cpu_s: float = 0.0


class Snapshot(Struct):
    """All that a replacement needs to go on where its predecessor was killed."""

    attempt: int
    job: str
    started_time_s: float
    world_size: int = 0
    closed: int = 0
    reports: int = 0
    ranks: dict[int, RankState] = {}
    run: Account = msgspec.field(default_factory=Account)
    whole: Account = msgspec.field(default_factory=lambda: Account(wall=True))
    devices_j: dict[str, float] = {}
    classes_j: dict[str, float] = {}
    classes_s: dict[str, float] = {}
    late: int = 0
    loss: float | None = None
    iteration_last: int = 0
    iteration_shown: int = 0
    events: dict[str, int] = {}
    warmed_s: float = 0.0  # iteration time that the warm-up has had
    run_after: int = 0  # windows up to this one are not in the run-to-date values: warm-up, or a reset

    def next_attempt(self, job: str) -> Snapshot:
        """Return the state for the next start of the job: the sums stay, the ranks begin anew."""
        self.attempt, self.job = self.attempt + 1, job
        self.world_size = self.closed = self.run_after = 0
        self.ranks, self.warmed_s = {}, 0.0
        return self


class Closed(NamedTuple):
    """A window that closed, and which reports are safe once it is written."""

    report: ClusterReport
    rows: Sequence[RankReport]
    safe: dict[int, int]  # rank -> sequence


class _Pending(Struct):
    first_s: float  # when its first row came
    rows: dict[int, RankReport] = {}


class _Recent(Struct):
    rows: dict[int, RankReport]
    merged: dict[str, MergedDevice]
    energy: WindowEnergy


class Aggregator:
    """Combines what ranks report into the metrics of the whole job.

    Args:
        config: the job's settings.
        job: random id of the job; empty takes the first that comes.
        attempt: which start of the job this is, from 1.
        time_s: unix time of the start.
        snapshot: what a killed predecessor left.
    """

    def __init__(self, config: Config, job: str, attempt: int, time_s: float, snapshot: Snapshot | None = None) -> None:
        self._config = config
        self._state = snapshot or Snapshot(attempt=attempt, job=job, started_time_s=time_s)
        self._hellos: dict[int, Hello] = {}
        self._heard_s: dict[int, float] = {}
        self._silent: set[int] = set()
        self._left = sum(bool(rank.bye) for rank in self._state.ranks.values())
        self._pending: dict[int, _Pending] = {}
        self._recent: dict[int, _Recent] = {}
        self._spans_s: list[float] = []  # of the last windows, for the deadline
        self._first_hello_s: float | None = None
        self._first_bye_s: float | None = None
        self._closed: list[Closed] = []
        self._events: list[Event] = []
        self._told: set[str] = set()
        self._devices: dict[str, Device] = {}
        self._members: dict[str, set[int]] = {}
        self._last_report: ClusterReport | None = None
        self._whole_model: tuple[int, int] | None = None  # parameters of the whole model, and the rank that said so
        self.garbage = 0  # frames that were not messages
        self.duplicates = 0

    # --- what comes in ---

    def hello(self, message: Hello, now_s: float, time_s: float) -> str:
        """Take an introduction; return why it is refused, or an empty string."""
        state = self._state
        reason = self._objection(message, now_s)
        if reason:
            self._tell("refused", f"rank {message.rank} on {message.host} was refused: {reason}", time_s, message.rank)
            return reason
        state.job = state.job or message.job
        state.world_size = state.world_size or message.world_size
        self._first_hello_s = now_s if self._first_hello_s is None else self._first_hello_s
        known = state.ranks.get(message.rank)
        if known is None or known.agent != message.agent:
            state.ranks[message.rank] = RankState(message.agent, last_window=known.last_window if known else 0)
            self._event("joined", f"rank {message.rank} joined from {message.host}", time_s, message.rank)
        self._heard(message.rank, now_s, time_s)
        self._hellos[message.rank] = message
        for device in message.devices:
            old = self._devices.get(device.key)
            # On a host only one rank reads the power sensor, and only its agent knows that there is one.
            if old is None or old.energy_method is None:
                self._devices[device.key] = device
            self._members.setdefault(device.key, set()).add(message.rank)
            for sentence in device.not_measured:
                self._tell("not_measured", sentence, time_s)
        self._check_parameters(message, time_s)
        return ""

    def _objection(self, message: Hello, now_s: float) -> str:
        state = self._state
        if state.job and message.job and message.job != state.job:
            return "it belongs to another job"
        if message.world_size > MOST_RANKS:
            return f"a world of {message.world_size} ranks is beyond reason"
        if not 0 <= message.rank < message.world_size:
            return f"rank {message.rank} lies outside a world of {message.world_size}"
        if state.world_size and message.world_size != state.world_size:
            return f"its world has {message.world_size} ranks, the job's has {state.world_size}"
        if message.log_interval != self._config.log_interval:
            return f"its LOG_INTERVAL is {message.log_interval}, the job's is {self._config.log_interval}"
        first = next(iter(self._hellos.values()), message)
        if message.offset % message.log_interval != first.offset % first.log_interval:
            return f"its first iteration is {message.offset}, rank {first.rank}'s is {first.offset}"
        known = state.ranks.get(message.rank)
        heard_s = self._heard_s.get(message.rank)
        if known and known.agent != message.agent and not known.bye and heard_s is not None:
            return f"rank {message.rank} has an agent already" if now_s - heard_s < SILENT_AFTER_S else ""
        return ""

    def reports(self, message: Reports, now_s: float, time_s: float) -> None:
        """Take windows of a rank; those taken before are dropped and counted."""
        for row in message.rows:
            rank = self._state.ranks.get(row.rank)
            if rank is None or rank.agent != row.agent:
                self.garbage += 1
                continue
            self._heard(row.rank, now_s, time_s)
            rank.agent_cpu_s = max(rank.agent_cpu_s, message.agent_cpu_s)
            self._lost(row.rank, message.lost, time_s)
            if row.sequence <= rank.last_sequence:
                self.duplicates += 1
                continue
            rank.last_sequence = row.sequence
            rank.last_window = max(rank.last_window, row.window)
            rank.iteration = row.iteration_last
            if row.window <= self._state.closed:
                self._take_late(row, time_s)
            else:
                self._pending.setdefault(row.window, _Pending(first_s=now_s)).rows[row.rank] = row
        if self._may_close():
            self._close_ready(now_s)

    def beat(self, message: Beat, now_s: float, time_s: float) -> None:
        """Take a sign of life."""
        if self._is_known(message.rank, message.agent):
            self._heard(message.rank, now_s, time_s)
            self._lost(message.rank, message.lost, time_s)

    def note(self, message: Note, now_s: float, time_s: float) -> None:
        """Take a line of an agent's log."""
        if self._is_known(message.rank, message.agent):
            self._heard(message.rank, now_s, time_s)
            self._tell(message.kind, f"rank {message.rank}: {message.text}", time_s, message.rank)

    def bye(self, message: Bye, now_s: float, time_s: float) -> bool:
        """Take a farewell; ``False`` where it comes from a stranger."""
        if not self._is_known(message.rank, message.agent):
            self.garbage += 1
            return False
        rank = self._state.ranks[message.rank]
        self._heard(message.rank, now_s, time_s)
        self._lost(message.rank, message.lost, time_s)
        rank.agent_cpu_s = max(rank.agent_cpu_s, message.agent_cpu_s)
        if not rank.bye:
            rank.bye = message.status or "killed"
            self._left += 1
            self._event("left", f"rank {message.rank} left: {rank.bye}", time_s, message.rank)
        self._first_bye_s = now_s if self._first_bye_s is None else self._first_bye_s
        if self._may_close():
            self._close_ready(now_s)
        return True

    def reject(self, time_s: float, reason: str) -> None:
        """Count a frame that was no message of ours."""
        self.garbage += 1
        self._tell("garbage", f"a frame was rejected: {reason}", time_s)

    def tick(self, now_s: float, time_s: float) -> None:
        """Let time pass: name ranks that fell silent, close windows whose deadline has passed."""
        for rank, heard_s in self._heard_s.items():
            late_s = now_s - heard_s
            if late_s > SILENT_AFTER_S and rank not in self._silent and not self._state.ranks[rank].bye:
                self._silent.add(rank)
                self._event("silent", f"rank {rank} has said nothing for {late_s:.0f} s", time_s, rank)
        self._close_ready(now_s)

    # --- what goes out ---

    def take_closed(self) -> list[Closed]:
        """Return the windows that closed since the last call, in order."""
        closed, self._closed = self._closed, []
        return closed

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> bytes:
        """Return the state as JSON, for a replacement.

        Rows of windows that are still open are not in it, so it says that they have not come: whoever
        sent them will send them again.
        """
        safe, replace = self._safe(), msgspec.structs.replace
        ranks = {
            rank: known
            if safe[rank] == known.last_sequence
            else replace(known, last_sequence=safe[rank], last_window=self._state.closed, bye="")
            for rank, known in self._state.ranks.items()
        }
        return msgspec.json.encode(replace(self._state, ranks=ranks))

    @property
    def attempt(self) -> int:
        """Which start of the job this is."""
        return self._state.attempt

    @property
    def job(self) -> str:
        """Id of the job; empty before the first rank has joined."""
        return self._state.job

    @property
    def last_report(self) -> ClusterReport | None:
        """The newest report."""
        return self._last_report

    @property
    def report_count(self) -> int:
        """How many reports have been made, over restarts of the aggregator."""
        return self._state.reports

    def hellos(self) -> Iterable[Hello]:
        """Return the introductions of all ranks."""
        return self._hellos.values()

    def finished(self, now_s: float) -> bool:
        """Whether every rank has left, or will not come any more, and nothing is pending."""
        state = self._state
        if not any(rank.bye for rank in state.ranks.values()) or self._pending:
            return False
        return not (self._waited_for(now_s) - {rank for rank, known in state.ranks.items() if known.bye})

    def all_silent(self, now_s: float) -> bool:
        """Whether nobody that has not left has been heard for long."""
        heard = [heard_s for rank, heard_s in self._heard_s.items() if not self._state.ranks[rank].bye]
        return all(now_s - heard_s > SILENT_AFTER_S for heard_s in heard)

    def close_all(self) -> None:
        """Close whatever is pending: the end has come."""
        for window in sorted(self._pending):
            self._close(window)

    def parameters(self) -> int | None:
        """Return P of the configured kind: the whole model's, or the sum of all ranks' shares once all have come."""
        kind = self._config.parameters
        given: list[Parameters] = [hello.parameters for hello in self._hellos.values()]
        if self._whole_model is not None:
            value = getattr(self._hellos[self._whole_model[1]].parameters, kind)
            return int(value) if value is not None else None
        shares = [getattr(one, kind) for one in given if one.is_share]
        if len(shares) != self._state.world_size or not shares or None in shares:
            return None
        return sum(shares) or None

    def summary(self, time_s: float, ended: bool, aggregator_cpu_s: float | None = None) -> Summary:
        """Return the run as it stands."""
        state = self._state
        run, _, whole = self._totals(None)
        values = metrics.evaluate(run, ClusterTotals(), whole)
        agents_cpu_s = sum(rank.agent_cpu_s for rank in state.ranks.values())
        shown = {
            tag: Value(value, described.unit) for tag, value in values.items() if (described := metrics.describe(tag))
        }
        measurable = any(device.energy_method for device in self._devices.values())
        last = self._last_report
        return Summary(
            status=self._status() if ended else "running",
            iterations=whole.iterations,
            attempts=state.attempt,
            parameters=run.parameters,
            parameters_kind=self._config.parameters,
            metrics=shown,
            energy=EnergySummary(
                total_joules=whole.energy_j if whole.energy_complete else None,
                measured_joules=whole.energy_measured_j if measurable else None,
                scope=self._scope(),
                method=self._method(),
                joules_per_token=values.get("energy/joules_per_token"),
                by_device=dict(state.devices_j),
                by_class=self._classes_j(),
            ),
            coverage=last.coverage if last else self._coverage({}, set(), None, {}),
            overhead=Overhead(agents_cpu_s=agents_cpu_s, aggregator_cpu_s=aggregator_cpu_s),
            started_time_s=state.started_time_s,
            updated_time_s=time_s,
            elapsed_s=max(time_s - state.started_time_s, 0.0),
            time_by_class=self._classes_s(),
            simulated=any(device.simulated for device in self._devices.values()),
            not_measured=tuple(sorted({text for device in self._devices.values() for text in device.not_measured})),
            tokens=whole.tokens,
            samples=whole.samples,
            loss=state.loss,
            events=dict(state.events),
        )

    # --- windows ---

    def _waited_for(self, now_s: float) -> set[int]:
        since_s = now_s - (self._first_hello_s if self._first_hello_s is not None else now_s)
        bye_s = now_s - self._first_bye_s if self._first_bye_s is not None else -1.0
        come = set(self._heard_s) - self._silent
        if since_s > ABSENT_AFTER_S or bye_s > ABSENT_AFTER_BYE_S:
            return come
        return come | (set(range(self._state.world_size)) - set(self._heard_s))

    def _may_close(self) -> bool:
        # A count, because this is asked for every report of up to 10,000 ranks; what it misses, a tick finds.
        away = len(self._silent) + self._left
        return bool(self._pending) and len(self._pending[min(self._pending)].rows) + away >= self._state.world_size

    def _close_ready(self, now_s: float) -> None:
        while self._pending:
            window = min(self._pending)
            ranks = self._state.ranks
            waited = self._waited_for(now_s)
            behind = {r for r in waited if r not in ranks or (ranks[r].last_window < window and not ranks[r].bye)}
            overdue = now_s - self._pending[window].first_s > self._deadline_s()
            if behind and not overdue:
                return
            self._close(window)

    def _deadline_s(self) -> float:
        return max(3 * statistics.median(self._spans_s), LEAST_DEADLINE_S) if self._spans_s else ABSENT_AFTER_S

    def _close(self, window: int) -> None:
        state = self._state
        rows = self._pending.pop(window).rows
        ordered = _in_order(rows)
        state.closed = window
        absent = self._absent(rows)
        merged = merge_devices(ordered, self._devices, self._members)
        energy = window_energy(merged, self._devices, len(absent - set(self._hellos)))
        warming = self._is_warming(ordered)
        if warming:
            state.run_after = window
        self._count(window, ordered, merged, energy)
        self._recent[window] = _Recent(rows, merged, energy)
        while len(self._recent) > RECENT:
            del self._recent[min(self._recent)]
        if any(row.iterations > 0 for row in ordered):
            self._spans_s = [*self._spans_s[-15:], max(row.wall_s for row in ordered)]
        if absent:
            names = ", ".join(map(str, sorted(absent)[:8])) + (", ..." if len(absent) > 8 else "")
            self._event("missing", f"window {window} closed without rank {names}", ordered[-1].end_time_s)
        self._emit(window, ordered, merged, energy, absent, warming, correction=False)
        if any(row.reset for row in ordered):
            state.run, state.run_after = Account(), window

    def _absent(self, rows: dict[int, RankReport]) -> set[int]:
        left = {rank for rank, known in self._state.ranks.items() if known.bye}
        return set(range(self._state.world_size)) - set(rows) - left

    def _is_warming(self, rows: Sequence[RankReport]) -> bool:
        state = self._state
        first = min(row.iteration_first for row in rows)
        warming = first <= self._config.warmup_iterations or state.warmed_s < self._config.warmup_seconds
        state.warmed_s += max(row.time_s for row in rows)
        return warming

    def _accounts(self, window: int) -> Sequence[Account]:
        state = self._state
        return (state.whole,) if window <= state.run_after else (state.whole, state.run)

    def _count(
        self, window: int, rows: Sequence[RankReport], merged: dict[str, MergedDevice], energy: WindowEnergy
    ) -> None:
        state = self._state
        for account in self._accounts(window):
            account.add_rows(rows)
        self._count_devices(window, rows, merged, energy)
        self._count_time(rows)
        losses = [row.loss for row in rows if row.loss is not None]
        state.loss = losses[0] if losses else state.loss
        state.iteration_last = max(state.iteration_last, *(row.iteration_last for row in rows))
        state.iteration_shown = max(row.iteration_shown for row in rows)

    def _count_devices(
        self,
        window: int,
        rows: Sequence[RankReport],
        merged: dict[str, MergedDevice],
        energy: WindowEnergy,
        sign: int = 1,
    ) -> None:
        state = self._state
        for account in self._accounts(window):
            account.add_devices(merged, sign)
            account.add_energy(energy, rows, self._config.min_coverage, sign)
        for key, joules in energy.by_device_j.items():
            state.devices_j[key] = state.devices_j.get(key, 0.0) + sign * joules
        for name, joules in {"iterations": energy.iterations_j, **energy.phases_j}.items():
            state.classes_j[name] = state.classes_j.get(name, 0.0) + sign * joules

    def _count_time(self, rows: Sequence[RankReport]) -> None:
        classes_s = self._state.classes_s
        for row in rows:
            for name, seconds in {"iterations": row.time_s, **row.phases_s}.items():
                classes_s[name] = classes_s.get(name, 0.0) + seconds

    def _take_late(self, row: RankReport, time_s: float) -> None:
        """Let a late row into the totals; the window that it belongs to stays as it was shown."""
        state = self._state
        state.late += 1
        self._event("late", f"rank {row.rank} reported window {row.window} after it had closed", time_s, row.rank)
        for account in self._accounts(row.window):
            account.add_rows([row])
        self._count_time([row])
        recent = self._recent.get(row.window)
        if recent:
            self._complete(recent, row)
        if self._last_report:
            warming = self._last_report.warming_up
            rows, merged, energy = {row.rank: row}, {}, None
            if recent:
                rows, merged, energy = recent.rows, recent.merged, recent.energy
            self._emit(row.window, _in_order(rows), merged, energy, self._absent(rows), warming, correction=True)

    def _complete(self, recent: _Recent, row: RankReport) -> None:
        self._count_devices(row.window, _in_order(recent.rows), recent.merged, recent.energy, sign=-1)
        recent.rows[row.rank] = row
        rows = _in_order(recent.rows)
        recent.merged = merge_devices(rows, self._devices, self._members)
        absent = self._absent(recent.rows) - set(self._hellos)
        recent.energy = window_energy(recent.merged, self._devices, len(absent))
        self._count_devices(row.window, rows, recent.merged, recent.energy)

    def _emit(
        self,
        window: int,
        rows: Sequence[RankReport],
        merged: dict[str, MergedDevice],
        energy: WindowEnergy | None,
        absent: set[int],
        warming: bool,
        correction: bool,
    ) -> None:
        state = self._state
        account = Account()
        account.add_rows(rows)
        account.add_devices(merged)
        if energy:
            account.add_energy(energy, rows, self._config.min_coverage)
        run, last, whole = self._totals(account)
        worked = last.iterations > 0
        values = metrics.evaluate(run, last if worked and not correction else ClusterTotals(), whole)
        losses = [row.loss for row in rows if row.loss is not None]
        coverage = self._coverage(merged, absent, energy, {row.rank: row for row in rows})
        if energy is None and self._last_report:  # a row so late that nobody remembers the others of its window
            coverage = msgspec.structs.replace(self._last_report.coverage, reports_late=state.late)
        total = next((h.total_iterations for h in self._hellos.values() if h.total_iterations), None)
        shown = max(row.iteration_shown for row in rows)
        report = ClusterReport(
            attempt=state.attempt,
            window=window,
            iteration=state.iteration_shown if correction else shown,
            iteration_first=min(row.iteration_first for row in rows),
            iteration_last=max(row.iteration_last for row in rows),
            time_s=max(row.end_time_s for row in rows),
            loss=losses[0] if losses else None,
            run=run,
            last=last,
            job=whole,
            values=values,
            coverage=coverage,
            straggler=_straggler(rows),
            total_iterations=total,
            remaining_s=_remaining_s(whole, total, shown),
            style="Step" if any(h.facts.get("style") == "Step" for h in self._hellos.values()) else "Iteration",
            simulated=any(device.simulated for device in self._devices.values()),
            power_scope=self._scope() if energy and energy.coverage is not None else None,
            warming_up=warming,
            final=any(row.final for row in rows),
            correction=correction,
            energy_by_class=self._classes_j(),
            time_by_class=self._classes_s(),
        )
        state.reports += 1
        self._last_report = report
        self._closed.append(Closed(report, rows, self._safe()))

    def _safe(self) -> dict[int, int]:
        pending: dict[int, int] = {}
        for one in self._pending.values():
            for rank, row in one.rows.items():
                pending[rank] = min(pending.get(rank, row.sequence), row.sequence)
        return {
            rank: pending[rank] - 1 if rank in pending else known.last_sequence
            for rank, known in self._state.ranks.items()
        }

    def _totals(self, window: Account | None) -> tuple[ClusterTotals, ClusterTotals, ClusterTotals]:
        gpus = sum(device.is_gpu for device in self._devices.values())
        devices = gpus or self._state.world_size
        peak = self._config.peak_tflops
        flops_per_token = next((h.flops_per_token for h in self._hellos.values() if h.flops_per_token), None)
        parameters = self.parameters()

        def totals(account: Account) -> ClusterTotals:
            return account.totals(
                parameters=parameters,
                gpus=gpus,
                world_size=self._state.world_size,
                peak_flops_per_s=peak * 1e12 * devices if peak else None,
                flops_per_token=flops_per_token,
            )

        return totals(self._state.run), totals(window or Account()), totals(self._state.whole)

    def _coverage(
        self,
        merged: dict[str, MergedDevice],
        absent: set[int],
        energy: WindowEnergy | None,
        rows: dict[int, RankReport],
    ) -> Coverage:
        state = self._state
        gpus = {key for key, device in self._devices.items() if device.is_gpu}
        unknown = len(absent - set(self._hellos)) if gpus else 0
        measured = {key for key, one in merged.items() if key in gpus and _is_measured(one)}
        span_s = sum(one.span_s for one in merged.values())
        memory_s = sum(one.wall.memory_covered_s for one in merged.values())
        busy_s = sum(one.wall.utilization_covered_s for one in merged.values())
        return Coverage(
            ranks_expected=state.world_size,
            ranks_reporting=len(rows),
            gpus_expected=len(gpus) + unknown,
            gpus_measured=len(measured),
            reports_lost=sum(rank.lost for rank in state.ranks.values()),
            reports_late=state.late,
            missing_ranks=tuple(sorted(absent)),
            energy=energy.coverage if energy else None,
            memory=min(memory_s / span_s, 1.0) if span_s > 0 else None,
            utilization=min(busy_s / span_s, 1.0) if span_s > 0 else None,
        )

    # --- small things ---

    def _is_known(self, rank: int, agent: str) -> bool:
        known = self._state.ranks.get(rank)
        return known is not None and known.agent == agent

    def _heard(self, rank: int, now_s: float, time_s: float) -> None:
        self._heard_s[rank] = now_s
        if rank in self._silent:
            self._silent.discard(rank)
            self._event("back", f"rank {rank} is back", time_s, rank)

    def _lost(self, rank: int, lost: int, time_s: float) -> None:
        known = self._state.ranks[rank]
        if lost > known.lost:
            self._event("lost", f"rank {rank} lost {lost - known.lost} reports: its buffer was full", time_s, rank)
            known.lost = lost

    def _check_parameters(self, message: Hello, time_s: float) -> None:
        total = message.parameters.total
        if message.parameters.is_share or total is None:
            return
        if self._whole_model is None or self._whole_model[1] == message.rank:
            self._whole_model = (total, message.rank)
        elif self._whole_model[0] != total:
            first, rank = self._whole_model
            text = f"ranks {rank} and {message.rank} disagree on the parameters of the whole model"
            text += f": {first:,} and {total:,}; rank {rank}'s count is used"
            self._tell("disagreement", text, time_s, message.rank, once="parameters")

    def _event(self, kind: str, text: str, time_s: float, rank: int | None = None) -> None:
        self._state.events[kind] = self._state.events.get(kind, 0) + 1
        self._events.append(Event(time_s, kind, text, rank, self._state.attempt))

    def _tell(self, kind: str, text: str, time_s: float, rank: int | None = None, once: str = "") -> None:
        """Make an event of a line the first time it is heard, and at most a thousand of them."""
        if (once or text) not in self._told and len(self._told) < 1000:
            self._told.add(once or text)
            self._event(kind, text, time_s, rank)

    def _status(self) -> str:
        said = [rank.bye for rank in self._state.ranks.values()]
        if "failed" in said:
            return "failed"
        complete = len(said) == self._state.world_size and all(word == "completed" for word in said)
        return "completed" if complete and said else "killed"

    def _scope(self) -> str | None:
        scopes = {d.power_scope for d in self._devices.values() if d.energy_method and d.power_scope}
        return "+".join(sorted(scopes)) or None

    def _method(self) -> str | None:
        methods = {device.energy_method for device in self._devices.values() if device.energy_method}
        return "+".join(sorted(methods)) or None

    def _classes_j(self) -> dict[str, float | None]:
        if not any(device.energy_method for device in self._devices.values()):
            return {}
        return {name: self._state.classes_j[name] for name in CLASSES if name in self._state.classes_j}

    def _classes_s(self) -> dict[str, float]:
        ranks = len(self._state.whole.ranks) or 1
        return {name: self._state.classes_s[name] / ranks for name in CLASSES if name in self._state.classes_s}


def _in_order(rows: dict[int, RankReport]) -> list[RankReport]:
    return [rows[rank] for rank in sorted(rows)]


def _is_measured(one: MergedDevice) -> bool:
    return one.wall.memory_covered_s + one.wall.utilization_covered_s + one.wall.energy_covered_s > 0


def _straggler(rows: Sequence[RankReport]) -> Straggler | None:
    worked = [row for row in rows if row.iterations > 0]
    if len(worked) < 2:
        return None
    slowest = max(worked, key=lambda row: row.busy_s)
    return Straggler(slowest.rank, slowest.busy_s, statistics.median(row.busy_s for row in worked))


def _remaining_s(whole: ClusterTotals, total: int | None, shown: int) -> float | None:
    if total is None or not whole.iterations:
        return None
    return max(total - shown, 0) * whole.time_s / whole.iterations


restore: Callable[[bytes], Snapshot] = msgspec.json.Decoder(Snapshot).decode
