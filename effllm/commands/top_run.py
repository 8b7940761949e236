"""Finds the run that ``effllm top`` shows: a run folder, a file in it, or the newest run in a folder of runs."""

from __future__ import annotations

from pathlib import Path

from effllm.commands.top_reader import SourceError

_FILES = ("summary.json", "run.json", "windows-0001.jsonl")


def find_run(path: Path) -> Path:
    """Return a run folder.

    Raises:
        SourceError: there is no run at the path.
    """
    try:
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise SourceError(f"{path} does not exist")
        if _changed_s(folder) is not None:
            return folder
        runs = [(changed_s, one) for one in folder.iterdir() if (changed_s := _changed_s(one)) is not None]
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    if not runs:
        raise SourceError(
            f"{path} has no run: a run folder contains run.json or summary.json, as in "
            "efficientllm_runs/20260101-120000-1a2b3c4d"
        )
    return max(runs)[1]


def _changed_s(folder: Path) -> float | None:
    """Return the last change of a run folder, or ``None`` if the folder has no run."""
    times = []
    for name in _FILES:
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
