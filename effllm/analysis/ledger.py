"""Totals over many runs, failed and killed runs included: runs, GPU-hours, energy, cost and goodput by a key.

The runs are run folders, or the lines that runs have appended to files in the folder ``EFFICIENTLLM_LEDGER``.
"""

from __future__ import annotations

import glob
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from effllm.analysis.column import quoted
from effllm.analysis.database import Database, Progress
from effllm.analysis.run_folders import LINE_FILES, UnreadableRun, files_of, find_runs
from effllm.analysis.run_row import utc
from effllm.analysis.sides import CONFIGURATION, STALE_AFTER_S
from effllm.records.job import SCHEMA_VERSION, version_error
from effllm.records.plain_text import one_line
from effllm.records.verdict import HEALTHY, NO_VERDICT, NONE_FOUND
from effllm.store.regular_file import lines_of

#: Classes of goodput that are work; all other time is wasted.
PRODUCTIVE = ("kept", "generation")
NOTHING = "-"  # name of the group of runs without a key
#: A larger value is not a measurement, and sums of such values overflow.
MAX_VALUE = 1e60
Number = Annotated[float, msgspec.Meta(ge=-MAX_VALUE, le=MAX_VALUE)]


class LedgerRun(NamedTuple):
    """One run; ``None`` means unknown."""

    run_id: str
    folder: str
    groups: tuple[str, ...]  # by the key of the totals
    status: str
    started_time_s: float | None
    gpu_hours: float | None  # 0 without GPUs
    device_hours: float  # of GPUs, or of ranks without GPUs
    goodput_ratio: float | None
    joules: float | None  # measured energy
    is_complete: bool  # whether `joules` is the whole energy
    error_joules: float  # random part of the error: half-width, 95 %
    gain_joules: float  # systematic part of the error: half-width, 95 %
    gpu_cost: float | None
    electricity_cost: float | None
    co2_kg: float | None
    cause: str | None  # of the verdict
    simulated: bool
    slow_hosts: tuple[str, ...] = ()  # hosts of stragglers
    unused_gpu_hours: float = 0.0  # part of `gpu_hours`: allocated GPUs that no rank used


class LedgerRow(NamedTuple):
    """The totals of a group of runs."""

    group: str
    runs: int
    gpu_hours: float  # sum of the known GPU-hours
    without_hours: int  # runs with unknown GPU-hours
    joules: float | None  # sum of the measured energies; None if no run has one
    incomplete: int  # runs without a total energy
    error_joules: float  # random errors of different runs are independent
    gain_joules: float  # the gain of a board's sensor is the same in all runs, so the errors are added
    gpu_cost: float | None
    electricity_cost: float | None
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


def totals(
    path: Path, by: str, since_s: float | None = None, wasted: bool = False, progress: Progress = lambda *_: None
) -> Totals:
    """Return the totals of the runs at a path by a key.

    A run on several hosts belongs to the group of each host, in equal parts.

    Args:
        path: a folder of runs, or a file or a folder of ``EFFICIENTLLM_LEDGER``.
        by: a name in `KEYS`.
        since_s: unix time; only later starts are counted.
        wasted: order the groups by wasted GPU-hours instead of all GPU-hours.
        progress: called with the number of run folders that were read, and of all that are not in the cache.

    Raises:
        UnreadableRun: the path has neither run folders nor lines of runs.
        ImportError: DuckDB is not installed.
    """
    runs, skipped = read_runs(path, by, progress)
    chosen = [run for run in runs if since_s is None or (run.started_time_s or 0.0) >= since_s]
    groups: dict[str, list[tuple[LedgerRun, float]]] = {}
    for run in chosen:
        names = run.groups or (NOTHING,)
        for name in names:
            groups.setdefault(name, []).append((run, 1.0 / len(names)))
    rows = [_row(name, members) for name, members in groups.items()]
    rows.sort(key=lambda row: (-(row.wasted_gpu_hours if wasted else row.gpu_hours), -row.runs, row.group))
    return Totals(rows, _row("total", [(run, 1.0) for run in chosen]), skipped)


def _row(group: str, members: list[tuple[LedgerRun, float]]) -> LedgerRow:
    measured = [(run, share) for run, share in members if run.joules is not None]
    known = [(run, share) for run, share in members if run.goodput_ratio is not None]
    device_hours = sum(run.device_hours * share for run, share in known)
    causes: dict[str | None, float] = {}
    for run, share in members:
        if run.cause not in (None, HEALTHY, NONE_FOUND, NO_VERDICT):
            causes[run.cause] = causes.get(run.cause, 0.0) + _wasted(run) * share
    return LedgerRow(
        group=group,
        runs=len(members),
        gpu_hours=sum((run.gpu_hours or 0.0) * share for run, share in members),
        without_hours=sum(run.gpu_hours is None for run, _ in members),
        joules=sum((run.joules or 0.0) * share for run, share in measured) if measured else None,
        incomplete=sum(not run.is_complete for run, _ in members),
        error_joules=math.hypot(*(run.error_joules * share for run, share in measured)),
        gain_joules=sum(run.gain_joules * share for run, share in measured),
        gpu_cost=_sum((run.gpu_cost, share) for run, share in members),
        electricity_cost=_sum((run.electricity_cost, share) for run, share in members),
        co2_kg=_sum((run.co2_kg, share) for run, share in members),
        goodput_ratio=(
            sum((run.goodput_ratio or 0.0) * run.device_hours * share for run, share in known) / device_hours
            if device_hours
            else None
        ),
        wasted_gpu_hours=sum(_wasted(run) * share for run, share in members),
        cause=max(causes, key=lambda name: causes[name], default=None),
        simulated=sum(run.simulated for run, _ in members),
        slow_runs=sum(group in run.slow_hosts for run, _ in members),
    )


def _wasted(run: LedgerRun) -> float:
    """Return the GPU-hours outside of productive classes, which are classes of the GPUs with ranks."""
    if run.goodput_ratio is None or not run.gpu_hours:
        return 0.0
    unused = min(run.unused_gpu_hours, run.gpu_hours)
    return unused + (run.gpu_hours - unused) * (1.0 - run.goodput_ratio)


def _sum(parts: Iterable[tuple[float | None, float]]) -> float | None:
    """Return the sum of the known parts; ``None`` if no part is known."""
    known = [value * share for value, share in parts if value is not None]
    return sum(known) if known else None


# --- reading ---


def read_runs(path: Path, by: str, progress: Progress = lambda *_: None) -> tuple[list[LedgerRun], list[str]]:
    """Return the runs of run folders and of ledger files, each once, and a line for each file that was not read.

    Args:
        path: a folder of runs, or a ledger file, or a folder with ledger files.
        by: a name in `KEYS`.
        progress: as for `totals`.

    Raises:
        UnreadableRun: the path has neither.
    """
    lines, skipped = ledger_lines(path, by)
    try:
        found = find_runs(path)
    except UnreadableRun:
        if not lines:
            raise
        return lines, skipped
    database = Database(found, columns=_COLUMNS, progress=progress)
    skipped += [f"{one.path}: {one.reason}" for one in database.skipped]
    rows = database.connection.execute(f"SELECT {', '.join(_VALUES.values())} FROM runs ORDER BY rowid").fetchall()
    folders = [_of_row(dict(zip(_VALUES, map(_measured, row), strict=True)), by) for row in rows]
    known = {(run.run_id, run.started_time_s) for run in folders}
    return [*folders, *(run for run in lines if (run.run_id, run.started_time_s) not in known)], skipped


_COLUMNS = (
    "run_id", "folder", "project", "user", "tags", "hosts", "gpu_models", "model", "world_size", "started_time_s",
    "status", "is_over", "updated_time_s", "gpus_expected", "device_seconds", "goodput_seconds", "elapsed_s",
    "energy_total_joules", "energy_measured_joules", "metric_errors", "energy_gain_error", "energy_gpu_cost",
    "energy_electricity_cost", "energy_co2_kg", "verdict_cause", "stragglers",
    "simulated", "waterfall_seconds",
)  # fmt: skip
#: Maps are slow in Python, so SQL returns the used values of a map.
_VALUES = {name: quoted(name) for name in _COLUMNS} | {
    "tags": f"tags['{CONFIGURATION}']",
    "goodput_seconds": "CASE WHEN cardinality(goodput_seconds) > 0 THEN "
    + " + ".join(f"coalesce(goodput_seconds['{name}'], 0)" for name in PRODUCTIVE)
    + " END",
    "metric_errors": "metric_errors['energy_total_joules']",
    "waterfall_seconds": "waterfall_seconds['unused']",
}


def _measured(value: Any) -> Any:
    return None if isinstance(value, float) and abs(value) > MAX_VALUE else value


def _of_row(row: Mapping[str, Any], by: str) -> LedgerRun:
    seconds, joules = row["device_seconds"], row["energy_total_joules"]
    hours = None if seconds is None else seconds / 3600.0
    measured = row["energy_measured_joules"] if joules is None else joules
    kept_s, elapsed_s = row["goodput_seconds"], row["elapsed_s"]
    return LedgerRun(
        run_id=row["run_id"],
        folder=row["folder"],
        groups=_groups({**row, "config": row["tags"], "outcome": _outcome(row)}, by),
        status=_outcome(row),
        started_time_s=row["started_time_s"],
        gpu_hours=0.0 if row["gpus_expected"] == 0 else hours,
        unused_gpu_hours=(row["waterfall_seconds"] or 0.0) / 3600.0,
        device_hours=hours or 0.0,
        goodput_ratio=kept_s / elapsed_s if kept_s is not None and elapsed_s else None,
        joules=measured,
        is_complete=joules is not None,
        error_joules=row["metric_errors"] or 0.0,
        gain_joules=(row["energy_gain_error"] or 0.0) * (measured or 0.0),
        gpu_cost=row["energy_gpu_cost"],
        electricity_cost=row["energy_electricity_cost"],
        co2_kg=row["energy_co2_kg"],
        cause=_cause(row["verdict_cause"]),
        simulated=bool(row["simulated"]),
        slow_hosts=tuple(_slow_hosts(row["stragglers"])),
    )


def _outcome(row: Mapping[str, Any]) -> str:
    """Return the status of a run; a summary that says "running" and is old is of a killed run."""
    status = row["status"] or "unknown"
    is_old = time.time() - (row["updated_time_s"] or 0.0) > STALE_AFTER_S
    return "killed" if status == "running" and is_old else str(status)


def _cause(text: str | None) -> str | None:
    return None if text is None else one_line(text)


def _slow_hosts(stragglers: str | None) -> Iterator[str]:
    for one in msgspec.json.decode(stragglers) if stragglers not in (None, "[]") else ():
        if isinstance(one, dict) and isinstance(host := one.get("host"), str):
            yield one_line(host)


class _LedgerLine(msgspec.Struct):
    """A line of a ledger file; other fields are ignored."""

    run_id: str
    schema_version: int = SCHEMA_VERSION
    status: str = "unknown"
    folder: str | None = None
    user: str | None = None
    account: str | None = None
    tags: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    gpu_models: tuple[str, ...] = ()
    model: str | None = None
    ranks: int | None = None
    gpus: int | None = None
    started_time_s: Number | None = None
    cause: str | None = None
    simulated: bool = False
    goodput_ratio: Number | None = None
    gpu_hours: Number | None = None
    unused_gpu_hours: Number | None = None
    total_joules: Number | None = None
    measured_joules: Number | None = None
    error_joules: Number | None = None
    gain_error: Number | None = None
    gpu_cost: Number | None = None
    electricity_cost: Number | None = None
    co2_kg: Number | None = None


def ledger_lines(place: Path, by: str = "outcome") -> tuple[list[LedgerRun], list[str]]:
    """Return the runs in a ledger file or in those of a folder, and a line for each file that was not read completely.

    A later attempt of a run replaces an earlier one.
    """
    skipped: list[str] = []
    decoder = msgspec.json.Decoder(_LedgerLine)
    found: dict[tuple[Path, str, str], LedgerRun] = {}
    for path, problem in _ledger_files(place):
        invalid, other_version = 0, ""
        try:
            lines = [] if problem else list(lines_of(path))
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            skipped.append(f"{path}: {problem}")
            continue
        for text in lines:
            try:
                line = decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                invalid += 1
                continue
            if problem := version_error(line.schema_version):
                other_version = problem
                continue
            run = _of_line(line, by)
            # Runs of two users, or in two folders, can have the same run_id.
            found[path, run.run_id, run.folder] = run
        if invalid:
            skipped.append(f"{path}: {invalid:,} incomplete or invalid line{'s' * (invalid > 1)}")
        if other_version:
            skipped.append(f"{path}: a line was left out: {other_version}")
    return list(found.values()), skipped


def _ledger_files(place: Path) -> Iterator[tuple[Path, str]]:
    folder, name = (place.parent, glob.escape(place.name)) if place.is_file() else (place, "*.jsonl")
    for path, problem in files_of(folder, name):
        # The other files are of a run folder.
        if path.suffix == ".jsonl" and not LINE_FILES.fullmatch(path.name):
            yield path, problem


def _of_line(line: _LedgerLine, by: str) -> LedgerRun:
    tags = dict(tag.partition("=")[::2] for tag in line.tags)
    joules = line.measured_joules if line.total_joules is None else line.total_joules
    row = {
        "project": tags.get("project") or line.account, "user": line.user, "config": tags.get(CONFIGURATION),
        "hosts": line.hosts, "gpu_models": line.gpu_models, "model": line.model, "world_size": line.ranks,
        "started_time_s": line.started_time_s, "outcome": line.status,
    }  # fmt: skip
    return LedgerRun(
        run_id=line.run_id,
        folder=line.folder or "",
        groups=_groups(row, by),
        status=line.status,
        started_time_s=line.started_time_s,
        gpu_hours=0.0 if line.gpus == 0 else line.gpu_hours,
        unused_gpu_hours=line.unused_gpu_hours or 0.0,
        device_hours=line.gpu_hours or 0.0,
        goodput_ratio=line.goodput_ratio,
        joules=joules,
        is_complete=line.total_joules is not None,
        error_joules=line.error_joules or 0.0,
        gain_joules=(line.gain_error or 0.0) * (joules or 0.0),
        gpu_cost=line.gpu_cost,
        electricity_cost=line.electricity_cost,
        co2_kg=line.co2_kg,
        cause=_cause(line.cause),
        simulated=line.simulated,
    )


# --- keys ---


def _groups(row: Mapping[str, Any], by: str) -> tuple[str, ...]:
    return tuple(one_line(text) for text in KEYS[by](row) if text)


def _configuration(row: Mapping[str, Any]) -> str:
    """Return the tag ``config``, or else the model and the devices."""
    if tag := row["config"]:
        return str(tag)
    devices = f"{row['world_size'] or '?'} x {', '.join(row['gpu_models'] or ()) or 'no GPU'}"
    return f"{row['model']}, {devices}" if row["model"] else devices


#: Name of a key -> function that returns the groups of a run from its columns.
KEYS: dict[str, Callable[[Mapping[str, Any]], Iterable[str | None]]] = {
    "outcome": lambda row: [row["outcome"]],
    "project": lambda row: [row["project"]],
    "user": lambda row: [row["user"]],
    "config": lambda row: [_configuration(row)],
    "node": lambda row: row["hosts"] or (),
    "month": lambda row: [(utc(row["started_time_s"]) or "")[: len("2026-01")]],
}
