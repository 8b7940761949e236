"""The ledger of a comparison: earlier runs, which show the spread between runs.

The rows are read from the cache of the table `runs`, so thousands of earlier runs cost about a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from effllm.analysis.column import quoted
from effllm.analysis.compared_metrics import all_metrics
from effllm.analysis.database import Database, Progress
from effllm.analysis.ledger import ledger_lines
from effllm.analysis.run_folders import FoundRun, UnreadableRun, find_runs, run_at
from effllm.analysis.sides import CONFIGURATION_COLUMNS, ComparedRun, Side, newest_repeats

_COLUMNS = (
    "folder", "run_id", "tags", "facts", "status", "is_over", "started_time_s", "updated_time_s", "iterations",
    "git_commit", *CONFIGURATION_COLUMNS,
)  # fmt: skip


def runs_at(place: Path) -> list[FoundRun]:
    """Return the run folders at a path, or those that the lines of ``EFFICIENTLLM_LEDGER`` at this path name.

    Raises:
        UnreadableRun: there is neither a run folder nor a line whose run folder exists.
    """
    try:
        return find_runs(place)
    except UnreadableRun:
        lines, _ = ledger_lines(place)
        if not lines:
            raise
    found = {run.folder: run for one in lines if (run := _run_of_line(one.folder)) is not None}
    if not found:
        raise UnreadableRun(
            f"{place} has {len(lines):,} ledger lines, but none of their run folders can be read here: a comparison "
            "needs run folders, because a line has no metrics"
        )
    return list(found.values())


def runs_beside(sides: Sequence[Side]) -> list[FoundRun]:
    """Return the run folders in the folders that contain the run folders of the sides."""
    found: list[FoundRun] = []
    for folder in dict.fromkeys(run.folder.parent for side in sides for run in side.runs):
        with contextlib.suppress(UnreadableRun):  # a folder that this user cannot list
            found += find_runs(folder)
    return found


def _run_of_line(folder: str) -> FoundRun | None:
    # Folders are not searched: another user has written the path.
    try:
        return run_at(str(Path(folder).resolve())) if Path(folder).is_absolute() else None
    except (OSError, ValueError, RuntimeError):  # not accessible, a null character, or a loop of links
        return None


def earlier_runs(
    found: Iterable[FoundRun], sides: Sequence[Side], progress: Progress = lambda *_: None
) -> list[ComparedRun]:
    """Return the finished runs that are on no side and at least half as long as the shortest compared run.

    Args:
        found: run folders; each is read once.
        sides: the sides of the comparison.
        progress: called with the number of run folders that were read, and of all that are not in the cache.
    """
    compared = {_identity(run) for side in sides for run in side.runs}
    shortest = min((run.row.get("iterations") or 0 for side in sides for run in side.runs), default=0)
    names = list(dict.fromkeys([*_COLUMNS, *(metric.column for metric in all_metrics())]))
    database = Database(list({run.folder: run for run in found}.values()), columns=names, progress=progress)
    rows = database.connection.execute(
        f"SELECT {', '.join(map(quoted, names))} FROM runs WHERE status IN ('completed', 'interrupted') "
        f"AND 2 * coalesce(iterations, 0) >= {int(shortest)} ORDER BY rowid"
    ).fetchall()
    runs = (_run(dict(zip(names, row, strict=True))) for row in rows)
    # An interrupted repeat of a campaign is not a repeat.
    chosen = [
        run
        for run in runs
        if _identity(run) not in compared
        and not run.continues
        and not (run.repeat() and run.row["status"] != "completed")
    ]
    return newest_repeats(chosen, [])


def _identity(run: ComparedRun) -> tuple[Any, ...]:
    """Return a key that is equal for copies of a run, so that no run is both compared and earlier."""
    start_s = run.row.get("started_time_s")
    return (run.folder,) if start_s is None else (run.row.get("run_id"), start_s)


def _run(row: dict[str, Any]) -> ComparedRun:
    facts = msgspec.json.decode(row["facts"]) if row["facts"] else {}
    return ComparedRun(Path(row["folder"]), {**row, "facts": facts, "tags": row["tags"] or {}})
