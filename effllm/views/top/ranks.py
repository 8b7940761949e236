"""The ranks and hosts of a window, the worst first, each with the reason for its place.

A reason is an observation with its evidence.  Only a straggler verdict says that a rank delays others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct

from effllm.metrics.table import measured_quotient
from effllm.records.job import STEP_SECONDS, WindowReport
from effllm.records.rank import Event
from effllm.records.verdict import StragglerVerdict
from effllm.store.reader import RankRow

GB = 1e9
#: Reason -> meaning, the worst first.
REASONS: dict[str, str] = {
    "lost": "no heartbeat of the rank's agent for 15 s",
    "failed": "the rank left with another status than completed",
    "device_error": "Xid error, uncorrected memory error, or a device that does not answer, in this attempt",
    "missing": "the window closed without a report of the rank",
    "straggler": "named: slower than its peers by at least 5 % of an iteration",
    "throttled": "heat or hardware lowered the clock in at least 20 % of the window",
    "data_wait": "data wait longer than that of the median rank by at least 5 % of the iteration",
    "not_measured": "a part of the window has no energy or memory reading",
    "hot": "temperature above the median GPU by at least 8 degrees",
    "step_time": "step time differs from the median by at least 5 %; this alone does not show a slow rank",
}
_ORDER = {name: index for index, name in enumerate(REASONS)}
NO_REASON = len(REASONS)
MIN_THROTTLED, MIN_WAIT, MIN_STEP, MIN_MEASURED, HOTTER_C = 0.2, 0.05, 0.05, 0.999, 8.0  # as in `REASONS`
#: Maximum number of lines: a file or a page with a wrong number of ranks must not fill the memory.
MAX_RANKS = 10**6


class RankLine(NamedTuple):
    """One rank in the table; ``None``: not measured, or no report in the run folder."""

    rank: int
    host: str = ""
    reason_index: int = NO_REASON  # of the worst reason in `REASONS`
    reason_size: float = 0.0  # of the worst reason, larger is worse
    reason: str = ""  # name in `REASONS`
    text: str = ""
    step_s: float | None = None
    wait_ratio: float | None = None
    busy_ratio: float | None = None
    watts: float | None = None
    memory_gb: float | None = None
    temperature_c: float | None = None
    power_ratio: float | None = None  # power in the power limit
    memory_ratio: float | None = None  # memory in that of the GPU


class Limits(Struct, frozen=True):
    """The limits of a GPU of a rank, as in run.json."""

    power_limit_w: float | None = None
    memory_total_bytes: float | None = None


NO_LIMITS = Limits()


class HostLine(NamedTuple):
    """One host: its ranks, and the worst of them."""

    host: str
    ranks: int
    num_with_reason: int
    worst: RankLine
    step_s: float | None  # largest
    wait_ratio: float | None  # largest
    busy_ratio: float | None  # smallest
    watts: float | None  # sum; None if a rank has no value
    memory_gb: float | None  # largest
    temperature_c: float | None  # largest


#: Order of the table -> the field of which the largest value comes first.
_FIELD_OF = {
    "step": "step_s",
    "wait": "wait_ratio",
    "busy": "busy_ratio",
    "power": "watts",
    "memory": "memory_gb",
    "temperature": "temperature_c",
}
SORTS = ("reason", *_FIELD_OF, "rank", "host")


class RankTable:
    """The ranks of a job: those with a report or a reason, and the numbers of all others.

    ``lines`` are the former, ``hosts`` is by rank; ``is_complete``: all reports of the window are in the run folder.
    """

    def __init__(self, lines: Sequence[RankLine], num_ranks: int, hosts: Mapping[int, str], is_complete: bool) -> None:
        self.known_lines, self.num_ranks, self.hosts, self.is_complete = lines, num_ranks, hosts, is_complete
        self._ordered: dict[tuple[str, str, bool], Sequence[RankLine | HostLine]] = {}  # results of `ordered`

    def ordered(self, sort: str, text: str, by_host: bool) -> Sequence[RankLine | HostLine]:
        """Return the lines in an order, only those that contain a text; an order is computed once."""
        key = sort, text, by_host
        if key not in self._ordered:
            self._ordered[key] = self._host_lines(sort, text) if by_host else self._rank_lines(sort, text)
        return self._ordered[key]

    def lines_with_reason(self) -> list[RankLine]:
        return [line for line in self._rank_lines("reason", "") if line.reason]

    def _rank_lines(self, sort: str, text: str) -> list[RankLine]:
        ranks = {line.rank for line in self.known_lines}
        lines = sorted(self.known_lines, key=_rank_sort_key(sort))
        others = (RankLine(rank, self.hosts.get(rank, "")) for rank in range(self.num_ranks) if rank not in ranks)
        lines = sorted([*lines, *others], key=_rank_sort_key(sort)) if sort in ("rank", "host") else [*lines, *others]
        return [line for line in lines if _contains(line, text)] if text else lines

    def _host_lines(self, sort: str, text: str) -> list[HostLine]:
        of_host: dict[str, list[RankLine]] = {}
        for line in self._rank_lines("reason", ""):
            of_host.setdefault(line.host or "unknown host", []).append(line)
        hosts = [_host_line(host, lines) for host, lines in of_host.items()]
        if text:
            hosts = [line for line in hosts if text in line.host or _contains(line.worst, text)]
        return sorted(hosts, key=_host_sort_key(sort))


def _rank_sort_key(sort: str) -> Callable[[RankLine], Any]:
    if sort == "rank":
        return lambda line: line.rank
    if sort == "host":
        return lambda line: (line.host, line.reason_index, -line.reason_size, line.rank)
    if sort == "reason":
        return lambda line: (line.reason_index, -line.reason_size, line.rank)
    return lambda line: (getattr(line, _FIELD_OF[sort]) is None, -(getattr(line, _FIELD_OF[sort]) or 0.0), line.rank)


def _host_sort_key(sort: str) -> Callable[[HostLine], Any]:
    if sort in ("rank", "host"):
        return lambda line: line.host if sort == "host" else line.worst.rank
    if sort == "reason":
        return lambda line: (line.worst.reason_index, -line.num_with_reason, -line.worst.reason_size, line.host)
    return lambda line: (getattr(line, _FIELD_OF[sort]) is None, -(getattr(line, _FIELD_OF[sort]) or 0.0), line.host)


def _contains(line: RankLine, text: str) -> bool:
    """Return whether the filter's text is the number of the rank, or a part of its host or its reasons."""
    return text == str(line.rank) or text in line.host or text in line.text or text in line.reason


def _host_line(host: str, lines: Sequence[RankLine]) -> HostLine:
    watts = [line.watts for line in lines]
    return HostLine(
        host,
        len(lines),
        sum(bool(line.reason) for line in lines),
        lines[0],
        _max_or_none(line.step_s for line in lines),
        _max_or_none(line.wait_ratio for line in lines),
        min((line.busy_ratio for line in lines if line.busy_ratio is not None), default=None),
        None if None in watts else sum(value for value in watts if value is not None),
        _max_or_none(line.memory_gb for line in lines),
        _max_or_none(line.temperature_c for line in lines),
    )


def _max_or_none(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def rank_table(
    window: WindowReport | None,
    rows: Sequence[RankRow],
    states: RankStates,
    hosts: Mapping[int, str],
    num_ranks: int,
    limits: Mapping[int, Limits] = MappingProxyType({}),
) -> RankTable:
    """Return the table of a window of the job with ``num_ranks`` ranks, and the reports and states of ranks in it."""
    by_rank = {row.rank: row for row in rows}
    reasons_of: dict[int, list[_Reason]] = {}
    for reason in _reasons(window, by_rank, states):
        reasons_of.setdefault(reason.rank, []).append(reason)
    lines = []
    for rank in sorted({*by_rank, *reasons_of}):
        line = _line_of_report(rank, by_rank.get(rank), hosts.get(rank, ""), limits.get(rank, NO_LIMITS))
        if reasons := sorted(reasons_of.get(rank, ()), key=lambda reason: (_ORDER[reason.name], -reason.size)):
            worst, text = reasons[0], "; ".join(reason.text for reason in reasons)
            line = line._replace(reason_index=_ORDER[worst.name], reason_size=worst.size, reason=worst.name, text=text)
        lines.append(line)
    is_complete = window is not None and len(rows) >= window.coverage.ranks_reporting > 0
    num_ranks = min(max(num_ranks, lines[-1].rank + 1 if lines else 0), MAX_RANKS)
    return RankTable(lines, num_ranks, hosts, is_complete)


def _line_of_report(rank: int, row: RankRow | None, host: str, limits: Limits = NO_LIMITS) -> RankLine:
    if row is None:
        return RankLine(rank, host)
    iterations = row.iteration_last - row.iteration_first + 1
    temperature = row.gauges.get("temperature_c")
    iteration_s = row.busy_s + row.wait_s
    watts = measured_quotient(row.energy_j, row.energy_covered_s)
    return RankLine(
        rank,
        row.host or host,
        step_s=row.busy_s / iterations if iterations > 0 else None,
        wait_ratio=row.wait_s / iteration_s if iterations > 0 and iteration_s > 0 else None,
        busy_ratio=measured_quotient(row.utilization_seconds, row.utilization_covered_s),
        watts=watts,
        memory_gb=None if row.memory_peak_bytes is None else row.memory_peak_bytes / GB,
        temperature_c=None if temperature is None else temperature.most,
        power_ratio=measured_quotient(watts, limits.power_limit_w or 0.0),
        memory_ratio=measured_quotient(row.memory_peak_bytes, limits.memory_total_bytes or 0.0),
    )


class _Reason(NamedTuple):
    rank: int
    name: str  # in `REASONS`
    size: float  # larger is worse, among reasons of one name
    text: str


def _reasons(window: WindowReport | None, rows: Mapping[int, RankRow], states: RankStates) -> Iterator[_Reason]:
    for rank in states.lost:
        yield _Reason(rank, "lost", 0.0, "lost: no heartbeat for 15 s")
    for rank, text in states.failed.items():
        yield _Reason(rank, "failed", 0.0, text)
    for rank, text in states.device_errors.items():
        yield _Reason(rank, "device_error", 0.0, text)
    if window is None:
        return
    for rank in window.coverage.missing_ranks:
        yield _Reason(rank, "missing", 0.0, "no report of this window")
    for verdict in window.stragglers:
        text = straggler_text(verdict)
        yield from (_Reason(rank, "straggler", verdict.slowdown, text) for rank in verdict.ranks)
    slowest = window.straggler  # a page of metrics has only this one, without its verdict
    if slowest is not None and not window.stragglers:
        excess = slowest.time_s / slowest.median_s - 1
        yield _Reason(slowest.rank, "straggler", excess, f"own time {100 * excess:+.0f} %")
    yield from _reasons_of_reports(window, rows)


def straggler_text(verdict: StragglerVerdict) -> str:
    """Return a named straggler with its evidence and its reason."""
    who = f" (one of {len(verdict.ranks)} ranks that wait for each other)" if len(verdict.ranks) > 1 else ""
    why = "" if verdict.why == "unknown" else f": {verdict.why}"
    return f"straggler +{100 * verdict.slowdown:.1f} % by {verdict.evidence}{who}{why}"


def _reasons_of_reports(window: WindowReport, rows: Mapping[int, RankRow]) -> Iterator[_Reason]:
    steps = window.spread.get(STEP_SECONDS)
    is_complete = len(rows) >= window.coverage.ranks_reporting > 2
    lines = [_line_of_report(rank, row, "") for rank, row in rows.items()]
    waits = [line.wait_ratio for line in lines if line.wait_ratio is not None]
    temperatures_c = [line.temperature_c for line in lines if line.temperature_c is not None]
    # The median of outliers is not the median of the job.
    usual_wait = median(waits) if waits and is_complete else window.values.get("throughput/data_wait_ratio")
    usual_c = median(temperatures_c) if temperatures_c and is_complete else None
    for line in lines:
        row, wait, temperature_c = rows[line.rank], line.wait_ratio or 0.0, line.temperature_c or 0.0
        if steps is not None and steps.median > 0 and line.step_s is not None:
            excess = line.step_s / steps.median - 1
            if abs(excess) >= MIN_STEP:
                yield _Reason(line.rank, "step_time", abs(excess), f"step time {100 * excess:+.0f} % of the median")
        if usual_c is not None and temperature_c >= usual_c + HOTTER_C:
            yield _Reason(line.rank, "hot", temperature_c, f"{temperature_c:.0f} degC, median {usual_c:.0f}")
        if row.coverage is not None and row.coverage < MIN_MEASURED:
            gap = 1 - row.coverage
            yield _Reason(line.rank, "not_measured", gap, f"{100 * gap:.1f} % of the window not measured")
        if usual_wait is not None and wait >= usual_wait + MIN_WAIT:
            yield _Reason(line.rank, "data_wait", wait, f"data wait {100 * wait:.0f} %, usual {100 * usual_wait:.0f} %")
        if row.wall_s > 0 and (share := row.throttled_s.get("any", 0.0) / row.wall_s) >= MIN_THROTTLED:
            yield _Reason(line.rank, "throttled", share, f"throttled {100 * share:.0f} % of the window{_fault(row)}")


def _fault(row: RankRow) -> str:
    """Return the clocks event reason that is a fault with the longest time, as ": heat"; "" without one."""
    faults = {name: seconds for name, seconds in row.throttled_s.items() if name not in ("any", "power_cap")}
    return f": {max(faults, key=faults.__getitem__).replace('_', ' ')}" if faults else ""


# --- the events of a run, and the state of its ranks after those up to a moment ---
#: Maximum number of events that are kept for the screen; the oldest are dropped.
MAX_EVENTS = 20_000
#: Events of single ranks that a job of many ranks has in large numbers: they change states, but are not shown.
NOT_SHOWN = frozenset({"joined", "left", "late", "missing"})
_OF_RANKS = frozenset({"joined", "left", "rank_lost", "back"})
_OF_DEVICES = frozenset({"xid", "ecc", "stale"})
_OF_JOB = frozenset({"stalled", "resumed", "restarted", "loss_not_finite", "loss_finite"})
COMPLETED = "completed"


class RankStates(NamedTuple):
    """Ranks with a problem, by the events up to a moment."""

    lost: frozenset[int] = frozenset()
    failed: Mapping[int, str] = {}  # ranks that left with a status other than completed
    device_errors: Mapping[int, str] = {}
    stall: str = ""  # text of the event, while no rank, or not every rank, makes progress
    loss_is_finite: bool = True


class EventHistory:
    """The events of a run in the order of their file."""

    def __init__(self) -> None:
        self._shown: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._changes: list[Event] = []  # that change the state of a rank or of the job
        self._last_states: dict[tuple[int, float], RankStates] = {}  # last result of `states`, by changes and moment

    def add_events(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.kind not in NOT_SHOWN:
                self._shown.append(event)
            if event.kind in _OF_JOB or (event.kind in _OF_RANKS | _OF_DEVICES and event.rank is not None):
                self._changes.append(event)

    def newest(self, until_s: float, count: int) -> Sequence[Event]:
        """Return the last events up to a moment, newest first."""
        return list(islice((event for event in reversed(self._shown) if event.time_s <= until_s), count))

    def states(self, until_s: float) -> RankStates:
        """Return the states of the ranks at a moment."""
        key = len(self._changes), until_s
        if key not in self._last_states:
            self._last_states = {key: _states_after(change for change in self._changes if change.time_s <= until_s)}
        return self._last_states[key]


def _states_after(changes: Iterable[Event]) -> RankStates:
    """Return the states after the events; a new attempt begins without lost, failed and stalled ranks."""
    lost: set[int] = set()
    failed: dict[int, str] = {}
    errors: dict[int, str] = {}
    stall, loss_is_finite, attempt = "", True, 0
    for change in changes:
        if change.attempt > attempt:
            attempt, stall = change.attempt, ""
            for of_attempt in (lost, failed, errors):
                of_attempt.clear()
        kind, rank = change.kind, -1 if change.rank is None else change.rank  # -1: of the job
        if kind == "rank_lost":
            lost.add(rank)
        elif kind in _OF_RANKS:
            lost.discard(rank)
            if kind == "left" and change.text and not change.text.endswith((f": {COMPLETED}", ": ended")):
                failed[rank] = change.text.removeprefix(f"rank {rank} ")
        elif kind in _OF_DEVICES:
            errors[rank] = f"{kind}: {change.text}"
        elif kind.startswith("loss"):
            loss_is_finite = kind == "loss_finite"
        else:
            stall = change.text if kind == "stalled" else ""
    return RankStates(frozenset(lost), failed, errors, stall, loss_is_finite)
