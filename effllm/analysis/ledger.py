"""Totals over many runs, failed and killed runs included: runs, GPU-hours, energy, cost and goodput by a key.

The runs are run folders, or the lines that runs have appended to files in the folder ``EFFICIENTLLM_LEDGER``.
"""

from __future__ import annotations

import contextlib
import glob
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from effllm.analysis.database import Database, Progress
from effllm.analysis.run_folders import LINE_FILES, UnreadableRun, files_of, find_runs
from effllm.analysis.run_row import utc
from effllm.analysis.sides import CONFIGURATION, STALE_AFTER_S
from effllm.records.job import SCHEMA_VERSION, WindowReport, version_error
from effllm.records.plain_text import one_line
from effllm.records.verdict import HEALTHY, NO_VERDICT, NONE_FOUND, NOT_AVOIDABLE
from effllm.store.ledger_file import LINE_AFTER_S
from effllm.store.line_files import END, LineFiles
from effllm.store.reader import DECODE_ERRORS, JsonLines
from effllm.views.text.numbers import count_text

#: Classes of goodput that are work.
PRODUCTIVE = ("kept", "generation")
NOTHING = "-"  # name of the group of runs without a key
#: Status of a run without a last summary; one without any summary has been killed, or has just begun.
KILLED = ("killed", "unknown")
#: A larger value is not a measurement, and sums of such values overflow.
MAX_VALUE = 1e60
Number = Annotated[float, msgspec.Meta(ge=-MAX_VALUE, le=MAX_VALUE)]


class LedgerRun(msgspec.Struct):
    """One run: a line of a ledger file, or a row of the table `runs`; ``None`` means unknown."""

    run_id: str
    schema_version: int = SCHEMA_VERSION
    status: str = "unknown"
    folder: str | None = None
    project: str | None = None
    user: str | None = None
    account: str | None = None
    config: str | None = None  # the tag
    tags: tuple[str, ...] = ()  # only of a line
    hosts: tuple[str, ...] = ()
    gpu_models: tuple[str, ...] = ()
    model: str | None = None
    ranks: int | None = None
    gpus: int | None = None
    started_time_s: Number | None = None
    updated_time_s: Number | None = None  # unix time of these values
    cause: str | None = None  # of the verdict
    simulated: bool = False
    slow_hosts: tuple[str, ...] = ()  # hosts of stragglers
    goodput_ratio: Number | None = None
    gpu_hours: Number | None = None  # of a row without GPUs: hours of ranks
    wasted_gpu_hours: Number | None = None  # part of `gpu_hours`: losses that can be avoided
    total_joules: Number | None = None
    measured_joules: Number | None = None  # without a total: the measured part
    error_joules: Number | None = None  # random part of the error: half-width, 95 %
    gain_error: Number | None = None  # systematic part of the error as a share: half-width, 95 %
    gpu_cost: Number | None = None
    electricity_cost: Number | None = None
    co2_kg: Number | None = None
    currency: str = ""  # of the costs
    tokens_per_second_per_gpu: Number | None = None
    mfu_ratio: Number | None = None
    joules_per_token: Number | None = None

    @property
    def joules(self) -> float | None:
        return self.measured_joules if self.total_joules is None else self.total_joules

    @property
    def known_wasted_gpu_hours(self) -> float:
        """`wasted_gpu_hours`; 0 if unknown, negative or without GPUs."""
        return 0.0 if self.gpus == 0 else max(self.wasted_gpu_hours or 0.0, 0.0)


class LedgerRow(NamedTuple):
    """The totals of a group of runs."""

    group: str
    runs: int
    gpu_hours: float  # sum of the known GPU-hours
    without_hours: int  # runs with unknown GPU-hours
    killed: int  # runs whose GPU-hours are known until their last report
    joules: float | None  # sum of the measured energies; None if no run has one
    incomplete: int  # runs without a total energy
    error_joules: float  # random errors of different runs are independent
    gain_joules: float  # the gain of a board's sensor is the same in all runs, so the errors are added
    gpu_cost: float | None
    electricity_cost: float | None
    currency: str  # of both costs; of several currencies no sum is made
    co2_kg: float | None
    goodput_ratio: float | None  # weighted by device time
    wasted_gpu_hours: float
    cause: str | None  # the loss that verdicts name most often, weighted by wasted time
    simulated: int  # runs with simulated GPUs
    slow_runs: int  # with the key node: runs in which this host had a straggler


class Totals(NamedTuple):
    """The groups, the largest first, their sum, and a line for each file that was not read."""

    rows: list[LedgerRow]
    total: LedgerRow
    skipped: list[str]


def totals(runs: Sequence[LedgerRun], by: str, skipped: Sequence[str] = (), wasted: bool = False) -> Totals:
    """Return the totals of runs by a key of `KEYS`, ordered by GPU-hours, or by ``wasted`` GPU-hours.

    A run on several hosts belongs to the group of each host, in equal parts.
    """
    groups: dict[str, list[tuple[LedgerRun, float]]] = {}  # runs, each with the share that belongs to the group
    for run in runs:
        names = [one_line(text) for text in KEYS[by](run) if text] or [NOTHING]
        for name in names:
            groups.setdefault(name, []).append((run, 1.0 / len(names)))
    rows = [_ledger_row(name, members) for name, members in groups.items()]
    rows.sort(key=lambda row: (-(row.wasted_gpu_hours if wasted else row.gpu_hours), -row.runs, row.group))
    return Totals(rows, _ledger_row("total", [(run, 1.0) for run in runs]), list(skipped))


def _ledger_row(group: str, members: list[tuple[LedgerRun, float]]) -> LedgerRow:
    gpu_hours = [(0.0 if run.gpus == 0 else run.gpu_hours, share) for run, share in members]
    joules = [(run.joules, share) for run, share in members]
    measured = [(run, share) for run, share in members if run.joules is not None]
    with_goodput = [(run, (run.gpu_hours or 0.0) * share) for run, share in members if run.goodput_ratio is not None]
    device_hours = sum(hours for _, hours in with_goodput)
    kept_hours = sum((run.goodput_ratio or 0.0) * hours for run, hours in with_goodput)
    causes: dict[str, float] = {}
    for run, share in members:
        if run.cause not in (None, HEALTHY, NONE_FOUND, NO_VERDICT):
            cause = one_line(run.cause)
            causes[cause] = causes.get(cause, 0.0) + run.known_wasted_gpu_hours * share
    currencies = sorted({one_line(run.currency) for run, _ in members if run.currency})
    has_one_currency = len(currencies) < 2
    return LedgerRow(
        group=group,
        runs=len(members),
        gpu_hours=_sum(gpu_hours) or 0.0,
        without_hours=sum(value is None for value, _ in gpu_hours),
        killed=sum(run.status in KILLED and bool(run.gpu_hours) for run, _ in members),
        joules=_sum(joules),
        incomplete=sum(run.total_joules is None for run, _ in members),
        error_joules=math.hypot(*((run.error_joules or 0.0) * share for run, share in measured)),
        gain_joules=sum((run.gain_error or 0.0) * (run.joules or 0.0) * share for run, share in measured),
        gpu_cost=_sum((run.gpu_cost, share) for run, share in members) if has_one_currency else None,
        electricity_cost=_sum((run.electricity_cost, share) for run, share in members) if has_one_currency else None,
        currency=", ".join(currencies),
        co2_kg=_sum((run.co2_kg, share) for run, share in members),
        goodput_ratio=kept_hours / device_hours if device_hours else None,
        wasted_gpu_hours=sum(run.known_wasted_gpu_hours * share for run, share in members),
        cause=max(causes, key=lambda name: causes[name], default=None),
        simulated=sum(run.simulated for run, _ in members),
        slow_runs=sum(group in map(one_line, run.slow_hosts) for run, _ in members),
    )


def _sum(pairs: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the sum of the known values, each times its share; ``None`` if no value is known."""
    parts = [value * share for value, share in pairs if value is not None]
    return sum(parts) if parts else None


def read_ledger(
    paths: Sequence[Path], since_s: float | None = None, progress: Progress = lambda *_: None
) -> tuple[list[LedgerRun], list[str]]:
    """Return the runs of run folders and of ledger files, each once, and a line for each file that was not read.

    The paths are folders of runs, and files or folders of ``EFFICIENTLLM_LEDGER``. Runs that started before the unix
    time ``since_s`` are left out.
    """
    runs: list[LedgerRun] = []
    skipped: list[str] = []
    for path in paths:
        of_path, problems = _read_path(path, progress)
        runs, skipped = [*runs, *of_path], [*skipped, *problems]
    by_folder = {run.folder or id(run): run for run in runs}  # two paths may have the same run
    for run in by_folder.values():
        if run.folder and run.status in KILLED:
            _set_gpu_hours_by_last_window(run, Path(run.folder))
    return [run for run in by_folder.values() if since_s is None or (run.started_time_s or 0.0) >= since_s], skipped


def _set_gpu_hours_by_last_window(run: LedgerRun, folder: Path) -> None:
    """Set the GPUs and the GPU-hours of a killed run until its last window: its summary is up to a minute older."""
    files = LineFiles(folder, "windows")
    with contextlib.suppress(OSError, *DECODE_ERRORS):
        files.refresh()
        for _, line in files.lines_before(END, 1):
            window = msgspec.json.decode(line, type=WindowReport)
            gpus = window.coverage.gpus_expected
            if run.started_time_s is not None and gpus and abs(window.time_s) <= MAX_VALUE:
                run.gpus = gpus
                run.gpu_hours = max(run.gpu_hours or 0.0, (window.time_s - run.started_time_s) * gpus / 3600.0)


def _read_path(path: Path, progress: Progress) -> tuple[list[LedgerRun], list[str]]:
    """Return the runs at a path, and a line for each unread file; run folders replace ledger lines of their runs."""
    ledgered, skipped = ledger_runs(path)
    try:
        runs = find_runs(path)
    except UnreadableRun:
        if not ledgered:
            raise
        return ledgered, skipped
    database = Database(runs, columns=_COLUMNS, progress=progress)
    skipped += [f"{file.path}: {file.reason}" for file in database.skipped]
    values = ", ".join(f'{sql} AS "{name}"' for name, sql in _VALUES.items())
    rows = database.connection.execute(f"SELECT {values} FROM runs ORDER BY rowid").fetchall()
    recorded = [LedgerRun(**dict(zip(_VALUES, map(_none_if_impossible, row), strict=True))) for row in rows]
    keys = {(run.run_id, run.started_time_s) for run in recorded}
    return [*recorded, *(run for run in ledgered if (run.run_id, run.started_time_s) not in keys)], skipped


#: Field of `LedgerRun` -> its value in the table `runs`. Maps and JSON are slow in Python.
_VALUES = {
    **{name: name for name in ("run_id", "folder", "project", "account", "gpu_models", "model")},
    **{name: name for name in ("started_time_s", "updated_time_s")},
    "user": '"user"',
    # A summary that says "running" and is old is of a killed run.
    "status": "CASE WHEN status = 'running' AND epoch(now()) - coalesce(updated_time_s, 0) > "
    f"{STALE_AFTER_S} THEN 'killed' ELSE coalesce(nullif(status, ''), 'unknown') END",
    "config": f"tags['{CONFIGURATION}']",
    "hosts": "coalesce(hosts, [])",
    "ranks": "world_size",
    "gpus": "gpus_expected",
    "cause": "verdict_cause",
    "simulated": "coalesce(simulated, false)",
    "slow_hosts": "coalesce(json_extract_string(stragglers, '$[*].host'), [])",
    "goodput_ratio": "CASE WHEN cardinality(goodput_seconds) > 0 AND elapsed_s <> 0 THEN ("
    + " + ".join(f"coalesce(goodput_seconds['{name}'], 0)" for name in PRODUCTIVE)
    + ") / elapsed_s END",
    "gpu_hours": "device_seconds / 3600",
    "wasted_gpu_hours": "(device_seconds"
    + "".join(f" - coalesce(waterfall_seconds['{name}'], 0)" for name in NOT_AVOIDABLE)
    + ") / 3600",
    "currency": "coalesce(currency, '')",
    "total_joules": "energy_total_joules",
    "measured_joules": "energy_measured_joules",
    "error_joules": "metric_errors['energy_total_joules']",
    "gain_error": "energy_gain_error",
    **{name: f"energy_{name}" for name in ("gpu_cost", "electricity_cost", "co2_kg")},
    **{name: f"run_throughput_{name}" for name in ("tokens_per_second_per_gpu", "mfu_ratio")},
    "joules_per_token": "run_energy_joules_per_token",
}
_COLUMNS = sorted({word for sql in _VALUES.values() for word in re.findall(r"\w+", sql)})


def _none_if_impossible(value: Any) -> Any:
    return None if isinstance(value, float) and abs(value) > MAX_VALUE else value


def ledger_runs(place: Path) -> tuple[list[LedgerRun], list[str]]:
    """Return the runs in a ledger file or in those of a folder, and a line for each file that was not read completely.

    A later line of a run replaces an earlier one: a running job and each attempt write lines.
    """
    skipped: list[str] = []
    by_key: dict[tuple[Path, str, str | None], LedgerRun] = {}
    for path, problem in _ledger_files(place):
        lines, version_problem = JsonLines([path], LedgerRun), ""
        try:
            for run in () if problem else lines:
                if error := version_error(run.schema_version):
                    version_problem = error
                    continue
                tags = dict(tag.partition("=")[::2] for tag in run.tags)
                run.project, run.config = tags.get("project") or run.account, tags.get(CONFIGURATION)
                if run.status == "running" and time.time() - (run.updated_time_s or 0.0) > LINE_AFTER_S + STALE_AFTER_S:
                    run.status = "killed"
                # Runs of two users, or in two folders, can have the same run_id.
                by_key[path, run.run_id, run.folder] = run
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            skipped.append(f"{path}: {problem}")
        if lines.num_skipped:
            skipped.append(f"{path}: {count_text(lines.num_skipped, 'incomplete or invalid line')}")
        if version_problem:
            skipped.append(f"{path}: a line was left out: {version_problem}")
    return list(by_key.values()), skipped


def _ledger_files(path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each ledger file and why it cannot be read, or ""; the files of a run folder are left out."""
    folder, pattern = (path.parent, glob.escape(path.name)) if path.is_file() else (path, "*.jsonl")
    for path, problem in files_of(folder, pattern):
        if path.suffix == ".jsonl" and not LINE_FILES.fullmatch(path.name):
            yield path, problem


def _configuration(run: LedgerRun) -> str:
    devices = f"{run.ranks or '?'} x {', '.join(run.gpu_models or ()) or 'no GPU'}"
    return run.config or (f"{run.model}, {devices}" if run.model else devices)


#: Name of a key -> function that returns the groups of a run.
KEYS: dict[str, Callable[[LedgerRun], Iterable[str | None]]] = {
    "outcome": lambda run: [run.status],
    "project": lambda run: [run.project],
    "user": lambda run: [run.user],
    "account": lambda run: [run.account],
    "config": lambda run: [_configuration(run)],
    "node": lambda run: run.hosts,
    "month": lambda run: [(utc(run.started_time_s) or "")[: len("2026-01")]],
}
