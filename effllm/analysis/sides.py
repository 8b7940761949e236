"""The sides of a comparison: runs at paths, globs and tags."""

from __future__ import annotations

import glob
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from effllm.analysis.column import column_of
from effllm.analysis.database import Database
from effllm.analysis.run_folders import FILES, FoundRun, NoRun, UnreadableRun, find_runs
from effllm.analysis.run_row import Document, Unreadable, read_document, run_row
from effllm.records.facts import float_or_none, object_or_none
from effllm.records.plain_text import one_line

#: Tags that differ between the repeats of a configuration.
CAMPAIGN, REPEAT, CONFIGURATION = "campaign", "repeat", "config"
#: The tag of the warm-up runs of a campaign, which are not compared.
WARMUP = "warmup"
#: summary.json of a running run is written every minute; an older file of an unfinished run is from a killed run.
STALE_AFTER_S = 600.0


class ComparedRun(NamedTuple):
    """One run of a comparison."""

    folder: Path
    row: Mapping[str, Any]  # of the table `runs`
    doubts: Mapping[str, str] = {}  # failed checks of the audit, by column of the metric

    @property
    def facts(self) -> Mapping[str, Any]:
        """The fields of run.json without a column."""
        return self.row.get("facts") or {}

    @property
    def tags(self) -> Mapping[str, str]:
        return self.row.get("tags") or {}

    @property
    def continues(self) -> bool:
        """Whether the run has not ended, and its summary is recent."""
        if self.row.get("is_over") is not False and self.row.get("status") != "running":
            return False
        return time.time() - (self.row.get("updated_time_s") or 0.0) < STALE_AFTER_S

    @property
    def is_warmup(self) -> bool:
        """Whether a campaign made this run before its first repeat; a user may also have a tag of this name."""
        return self.folder.name.startswith("warmup-") and self.tags.get(WARMUP) == self.folder.parent.name

    def value(self, column: str) -> float | None:
        return float_or_none(self.row.get(column))

    def repeat_and_planned(self) -> tuple[int, int] | None:
        """Return the number of this repeat and the planned number, from the tag of a campaign."""
        number, _, planned = self.tags.get(REPEAT, "").partition("/")
        return (int(number), int(planned)) if number.isdecimal() and planned.isdecimal() else None


class Side(NamedTuple):
    """The runs of one configuration, such as A or B of a comparison."""

    name: str
    runs: tuple[ComparedRun, ...]


def find_sides(arguments: Sequence[str], by: str, runs_folder: str, baseline: str = "") -> tuple[list[Side], list[str]]:
    """Return the sides, the baseline first, and a line for every run that was left out.

    Each argument (a path, a glob, or a tag that is searched in the folder of runs) is a side. With ``by`` (a tag, a
    column of the table `runs`, or a fact), runs with the same value are a side.
    """
    all_sides, left_out = _sides_of(arguments, runs_folder)
    sides = _sides_by_value(all_sides, by, left_out) if by else all_sides
    if len({side.name for side in sides}) < len(sides):
        raise UnreadableRun("two sides have the same name: give each side once")
    num_sides = Counter(run.folder for side in sides for run in side.runs)
    if repeated := [folder for folder, count in num_sides.items() if count > 1]:
        raise UnreadableRun(f"the run {repeated[0]} is on two sides")
    if baseline:
        if baseline not in [side.name for side in sides]:
            raise UnreadableRun(f"no side is named {baseline}: the sides are {', '.join(side.name for side in sides)}")
        sides.sort(key=lambda side: side.name != baseline)
    if len(sides) < 2:
        needed = f"all runs have the same {by}" if by and sides else "give two sides, or several runs and --by"
        raise UnreadableRun(f"a comparison needs two sides: {needed}")
    return sides, left_out


def find_configurations(arguments: Sequence[str], by: str, runs_folder: str) -> tuple[list[Side], list[str]]:
    """Return a side for each configuration, and a line for every run that was left out; arguments as in `find_sides`.

    Runs with the same value of ``by`` are a side: by default, of the tag ``config``. If no run has it, each is a side.
    """
    sides, left_out = _sides_of(arguments, runs_folder)
    runs = {run.folder: run for side in sides for run in side.runs}
    if not by and any(CONFIGURATION in run.tags for run in runs.values()):
        by = CONFIGURATION
    if by:
        return _sides_by_value(sides, by, left_out), left_out
    names = names_of(runs.values())
    return [Side(names[folder], (run,)) for folder, run in runs.items()], left_out


def read_compared_runs(sources: Iterable[FoundRun], left_out: list[str]) -> list[ComparedRun]:
    """Read runs; a run with nothing to compare, or that was run again, adds a line to ``left_out``."""
    runs = []
    for source in sources:
        documents: list[Document] = []
        try:
            for name in FILES:
                documents.append(read_document(source.folder / name) or {})
        except Unreadable as error:
            left_out.append(f"{source.folder / name}: {error}")
            continue
        if not documents[1]:
            left_out.append(f"{source.folder}: summary.json is missing or empty: nothing was measured")
            continue
        run = ComparedRun(source.folder, run_row(source.folder, *documents), _doubt_by_column(documents[1]))
        if run.is_warmup:
            left_out.append(f"{source.folder}: a warm-up run of a campaign")
            continue
        if run.repeat_and_planned() and run.row.get("status") != "completed" and not run.continues:
            left_out.append(f"{source.folder}: this repeat of a campaign did not complete: {run.row.get('status')}")
            continue
        runs.append(run)
    return newest_repeats(runs, left_out)


def names_of(runs: Iterable[ComparedRun]) -> dict[Path, str]:
    """Return a name for each run: its id, or with its parent folder if another run has the same id."""
    ids = {run.folder: str(run.row.get("run_id") or run.folder.name) for run in runs}
    num_runs = Counter(ids.values())
    return {
        folder: one_line(run_id if num_runs[run_id] == 1 else f"{folder.parent.name}/{run_id}")
        for folder, run_id in ids.items()
    }


def newest_repeats(runs: Sequence[ComparedRun], left_out: list[str]) -> list[ComparedRun]:
    """Return the runs without repeats that their campaign ran again later; these add lines to ``left_out``."""
    newest: dict[Any, ComparedRun] = {}  # by `_planned_repeat`; a run of a killed campaign may complete after all
    for run in sorted(runs, key=lambda run: run.row.get("started_time_s") or 0.0):
        newest[_planned_repeat(run)] = run
    kept = {run.folder for run in newest.values()}
    left_out += [
        f"{run.folder}: the same repeat was run again in {newest[_planned_repeat(run)].folder.name}"
        for run in runs
        if run.folder not in kept
    ]
    return [run for run in runs if run.folder in kept]


def _planned_repeat(run: ComparedRun) -> Any:
    if not run.repeat_and_planned():
        return run.folder
    return run.folder.parent, run.tags.get(CAMPAIGN), run.tags.get(CONFIGURATION), run.repeat_and_planned()


def _doubt_by_column(summary: Document) -> dict[str, str]:
    entries = (object_or_none(summary.get("metrics")) or {}).items()
    doubts = ((tag, value.get("doubt")) for tag, value in entries if isinstance(value, dict))
    return {column_of(tag): doubt for tag, doubt in doubts if isinstance(doubt, str)}


def _sides_of(arguments: Sequence[str], runs_folder: str) -> tuple[list[Side], list[str]]:
    left_out: list[str] = []
    return [Side(argument, tuple(_runs_of(argument, runs_folder, left_out))) for argument in arguments], left_out


def _runs_of(argument: str, runs_folder: str, left_out: list[str]) -> list[ComparedRun]:
    """Return the runs at a path or glob, or else those with a tag, or else that of a name."""
    if Path(argument).exists() or glob.has_magic(argument) or argument.startswith((".", "/", "~")):
        runs = read_compared_runs(find_runs(str(Path(argument).expanduser())), left_out)
        if not runs:
            raise UnreadableRun(f"{argument} has no run with a result: {left_out[-1]}")
        return runs
    name, _, value = argument.partition("=")
    try:
        all_runs = {run.folder: run for run in find_runs(runs_folder)}
        folders = Database(list(all_runs.values()), {name: value}, columns=("folder",)).folders
        tagged = read_compared_runs([all_runs[folder] for folder in folders], [])
    except UnreadableRun:
        tagged = []
    if tagged:
        return tagged
    try:
        return read_compared_runs(find_runs(argument), left_out)
    except UnreadableRun as error:
        raise NoRun(f"{argument} is neither a path, a run nor a tag of a run in {runs_folder}") from error


def _sides_by_value(sides: Sequence[Side], by: str, left_out: list[str]) -> list[Side]:
    runs_by_name: dict[str, dict[Path, ComparedRun]] = {}  # by the name of a side, then by the run folder
    for run in sorted((run for side in sides for run in side.runs), key=lambda run: run.row.get("started_time_s") or 0):
        value = run.tags.get(by, run.row.get(by, run.facts.get(by)))
        if not isinstance(value, (str, int, float, list)) or value == []:
            left_out.append(f"{run.folder}: has no {by}")
            continue
        text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        runs_by_name.setdefault(f"{by}={text}" if text else by, {})[run.folder] = run
    if not runs_by_name:
        raise UnreadableRun(
            f"no run has a tag, an identity or a fact named {by}; EFFICIENTLLM_TAGS={by}=VALUE sets a tag"
        )
    return [Side(name, tuple(runs.values())) for name, runs in runs_by_name.items()]
