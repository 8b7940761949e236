"""One attempt of a job: rank-seconds and joules by class, and the part that a later attempt repeats. No I/O."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping

import msgspec
from msgspec import Struct

from effllm.job.account import Rows
from effllm.job.goodput_tiles import RankTimes
from effllm.records.rank import CHECKPOINT, EVALUATION, GENERATION, MARKED_PHASES, OTHER, SHUTDOWN, STARTUP

KEPT, REDONE, DATA, STRAGGLING, HANG = "kept", "redone", "data", "straggling", "hang"
SLOW, WARMUP, UNEVEN = "slow_iterations", "warmup", "uneven_ranks"
RESTART_GAP, IDLE, UNKNOWN = "restart_gap", "idle", "unknown"
CLASSES = (
    KEPT, GENERATION, REDONE, EVALUATION, CHECKPOINT, OTHER, DATA, SLOW, WARMUP, STARTUP, SHUTDOWN,
    STRAGGLING, UNEVEN, HANG, RESTART_GAP, IDLE, UNKNOWN,
)  # fmt: skip
#: Phases that a restart does not repeat, or that are productive.
_NOT_REPEATED = (STARTUP, SHUTDOWN, GENERATION)
#: Classes of the time in a span.
PARTS = (KEPT, DATA, STRAGGLING, HANG, SLOW, WARMUP, UNEVEN)

MAX_SPANS = 512  # number of spans after a merge; above twice this number, pairs of older spans are merged
MAX_HANGS = 1000  # maximum number of windows with stored hangs that are not in a report yet


class Span(Struct, array_like=True):
    """Iterations of one or more consecutive windows: rank-seconds by class, and the total joules."""

    window_first: int
    window_last: int
    first: int = 1  # first and last ordinal of the iterations; first > last if no iteration ended
    last: int = 0
    kept_s: float = 0.0
    data_s: float = 0.0
    straggling_s: float = 0.0
    hang_s: float = 0.0
    shutdown_s: float = 0.0  # shutdown time without hangs; not part of `seconds`
    joules: float = 0.0
    phases_s: float = 0.0  # evaluation, checkpoint and other phases; not part of `seconds`
    slow_s: float = 0.0
    warmup_s: float = 0.0
    uneven_s: float = 0.0

    @property
    def seconds(self) -> tuple[float, ...]:
        """Rank-seconds in the order of `PARTS`."""
        return self.kept_s, self.data_s, self.straggling_s, self.hang_s, self.slow_s, self.warmup_s, self.uneven_s

    @property
    def parts_j(self) -> tuple[float, ...]:
        """Joules in proportion to time, because the energy of data waits is not measured separately."""
        whole_s = sum(self.seconds)
        if whole_s <= 0:
            return (self.joules, *(0.0 for _ in PARTS[1:]))
        return tuple(seconds / whole_s * self.joules for seconds in self.seconds)

    def absorb(self, later: Span) -> None:
        """Add the sums of a later span, and extend this span to its windows and iterations."""
        self.window_last = later.window_last
        if later.last >= later.first:
            self.first = min(self.first, later.first) if self.last >= self.first else later.first
            self.last = max(self.last, later.last)
        for name in _SUMMED_FIELDS:
            setattr(self, name, getattr(self, name) + getattr(later, name))


_SUMMED_FIELDS = Span.__struct_fields__[4:]  # all fields after the windows and iterations


class Redone(Struct, array_like=True):
    """The part of an attempt that a later attempt repeated."""

    seconds: float = 0.0  # rank-seconds
    joules: float = 0.0
    iterations: int = 0
    around_s: float = 0.0  # rank-seconds of waits and phases between the repeated iterations: an estimate
    max_around_s: float = 0.0  # its upper bound

    def add_span(self, span: Span, ordinal: float) -> None:
        """Add the part of a span from the iteration ``ordinal`` on; at most, all its phases are in this part."""
        count = span.last - span.first + 1
        share = min(max((span.last - ordinal + 1) / count, 0.0), 1.0) if count > 0 else 0.0
        if share:
            self.seconds += share * span.kept_s
            self.joules += share * span.parts_j[0]
            self.iterations += round(share * count)
            waits_s = share * (span.data_s + span.straggling_s + span.slow_s + span.uneven_s)
            self.around_s += waits_s + share * span.phases_s
            self.max_around_s += waits_s + span.phases_s


class Attempt(Struct):
    """One attempt of the job."""

    number: int
    begin_s: float | None = None  # start; this and the next two are on the time axis of the run
    heard_s: float = 0.0  # the last message
    end_s: float | None = None  # None while the attempt is running
    zero_time_s: float = 0.0  # unix time at position 0 of the axis, by this attempt's clock
    world_size: int = 0
    status: str = "running"
    ranks: RankTimes = msgspec.field(default_factory=RankTimes)
    seconds: dict[str, float] = {}  # by class: rank-seconds of all reports
    joules: dict[str, float] = {}
    spans: list[Span] = []
    hangs: dict[int, float] = {}  # by window: rank-seconds of hangs that are not in a report yet
    hang_at_end_s: float = 0.0  # rank-seconds of hangs that were subtracted from the shutdown
    data_in_steps_s: float = 0.0  # rank-seconds of steps in which ranks waited for the data of other ranks
    offset: int = 0  # displayed number of an iteration minus its ordinal
    offset_at_start: int = 0
    is_numbered: bool = False  # whether the offset was given, not assumed
    first: int = 0  # first and last ordinal of the iterations so far
    last: int = 0
    reached: int = 0  # the largest ordinal of an iteration in a BYE
    idle_s: float = 0.0  # idle rank-seconds; set at the end of the attempt
    redone_from: float | None = None  # the smallest repeated number, for which `redone` was computed
    redone: Redone = msgspec.field(default_factory=Redone)
    ranks_joined: int = 0  # number of ranks whose GPUs are in `gpus`; 0 if unknown
    gpus: int = 0
    unused_gpus: int | None = None  # allocated GPUs that no rank uses; None if they are not known on all nodes

    @property
    def known_end_s(self) -> float:
        """End of the last rank's reports, or the time of the last message if this end is unknown."""
        last_axis_s = self.ranks.last_axis_s
        return self.heard_s if math.isnan(last_axis_s) else last_axis_s

    def add_rows(self, window: int, rows: Rows) -> None:
        """Add the reports of a window; each report may be added only once."""
        columns = rows.columns
        covered_s = columns["busy_s"] + columns["wait_s"]
        for i, row in enumerate(rows):
            if row.phases_s:
                covered_s[i] += sum(row.phases_s.values())
        begin_s = self.ranks.add_reports(rows.ranks, columns, covered_s, self.heard_s)
        self.begin_s = begin_s if self.begin_s is None else min(self.begin_s, begin_s)
        _add_by_class(self.seconds, rows.phases_s)
        firsts, lasts, shown = columns["iteration_first"], columns["iteration_last"], columns["iteration_shown"]
        worked = lasts >= firsts  # reports with iterations
        first, last = (int(firsts[worked].min()), int(lasts[worked].max())) if worked.any() else (1, 0)
        if last:
            self.first, self.last = min(self.first or first, first), max(self.last, last)
        # The training loop's iteration numbers replace the initial numbers when a rank reports them.
        new_offsets = (shown - lasts)[shown - lasts != self.offset_at_start]
        if new_offsets.size:
            self.offset = int(new_offsets[0])
        added = Span(window, window, first, last, float(columns["busy_s"].sum()), float(columns["wait_s"].sum()))
        added.shutdown_s = rows.phases_s.get(SHUTDOWN, 0.0)
        added.phases_s = sum(value for name, value in rows.phases_s.items() if name not in _NOT_REPEATED)
        self._add_to_span(window, added)
        if window in self.hangs:
            self.move_to_hang(window, self.hangs.pop(window))

    def add_energy(self, window: int, iterations_j: float, phases_j: Mapping[str, float], sign: int = 1) -> None:
        """Add the joules of a window; with a sign of -1 subtract them, before a late report is added."""
        self._add_to_span(window, Span(window, window, joules=sign * iterations_j))
        _add_by_class(self.joules, phases_j, sign)

    def move_from_kept(self, window: int, **seconds: float) -> None:
        """Move rank-seconds of a closed window from kept to fields of `Span`; negative ones move back to kept."""
        span = self._span_of(window)
        if span is not None:
            self._add_span_to_sums(span, -1)
            for name, asked_s in sorted(seconds.items(), key=lambda item: item[1]):  # negative first: kept_s grows
                before_s = getattr(span, name)
                moved_s = min(max(asked_s, -before_s), span.kept_s)
                self.data_in_steps_s += moved_s if name == "data_s" else 0.0
                span.kept_s -= moved_s
                setattr(span, name, before_s + moved_s)
            self._add_span_to_sums(span, 1)

    def share_in_newest_window(self, classes: Collection[str]) -> float:
        """Return the share of classes of `PARTS` in the newest window."""
        seconds = dict(zip(PARTS, self.spans[-1].seconds if self.spans else (), strict=False))
        total = sum(seconds.values())
        return sum(seconds.get(name, 0.0) for name in classes) / total if total > 0 else 0.0

    def move_to_phase(self, window: int, name: str, seconds: float) -> None:
        """Move rank-seconds of a closed window, in which ranks waited for a phase of few ranks, to this phase."""
        span = self._span_of(window)
        if span is not None and seconds > 0:
            self._add_span_to_sums(span, -1)
            moved_s = min(seconds, span.kept_s)
            moved_j = moved_s / sum(span.seconds) * span.joules if moved_s else 0.0
            span.kept_s -= moved_s
            span.joules -= moved_j
            span.phases_s += moved_s
            self._add_span_to_sums(span, 1)
            _add_by_class(self.seconds, {name: moved_s})
            _add_by_class(self.joules, {name: moved_j})

    def move_to_hang(self, window: int, rank_seconds: float) -> None:
        """Move a period without progress of any rank from its class to hang.

        Until the open window closes, whose iterations or shutdown contain the period, it is a hang without a report.
        """
        span = self._span_of(window)
        if span is not None:
            from_shutdown_s = min(rank_seconds, span.shutdown_s)
            if from_shutdown_s:
                span.shutdown_s -= from_shutdown_s
                self.hang_at_end_s += from_shutdown_s
                _add_by_class(self.seconds, {SHUTDOWN: -from_shutdown_s, HANG: from_shutdown_s})
            from_kept_s = min(rank_seconds - from_shutdown_s, span.kept_s)
            self.move_from_kept(window, hang_s=from_kept_s)
            rank_seconds -= from_shutdown_s + from_kept_s
        if rank_seconds > 0 and (len(self.hangs) < MAX_HANGS or window in self.hangs):
            self.hangs[window] = self.hangs.get(window, 0.0) + rank_seconds

    def place_hangs(self, window: int, first: int) -> bool:
        """Move noted hangs to the reported window that contains them; return whether this window has a hang.

        A hang is noted for the number after the last closed window.  The report has a larger number if windows are
        joined, and in the first window of a later attempt.  If reports were lost before, their windows keep their
        hangs.  The reported window is not counted yet; ``first`` is the ordinal of its first iteration.
        """
        if first <= self.last + 1:
            for noted in [number for number in self.hangs if number < window and self._span_of(number) is None]:
                self.hangs[window] = self.hangs.get(window, 0.0) + self.hangs.pop(noted)
        return window in self.hangs

    # --- spans: `seconds` and `joules` include their sums, so a span that changes is subtracted and added again ---

    def _span_of(self, window: int) -> Span | None:
        """Return the span that contains a window; ``None`` without one."""
        i = bisect_left(self.spans, window, key=lambda span: span.window_last)
        return self.spans[i] if i < len(self.spans) and self.spans[i].window_first <= window else None

    def _add_to_span(self, window: int, added: Span) -> None:
        """Add values to the span of a window; a missing span is created."""
        span = self._span_of(window)
        if span is None:
            span = Span(window, window)
            self.spans.insert(bisect_left(self.spans, window, key=lambda span: span.window_last), span)
        window_last = span.window_last
        self._add_span_to_sums(span, -1)
        span.absorb(added)
        span.window_last = window_last  # `added` is inside a span of several windows
        self._add_span_to_sums(span, 1)
        if len(self.spans) > 2 * MAX_SPANS:
            self.merge_spans(MAX_SPANS)

    def _add_span_to_sums(self, span: Span, sign: int) -> None:
        """Add a span to `seconds` and `joules`; a sign of -1 subtracts it."""
        for name, seconds, joules in zip(PARTS, span.seconds, span.parts_j, strict=True):
            if seconds or joules:
                self.seconds[name] = self.seconds.get(name, 0.0) + sign * seconds
                self.joules[name] = self.joules.get(name, 0.0) + sign * joules

    def merge_spans(self, limit: int) -> None:
        """Merge pairs of consecutive spans down to ``limit``; older spans first, because restarts need newer spans."""
        spans = self.spans
        while len(spans) > limit:
            pairs = min(len(spans) - limit, max(len(spans) // 4, 1))  # at most, the older half of the spans
            for i in range(pairs):
                spans[2 * i].absorb(spans[2 * i + 1])
            del spans[1 : 2 * pairs : 2]

    # --- end ---

    def end(self, status: str) -> None:
        """Set the end, the idle time and the status of this attempt; the times of its ranks are dropped."""
        self.end_s = self.known_end_s
        if self.begin_s is not None:
            idle_s = self.ranks.idle_s(self.begin_s, self.end_s)
            self.idle_s = min(idle_s, self._unreported_s(self.end_s))
        self.status, self.ranks = status, RankTimes()

    def absorb(self, later: Attempt) -> None:
        """Add the next attempt to this attempt; the time between the two attempts becomes `UNKNOWN`."""
        self.end_s = later.end_s
        _add_by_class(self.seconds, later.seconds)
        _add_by_class(self.joules, later.joules)
        self.hang_at_end_s += later.hang_at_end_s
        self.data_in_steps_s += later.data_in_steps_s
        self.idle_s += later.idle_s
        shift = later.offset - self.offset
        for span in later.spans:
            span.first, span.last = span.first + shift, span.last + shift
        self.first, self.last = self.first or later.first + shift, max(self.last, later.last + shift)
        self.spans, self.redone_from, self.status = self.spans + later.spans, None, later.status

    # --- results ---

    def compute_redone(self, number: float | None) -> None:
        """Compute the lost work: iterations from ``number`` on were repeated."""
        if number is None or self.redone_from == number:
            return
        redone = Redone()
        for span in self.spans:
            redone.add_span(span, number - self.offset)
        self.redone, self.redone_from = redone, number

    def _unreported_s(self, end_s: float) -> float:
        """Return the rank-seconds of the attempt up to its end that no report covers."""
        if self.begin_s is None:
            return 0.0
        return max(max(self.world_size, 1) * (end_s - self.begin_s) - sum(self.seconds.values()), 0.0)

    def seconds_by_class(self, end_s: float) -> dict[str, float]:
        """Return the rank-seconds by class; their sum is the attempt's duration times its number of ranks."""
        classes = {name: max(value, 0.0) for name, value in self.seconds.items()}
        redone_s = min(self.redone.seconds, classes.get(KEPT, 0.0))
        classes[KEPT] = classes.get(KEPT, 0.0) - redone_s
        classes[REDONE] = redone_s
        unreported_s = self._unreported_s(end_s)
        idle_s = self.idle_s if self.end_s is not None else self.ranks.idle_s(self.begin_s or 0.0, end_s)
        idle_s = min(idle_s, unreported_s)
        hang_s = min(sum(self.hangs.values()), unreported_s - idle_s)
        classes[IDLE] = idle_s
        classes[HANG] = classes.get(HANG, 0.0) + hang_s
        classes[UNKNOWN] = unreported_s - idle_s - hang_s
        return classes

    def joules_by_class(self) -> dict[str, float]:
        """Return the joules by class; those of repeated iterations and of hangs in the shutdown are moved to these."""
        joules = {name: max(value, 0.0) for name, value in self.joules.items()}
        if self.hang_at_end_s > 0:
            share = self.hang_at_end_s / (self.hang_at_end_s + max(self.seconds.get(SHUTDOWN, 0.0), 0.0))
            hang_j = share * joules.get(SHUTDOWN, 0.0)
            joules[SHUTDOWN] = joules.get(SHUTDOWN, 0.0) - hang_j
            joules[HANG] = joules.get(HANG, 0.0) + hang_j
        redone_j = min(self.redone.joules, joules.get(KEPT, 0.0))
        joules[KEPT] = joules.get(KEPT, 0.0) - redone_j
        joules[REDONE] = redone_j
        return joules


def _add_by_class(sums: dict[str, float], more: Mapping[str, float], sign: int = 1) -> None:
    """Add values by class; an unknown class counts as `OTHER`."""
    for name, value in more.items():
        key = name if name in CLASSES else OTHER
        sums[key] = sums.get(key, 0.0) + sign * value


assert set(MARKED_PHASES) <= set(CLASSES)
