"""The measured peaks of torch's allocator in run folders, with the facts of these runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effllm.analysis.ledger import ledger_lines
from effllm.analysis.run_folders import UnreadableRun, find_runs
from effllm.analysis.run_row import Document, Unreadable, read_document

STEPS_PEAK, STEPS_POSITIONS = "allocator/steps_peak_bytes", "allocator/steps_positions"


@dataclass(frozen=True)
class RecordedPeak:
    """The largest peak of a run in its steps, over all ranks; other facts that are unknown are None or missing."""

    folder: Path
    peak_bytes: float
    model: str | None
    parameters: int | None  # of the whole model
    facts: Document
    positions: float | None = None  # of the largest micro-batch in the windows in which the peak has risen


def read_peaks(path: Path) -> tuple[list[RecordedPeak], Counter[str]]:
    """Return the peaks of the runs at a path, and the number of runs without a peak by reason.

    Args:
        path: a run folder, a folder of runs, or a file or folder of ``EFFICIENTLLM_LEDGER``, whose lines name the
            run folders.

    Raises:
        UnreadableRun: the path has neither.
    """
    found: list[RecordedPeak] = []
    left_out: Counter[str] = Counter()
    for folder in _folders(path):
        try:
            run, summary = _read(folder / "run.json"), read_document(folder / "summary.json")
        except (FileNotFoundError, Unreadable):
            left_out["no readable summary.json"] += 1
            continue
        peak = _most(summary, STEPS_PEAK)
        if summary.get("simulated") is True:
            left_out["simulated GPUs"] += 1
        elif peak is None:
            left_out["no peak of torch's allocator"] += 1
        else:
            model, parameters = summary.get("model") or run.get("model"), summary.get("parameters")
            whole = parameters if summary.get("parameters_kind", "total") == "total" else None
            positions = _most(summary, STEPS_POSITIONS)
            found.append(RecordedPeak(folder, peak, _text(model), _whole(whole), run, positions))
    return found, left_out


def _folders(path: Path) -> Iterator[Path]:
    """Yield each run folder once: those at the path, then those that lines of a ledger name."""
    lines, _ = ledger_lines(path)
    try:
        here = [one.folder for one in find_runs(path)]
    except UnreadableRun:
        if not lines:
            raise
        here = []
    named = [Path(line.folder) for line in lines if line.folder]
    yield from dict.fromkeys([*here, *named])


def _read(path: Path) -> Document:
    try:
        return read_document(path)
    except FileNotFoundError:
        return {}


def _most(summary: Document, name: str) -> float | None:
    """Return the largest value of an instrument in the run."""
    values = summary.get("instruments")
    found = values.get(name) if isinstance(values, dict) else None
    most = found.get("most") if isinstance(found, dict) else None
    return float(most) if isinstance(most, (int, float)) and not isinstance(most, bool) and 0 < most < 1e15 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
