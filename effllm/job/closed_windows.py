"""Closed windows: added to the totals, checked, reported, and completed by late reports; and the events. No I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from effllm.config.settings import Config
from effllm.job.account import Account, Rows
from effllm.job.audit import AuditWatch
from effllm.job.energy_account import window_energy
from effllm.job.forecast import Mark
from effllm.job.goodput_attempt import DATA, SLOW
from effllm.job.health.stragglers import Stragglers, Straggling
from effllm.job.health.watches import EnergyWatch, WasteWatch
from effllm.job.iteration_losses import LOST_SECONDS, IterationMatrix
from effllm.job.joining import add_to, with_earlier_part
from effllm.job.ledger import Ledger
from effllm.job.merged import GpuReadings, Merged, has_one_device_each, merge_devices
from effllm.job.open_windows import OpenWindow
from effllm.job.pacing import is_large
from effllm.job.presence import ABSENT_AFTER_S
from effllm.job.reporting import Window, report_of
from effllm.job.roster import Roster
from effllm.metrics.energy import total_joules
from effllm.records.energy import JOULES
from effllm.records.events import KINDS, EventLimit
from effllm.records.job import ClusterReport, HealthTotals
from effllm.records.plain_text import one_line
from effllm.records.rank import Event, RankReport
from effllm.records.values import merge_by_name
from effllm.records.verdict import Straggler
from effllm.store.run_folder import KeptReports

MIN_TIMEOUT_S = 5.0
MAX_RECENT = 8  # number of closed windows that a late report can still complete
#: Losses whose beginning requests a recording of stacks, if they are more than this share of a window.
RECORDED_LOSSES, MIN_SHARE = (DATA, SLOW), 0.05
MAX_SCOPE_COVERAGE = 0.5  # of all scopes with a higher coverage, the widest scope is used
MAX_NAMED = 8  # maximum number of ranks in the text of an event
MAX_RECORDED_KEYS = 1000  # number of stored keys per kind, for events that are recorded once
MAX_KINDS = 100  # events of further kinds are counted as OTHER
OTHER = "other"


class Closed(NamedTuple):
    """A closed window, with the reports of its ranks, and those of them that the run folder keeps."""

    report: ClusterReport
    rows: Rows
    kept: KeptReports


class ClosedWindows:
    """The last closed windows of a job, and their reports until `take_windows` returns them."""

    def __init__(
        self, config: Config, ledger: Ledger, roster: Roster, events: EventLog, stragglers: Stragglers
    ) -> None:
        self._config, self._ledger, self._roster, self._events = config, ledger, roster, events
        self._stragglers = stragglers
        self._waste = WasteWatch(ledger.events, events.record)
        self._energy = EnergyWatch(ledger.events.__contains__, events.record)
        self._audit = AuditWatch(ledger.audit, events.record_once)
        self._recent: dict[int, Window] = {}  # the last closed windows, by number
        self._durations_s: list[float] = []  # durations of the last 16 windows, for the deadline
        self._closed: list[Closed] = []  # windows for the next call of `take_windows`
        self._ranks_to_record: list[int] = []  # ranks whose stacks are to be recorded
        self._slowest: Straggler | None = None  # the slowest named rank of the last window
        self._recorded_share = 0.0  # share of the losses `RECORDED_LOSSES` in the last window
        self.last_report: ClusterReport | None = None
        self.last_merged: Merged | None = None  # the devices of the last reported window

    def take_windows(self) -> list[Closed]:
        """Return the windows that closed since the last call, in order."""
        closed, self._closed = self._closed, []
        return closed

    def take_ranks_to_record(self) -> list[int]:
        ranks, self._ranks_to_record = self._ranks_to_record, []
        return ranks

    def timeout_s(self) -> float:
        """Return the seconds that a window waits for late ranks: three median windows, at least `MIN_TIMEOUT_S`."""
        return max(3 * statistics.median(self._durations_s), MIN_TIMEOUT_S) if self._durations_s else ABSENT_AFTER_S

    # --- totals ---

    def close_window(self, opened: OpenWindow) -> None:
        """Add a window to the totals and report it."""
        ledger, config, number = self._ledger, self._config, opened.number
        rows = Rows.in_rank_order(opened.rows, self._roster.all_ranks)
        window = self._measure_window(number, rows, self._merge_devices(rows, rows.ranks, opened.whole_readings))
        window.warming = ledger.note_warmup(number, rows, config.warmup_iterations, config.warmup_seconds)
        add_rows(ledger, number, rows)
        add_devices(ledger, window, config.min_coverage)
        ledger.note_loss_and_iteration(rows)
        self._check_training_loss(rows, rows[-1].end_time_s)
        # Of many reports only the sums are kept: the reports have a thousand times as many objects.
        self._recent[number] = replace(window, rows=rows.merge(Rows())) if is_large(len(rows)) else window
        while len(self._recent) > MAX_RECENT:
            del self._recent[min(self._recent)]
        if rows.max_iterations > 0:
            self._durations_s = [*self._durations_s[-15:], float(rows.columns["wall_s"].max())]
        absent = sorted(self._roster.missing_ranks(rows.ranks))
        if absent:
            text = f"window {number} closed without rank {_ranks_text(absent)}"
            self._events.record(Event(rows[-1].end_time_s, "missing", text))
        self._note_lost_time(rows)
        ledger.slow_clocks.add_window(rows, self._roster.devices, self._roster.hellos)
        ledger.memory_pressure.add_window(rows)
        self._report_window(window)
        if any(map(attrgetter("reset"), rows)):
            ledger.run, ledger.run_after = Account(), number  # the run-to-date values start again

    def _note_lost_time(self, rows: Rows) -> None:
        """Move the time that ranks lost in iterations from kept work to its classes of goodput, and note stragglers."""
        ledger, matrix = self._ledger, IterationMatrix.of(rows)
        lost = ledger.iteration_losses.add_window(matrix) if matrix is not None else []
        straggling = self._stragglers.judge_window(rows, matrix, lost)
        self._note_straggling(straggling)
        for loss in (*lost, *straggling.lost):
            # Rounded iteration times may lose more than the steps of a window have: then the last losses are cut.
            ledger.goodput.attempt.move_to_phase(loss.window, loss.phase, loss.phase_s)
            seconds = {name: getattr(loss, name) for name in LOST_SECONDS}
            ledger.goodput.attempt.move_from_kept(loss.window, **seconds)
        share = ledger.goodput.attempt.share_in_newest_window(RECORDED_LOSSES)
        if share > MIN_SHARE >= self._recorded_share:  # the loss is new
            self._ranks_to_record.append(rows[0].rank)
        self._recorded_share = share

    def _note_straggling(self, straggling: Straggling) -> None:
        """Record the waits for slow ranks, and request recordings of a newly named rank and of a peer."""
        ledger, stragglers = self._ledger, self._stragglers
        ledger.last_ranks, verdicts, named = stragglers.waits.last_ranks, stragglers.verdicts, stragglers.named_ranks
        costs = straggling.seconds, straggling.rank_seconds, straggling.joules
        ledger.note_waits(HealthTotals(*costs, stragglers=len(named)))
        self._slowest = straggling.slowest
        for event in straggling.events:
            self._events.record(event)
        if verdicts and any(event.kind == "straggler" for event in straggling.events):
            slow, peers = verdicts[0].ranks[0], stragglers.peers
            self._ranks_to_record += [slow, *sorted(peers.groups[peers.by_rank[slow].group] - named)[:1]]

    def complete_window(self, number: int, rows: dict[int, RankReport], time_s: float) -> None:
        """Add late reports to the totals; the displayed values of the window do not change."""
        self._ledger.late += len(rows)
        ranks = sorted(rows)
        for rank in ranks if len(ranks) <= MAX_NAMED else ():
            text = f"rank {rank} reported window {number} after it had closed"
            self._events.record(Event(time_s, "late", text, rank))
        if len(ranks) > MAX_NAMED:
            text = f"{len(ranks)} ranks reported window {number} after it had closed: {_ranks_text(ranks)}"
            self._events.record(Event(time_s, "late", text))
        window = late = Window(number, Rows.in_rank_order(rows))
        add_rows(self._ledger, number, late.rows)
        self._check_training_loss(late.rows, time_s)
        if recent := self._recent.get(number):
            add_devices(self._ledger, recent, self._config.min_coverage, sign=-1)
            if recent.rows:
                window = self._measure_window(number, self._rows_with_late(recent.rows, rows))
            else:  # of a large job, only the sums of the reports were kept
                window = self._window_with_late(recent, rows)
            self._recent[number] = window
            add_devices(self._ledger, window, self._config.min_coverage)
        if self.last_report:
            window.warming = self.last_report.warming_up
            self._report_window(window, late)

    def _rows_with_late(self, earlier: Rows, late: dict[int, RankReport]) -> Rows:
        """Return earlier and late reports of a window; a late report may be a further part of a joined report."""
        rows = {row.rank: row for row in earlier}
        for rank, row in late.items():
            rows[rank] = with_earlier_part(rows.get(rank), row) if self._config.min_window_s else row
        return Rows.in_rank_order(rows, self._roster.all_ranks)

    def _window_with_late(self, recent: Window, rows: dict[int, RankReport]) -> Window:
        """Return a window, of which only sums are kept, with late reports, and with their devices that it lacks."""
        assert recent.merged is not None
        keys, late = recent.merged.row_by_key, Rows()
        for row in rows.values():
            late.append(replace(row, devices=tuple(device for device in row.devices if device.device not in keys)))
        both = recent.rows.merge(late)
        return self._measure_window(recent.number, both, recent.merged.merge(self._merge_devices(late, both.ranks)))

    def _merge_devices(self, rows: Rows, ranks: Sequence[int], readings: GpuReadings | None = None) -> Merged:
        """Return the devices of reports; ``ranks`` are all ranks with a report of the same window."""
        expected, members = self._roster.expected_devices(ranks), self._roster.ranks_by_device(ranks)
        return merge_devices(rows, expected, members, readings)

    def _measure_window(self, number: int, rows: Rows, merged: Merged | None = None) -> Window:
        """Return a window with its devices and its energy; the first window fixes the power scope of the job."""
        roster, ranks = self._roster, rows.ranks
        merged = self._merge_devices(rows, ranks) if merged is None else merged
        expected, without_device = roster.expected_devices(ranks), roster.ranks_without_device(ranks)
        not_joined = roster.missing_ranks(ranks) - roster.hellos.keys()
        # While other ranks train, the energy of ranks that left is unknown; after training this energy hardly matters.
        has_left = roster.presence.num_left and rows.max_iterations > 0
        departed_devices = roster.devices.keys() - expected.keys() if has_left else set()
        # The first window fixes the scope: the widest scope that every node has and that was mostly measured.
        by_scope = [  # of equal scopes, `max` returns the first one
            (scope, window_energy(merged, expected, scope, len(not_joined), len(without_device), departed_devices))
            for scope in roster.job.possible_scopes
        ]
        scope, energy = max(by_scope, key=lambda pair: min(pair[1].coverage or 0.0, MAX_SCOPE_COVERAGE))
        roster.fix_scope(scope)
        return Window(number, rows, merged, energy)

    # --- reports ---

    def _check_training_loss(self, rows: Rows, time_s: float) -> None:
        """Record in the ledger whether a window's loss is finite; after a change, also record an event."""
        ledger, first = self._ledger, rows.first_not_finite
        if rows.counts["losses_not_finite"]:
            if ledger.first_not_finite is None:
                ledger.first_not_finite = first
            if ledger.is_loss_finite:
                ledger.is_loss_finite = False
                text = f"the loss is NaN or infinite at iteration {first}"
                self._events.record(Event(time_s, "loss_not_finite", text))
        elif rows.loss is not None and not ledger.is_loss_finite:
            ledger.is_loss_finite = True
            shown, total = max(row.iteration_shown for row in rows), ledger.whole.counts.get("losses_not_finite", 0)
            after = f"after {total} losses of the run that were NaN or infinite"
            self._events.record(Event(time_s, "loss_finite", f"the loss is finite again at iteration {shown}, {after}"))

    def _report_window(self, window: Window, late: Window | None = None) -> None:
        """Report a window; a correction has only the late reports, because the other reports were already written."""
        correction = late is not None
        if not correction:
            self.last_merged = window.merged
            has_gaps = bool(self._ledger.reports_lost)
            self._audit.check_counts(window.rows, self._roster.job.known_job, has_gaps=has_gaps)
        report = report_of(window, self._ledger, self._roster, self.last_report, correction)
        report = replace(report, straggler=None if correction else self._slowest, stragglers=self._stragglers.verdicts)
        if not correction and not window.warming:
            job, progress = report.job, self._ledger.progress
            progress.add_mark(Mark(report.iteration, job.loop.time_s, total_joules(job)))
            report = replace(report, forecast=progress.forecast(report.total_iterations, job))
        self._ledger.reports += 1
        self.last_report = report
        self._closed.append(self._closed_window(report, window if late is None else late))
        if not correction:
            self._audit.check_values(window.rows, report, self._roster.job.known_job, self._roster.job.peak_source)
            self._energy.judge_window(window.rows, report)
            self._waste.judge_window(report)

    def _closed_window(self, report: ClusterReport, window: Window) -> Closed:
        rows, merged = window.rows, window.merged
        coverage = None  # of the energy of each rank, if the devices of the window have it: else computed from the rows
        if merged is not None and len(merged) == len(rows) and has_one_device_each(rows):
            is_measured = not np.isnan(merged.wall.energy[:, JOULES]).any() and (merged.span_s > 0).all()
            coverage = merged.energy_coverage if is_measured else None
        kept = KeptReports.chosen_from(rows, report.coverage.ranks_expected, rows.columns["busy_s"], coverage)
        return Closed(report, rows, kept)


def add_rows(ledger: Ledger, window: int, rows: Rows) -> None:
    """Add the times and counts of reports to all sums of a job, each report only once."""
    attempt = ledger.goodput.attempt
    has_hang = attempt.place_hangs(window, int(rows.columns["iteration_first"].min()))
    for account in ledger.accounts_of(window):
        account.add_rows(rows, has_hang)
    add_to(ledger.classes_s, {"iterations": float(rows.columns["time_s"].sum()), **rows.phases_s})
    attempt.add_rows(window, rows)
    ledger.audit.counts.add_reports(rows)
    if rows.values:
        ledger.values = merge_by_name((ledger.values, rows.values))


def add_devices(ledger: Ledger, window: Window, min_coverage: float, sign: int = 1) -> None:
    """Add a window's devices and energy; with a sign of -1 subtract them, before a late report is added."""
    number, merged, energy = window.number, window.merged, window.energy
    if merged is None or energy is None:
        return
    for account in ledger.accounts_of(number):
        account.add_devices(merged, sign)
        account.add_energy(number, energy, window.rows, min_coverage, sign)
    ledger.devices.add_window(number, energy.owners, energy.amounts, sign)
    if number <= ledger.warm_until:
        ledger.warmup_j += sign * energy.iterations_j
    add_to(ledger.classes_j, {"iterations": energy.iterations_j, **energy.phases_j}, sign)
    ledger.goodput.attempt.add_energy(number, energy.iterations_j, energy.phases_j, sign)


def _ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:MAX_NAMED])) + (", ..." if len(ranks) > MAX_NAMED else "")


class EventLog:
    """Counts events in the ledger, and stores the events for the file and the console until `take_events` is called."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._limit = EventLimit()
        self._events: list[Event] = []
        self._recorded_keys: dict[str, set[str]] = {}  # keys by kind: one kind cannot suppress events of other kinds

    def record(self, event: Event) -> None:
        """Count an event, and store it unless there are too many events."""
        counts, kind, rank = self._ledger.events, event.kind, event.rank
        if kind not in KINDS and kind not in counts and len(counts) >= MAX_KINDS:
            kind = OTHER
        counts[kind] = counts.get(kind, 0) + event.count
        if rank is not None and not 0 <= rank < self._ledger.world_size:
            rank = None  # a peer may send any number as its rank
        event = replace(event, kind=kind, text=one_line(event.text), rank=rank, attempt=self._ledger.attempt)
        if self._limit.admit(event):
            self._events.append(event)

    def record_once(self, event: Event, key: str = "") -> None:
        """Record an event only once per key; the default key is the event's text."""
        recorded_keys, key = self._recorded_keys.setdefault(event.kind, set()), key or event.text
        if key not in recorded_keys and len(recorded_keys) < MAX_RECORDED_KEYS:
            recorded_keys.add(key)
            self.record(event)

    def add_suppressed_counts(self, now_s: float = math.inf) -> None:
        """Add events with the counts of suppressed events, once a minute and at the end."""
        self._events += self._limit.take_left_out(now_s)

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
