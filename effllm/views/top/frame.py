"""Everything that the screen shows at one position of a run, as values, and as a document for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from effllm.records.forecast import Foretold
from effllm.records.job import Coverage, WindowReport
from effllm.records.rank import Event
from effllm.records.verdict import StragglerVerdict, Verdict, Waterfall
from effllm.views.text.numbers import duration
from effllm.views.top.ranks import COMPLETED, HostLine, RankLine, RankStates, RankTable

#: Incremented when a name of the document is removed or changes its meaning; docs/top.md describes the names.
DOCUMENT_VERSION = 1
MAX_WORST, MAX_EVENTS = 16, 10
#: Exit status.
NO_PROBLEM, PROBLEM, WRONG_USE, NO_DATA = range(4)

#: summary.json is written every minute; after this time a run that is not over may have been killed.
NO_UPDATE_S = 180.0
#: States of a run that is over, or that does not continue, and that are problems.
BROKEN = ("failed", "killed", "stalled")
MAX_NAMED_RANKS = 4


class Problem(NamedTuple):
    """A problem of the job at this position."""

    kind: str
    text: str


class Head(NamedTuple):
    """The identity and the progress of the run."""

    name: str
    user: str | None = None
    status: str = "unknown"  # of summary.json; or running, stalled or no_update
    is_over: bool = False
    age_s: float | None = None  # time since the last change of the run's files; None if the run is over
    elapsed_s: float | None = None
    attempt: int | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    forecast: Mapping[str, Foretold] = MappingProxyType({})
    currency: str = ""
    style: str = "Iteration"
    simulated: bool = False


class RunPlace(NamedTuple):
    """The position in the run."""

    is_newest: bool = True
    share: float = 1.0  # share of the windows before the position
    time_s: float | None = None  # end of the window
    window: int | None = None


SECONDS_TAG = "throughput/seconds_per_iteration"


def is_point(window: WindowReport) -> bool:
    """Whether a window is a point of the curves: it has an iteration time, and is no correction of an earlier one."""
    return SECONDS_TAG in window.values and not window.correction


#: Own time of an iteration by rank, of each window.
RankTimes = Sequence[Mapping[int, float]]


class TopFrame(NamedTuple):
    """The values of one screen."""

    head: Head
    place: RunPlace = RunPlace()
    coverage: Coverage | None = None
    values: Mapping[str, float] = {}  # by tag, as in windows-*.jsonl
    loss: float | None = None
    over: str = ""  # base of the values as text: whole run, or the window
    doubtful: Sequence[str] = ()
    verdict: Verdict | None = None
    verdict_note: str = ""  # for which time the verdict is
    waterfall: Waterfall | None = None
    problems: Sequence[Problem] = ()
    points: Sequence[WindowReport] = ()  # of the curves
    rank_times: RankTimes = ()
    ranks: RankTable = RankTable((), 0, {}, False)
    lines: Sequence[RankLine | HostLine] = ()  # of the table, in the order that the view asks for
    events: Sequence[Event] = ()  # newest first
    notes: Sequence[str] = ()  # what the source cannot show


def status_of(status: str, is_over: bool, states: RankStates, age_s: float | None) -> str:
    """Return the state of a run: the summary is up to a minute old, so a stall is taken from the events."""
    if is_over:
        return status
    if states.stall:
        return "stalled"
    return "no_update" if age_s is not None and age_s > NO_UPDATE_S else "running"


def problems_of(
    head: Head, states: RankStates, coverage: Coverage | None, stragglers: Sequence[StragglerVerdict]
) -> Iterator[Problem]:
    """Yield the problems of a job, the worst first; there is no problem of a completed job."""
    if head.status == COMPLETED:
        return
    if head.status in BROKEN:
        yield Problem(head.status, states.stall if head.status == "stalled" and states.stall else head.status)
    if head.status == "no_update":
        age = duration(head.age_s or 0.0)
        yield Problem("no_update", f"nothing new for {age}: the job may have been killed, or it hangs")
    if states.lost:
        yield Problem("rank_lost", f"{_ranks_text(states.lost)} lost: no heartbeat for 15 s")
    if states.failed:
        yield Problem("rank_failed", f"{_ranks_text(states.failed)} failed")
    if states.device_errors:
        yield Problem("device_error", f"device errors on {_ranks_text(states.device_errors)}")
    if coverage is not None and coverage.missing_ranks:
        yield Problem("missing", f"no report of {_ranks_text(coverage.missing_ranks)} in this window")
    if not states.loss_is_finite:
        yield Problem("loss_not_finite", "loss is not finite")
    if stragglers:
        ranks = [rank for straggler in stragglers for rank in straggler.ranks]
        yield Problem("straggler", f"straggler: {_ranks_text(ranks)}")


def _ranks_text(ranks: Sequence[int] | frozenset[int] | Mapping[int, str]) -> str:
    """Return ranks as text; in a list of many ranks only the first."""
    numbers = sorted(set(ranks))
    names = ", ".join(map(str, numbers[:MAX_NAMED_RANKS]))
    more = f" and {len(numbers) - MAX_NAMED_RANKS:,} more" if len(numbers) > MAX_NAMED_RANKS else ""
    return f"rank{'s' * (len(numbers) > 1)} {names}{more}"


def exit_status(frame: TopFrame) -> int:
    """Return the exit status of ``--once``."""
    if frame.place.window is None and frame.verdict is None and not frame.values:
        return NO_DATA
    return PROBLEM if frame.problems else NO_PROBLEM


def document(frame: TopFrame) -> dict[str, Any]:
    """Return the document; a value that is not measured is absent or ``null``."""
    head = msgspec.to_builtins(frame.head._replace(forecast=dict(frame.head.forecast))._asdict())
    run = {"run_id": frame.head.name, **_without(head, "name", "age_s", "style"), "unchanged_s": frame.head.age_s}
    verdict = msgspec.to_builtins(frame.verdict)
    if verdict is not None:
        verdict.pop("evidence", None)  # effllm inspect --json
    worst = frame.ranks.lines_with_reason()
    return {
        "schema_version": DOCUMENT_VERSION,
        "run": run,
        "window": {"window": frame.place.window, "end_time_s": frame.place.time_s, "loss": frame.loss},
        "verdict": verdict,
        "problems": [problem._asdict() for problem in frame.problems],
        "values": dict(frame.values),
        "doubtful": list(frame.doubtful),
        "coverage": msgspec.to_builtins(frame.coverage),
        "ranks": {
            "count": frame.ranks.num_ranks,
            "with_reason": len(worst),
            "all_have_values": frame.ranks.is_complete,
            "worst": [_without(line._asdict(), "reason_index", "reason_size") for line in worst[:MAX_WORST]],
        },
        "events": [msgspec.to_builtins(event) for event in frame.events[:MAX_EVENTS]],
        "notes": list(frame.notes),
    }


def _without(fields: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}
