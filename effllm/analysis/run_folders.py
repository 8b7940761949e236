"""Finds run folders: a run folder, a folder of runs, a glob, or a list of these."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from effllm.config.settings import ConfigError, read_config
from effllm.config.switches import process_environ

FILES = ("run.json", "summary.json")
#: Run folders are searched in a folder and in this many levels of folders below it.
MAX_DEPTH = 4
MAX_NAMES = 3  # in a message
LAST = "last"  # the name of the run that started last
LINE_FILES = re.compile(r"(windows|ranks)-\d{4,}\.jsonl|events\.jsonl")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class UnreadableRun(ValueError):
    """A path has no run folder, or a file of a run cannot be read; the message is one line."""


class NoRun(UnreadableRun):
    """There is no run at a path, or of a name."""


class FoundRun(NamedTuple):
    """A run folder, and the state of run.json and summary.json: a changed file has another state."""

    folder: Path
    state: str


def find_runs(paths: Paths) -> list[FoundRun]:
    """Return the run folders at the paths, each once, in the order of the paths and then of the names.

    A path is a run folder or a file in it, a folder of runs, or a glob of these.
    """
    runs: dict[str, FoundRun] = {}
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else list(paths):
        runs_at_path = [run for folder in _matching_paths(os.fspath(path)) for run in _runs_in(folder)]
        if not runs_at_path:
            raise NoRun(
                f"{path} has no run folder: a run folder contains run.json or summary.json, as in "
                "efficientllm_runs/20260101-120000-1a2b3c4d"
            )
        runs |= {str(run.folder): run for run in runs_at_path}
    if not runs:
        raise UnreadableRun("no path of a run folder was given")
    return list(runs.values())


def named_run(name: str) -> Path:
    """Return the path of a run: a path, or the name of a run in the folder of runs or its beginning, or `LAST`."""
    path = Path(name)
    if path.exists() or os.sep in name:
        return path
    try:
        folder = os.path.realpath(read_config(process_environ()).run_dir)
    except ConfigError as error:
        raise UnreadableRun(str(error)) from error
    runs = [run.folder for run in runs_below(folder)]
    names = sorted({run.name for run in runs}, reverse=True)
    named = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if name == LAST and not named:
        named = sorted(runs, key=started_s)[-1:]
    if len(named) == 1:
        return named[0]
    if named:
        newest = sorted((run.name for run in named), reverse=True)[:MAX_NAMES]
        raise UnreadableRun(f"{name} is the name of {len(named)} runs in {folder}: {', '.join(newest)}")
    similar = difflib.get_close_matches(name, names, MAX_NAMES) or names[:MAX_NAMES]
    if not names:
        raise NoRun(f"there is no run {name}: {folder} has no runs; give a run folder, or a folder of runs")
    text = f"{name} does not exist, and no run in {folder} has this name"
    raise NoRun(text + (f"; near: {', '.join(similar)}" if similar else ""))


def one_run(name: str) -> Path:
    """Return the path of a run as `named_run`; for a folder of runs, the path of the run in it that started last."""
    path = named_run(name)
    if path.is_dir() and run_at(str(path)) is None:
        return max((run.folder for run in runs_below(os.path.realpath(path))), key=started_s, default=path)
    return path


def started_s(folder: Path) -> float:
    """Return the unix time of run.json, which is written at the start of an attempt; 0 without this file."""
    with contextlib.suppress(OSError):
        return (folder / FILES[0]).stat().st_mtime
    return 0.0


def _matching_paths(path: str) -> list[str]:
    if not path:  # an unset variable of a script, not the current folder
        raise UnreadableRun("the path of the runs is empty")
    if os.path.lexists(path) or not glob.has_magic(path):
        folder = named_run(path)
        if not folder.exists():
            raise NoRun(f"{path} does not exist")
        return [str(folder)]
    return sorted(glob.glob(path, recursive=True))  # noqa: PTH207 - the glob may be absolute


def _runs_in(path: str) -> Iterator[FoundRun]:
    # The real path, because a run that is also found by a link is returned once.
    folder = os.path.realpath(path)
    if not Path(folder).is_dir():
        folder = os.path.dirname(folder)  # noqa: PTH120 - as fast as the listing of thousands of folders
        if (run := run_at(folder)) is not None:
            yield run
        return
    yield from runs_below(folder)


def runs_below(folder: str, depth: int = MAX_DEPTH) -> Iterator[FoundRun]:
    """Yield the run at a real path, or the runs in so many levels of folders below it."""
    if (run := run_at(folder)) is not None:
        yield run
        return
    try:
        with os.scandir(folder) as listing:
            entries = sorted(listing, key=lambda entry: entry.name)
    except OSError:  # another user's folder
        return
    if any(LINE_FILES.fullmatch(entry.name) for entry in entries):
        yield FoundRun(Path(folder), "")
    elif depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from runs_below(entry.path, depth - 1)


def run_at(folder: str) -> FoundRun | None:
    """Return the run at a real path, or ``None`` if it has neither run.json nor summary.json."""
    states = [_file_state(f"{folder}/{name}") for name in FILES]
    return FoundRun(Path(folder), "|".join(states)) if any(states) else None


def _file_state(path: str) -> str:
    try:
        status = os.stat(path)  # noqa: PTH116 - thousands of files
    except OSError:
        return ""
    # The store replaces both files, so each new file has another inode, even within the resolution of a file's time.
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"


def files_of(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    """Yield the files of a run that match a glob, in order, each with the reason why it cannot be read, or ""."""
    for path in sorted(folder.glob(pattern)):
        try:
            is_file, is_readable = path.is_file(), os.access(path, os.R_OK)
        except OSError:
            is_file = is_readable = False
        yield path, "" if is_file and is_readable else "not a readable file"
