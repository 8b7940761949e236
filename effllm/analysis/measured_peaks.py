"""The measured peaks of torch's allocator in run folders and lines of a ledger, with the facts of these runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effllm.analysis.ledger import LedgerRun, ledger_lines
from effllm.analysis.run_folders import UnreadableRun, find_runs
from effllm.analysis.run_row import Document, Unreadable, read_document
from effllm.memory.recorded_plan import STEPS_PEAK, STEPS_POSITIONS

MAX_BYTES = 1e15


@dataclass(frozen=True)
class RecordedPeak:
    """The largest peak of a run in its steps, over all ranks; other facts that are unknown are None or missing."""

    peak_bytes: float
    model: str | None
    parameters: int | None  # of the whole model
    facts: Document
    positions: float | None = None  # of the largest micro-batch in the windows in which the peak has risen


def read_peaks(path: Path) -> tuple[list[RecordedPeak], Counter[str]]:
    """Return the peaks of the runs at a path, and the number of runs without a peak by reason.

    Args:
        path: a run folder, a folder of runs, or a file or folder of ``EFFICIENTLLM_LEDGER``. Its lines name the run
            folders, and have the peak of a run whose folder does not exist any more.

    Raises:
        UnreadableRun: the path has neither.
    """
    found: list[RecordedPeak] = []
    left_out: Counter[str] = Counter()
    for folder, line in _runs(path):
        one = _of_line(line) if folder is None or not (folder / "summary.json").exists() else _of_folder(folder)
        if isinstance(one, RecordedPeak):
            found.append(one)
        else:
            left_out[one] += 1
    return found, left_out


def _runs(path: Path) -> Iterator[tuple[Path | None, LedgerRun | None]]:
    """Yield each run once: the run folders at the path, then those of the lines of a ledger, then the other lines."""
    lines, _ = ledger_lines(path)
    try:
        here = [one.folder for one in find_runs(path)]
    except UnreadableRun:
        if not lines:
            raise
        here = []
    named = {Path(line.folder): line for line in lines if line.folder}
    for folder in dict.fromkeys([*here, *named]):
        yield folder, named.get(folder)
    yield from ((None, line) for line in lines if not line.folder)


def _of_line(line: LedgerRun | None) -> RecordedPeak | str:
    """Return the peak of a line, or the reason why it has no peak."""
    if line is None or line.memory is None:
        return "no readable summary.json"
    known, is_possible = line.memory, 0 < line.memory.peak_bytes < MAX_BYTES
    if line.simulated or not is_possible:
        return "simulated GPUs" if line.simulated else "no peak of torch's allocator"
    facts = {"memory_plan": known.plan}
    return RecordedPeak(known.peak_bytes, known.model, _whole(known.parameters), facts, known.positions)


def _of_folder(folder: Path) -> RecordedPeak | str:
    """Return the peak of a run folder, or the reason why it has no peak."""
    try:
        run, summary = _read(folder / "run.json"), read_document(folder / "summary.json")
    except (FileNotFoundError, Unreadable):
        return "no readable summary.json"
    peak = _most(summary, STEPS_PEAK)
    if summary.get("simulated") is True:
        return "simulated GPUs"
    if peak is None:
        return "no peak of torch's allocator"
    model, parameters = summary.get("model") or run.get("model"), summary.get("parameters")
    whole = parameters if summary.get("parameters_kind", "total") == "total" else None
    return RecordedPeak(peak, _text(model), _whole(whole), run, _most(summary, STEPS_POSITIONS))


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
    return (
        float(most) if isinstance(most, (int, float)) and not isinstance(most, bool) and 0 < most < MAX_BYTES else None
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
