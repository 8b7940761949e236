"""The values of metrics in the windows of a run, for statements about one run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from effllm.analysis.sides import ComparedRun
from effllm.records.values import ValueSummary
from effllm.store.reader import JsonLines, segments

MAX_WINDOWS = 200_000  # further windows of a run are not read
_HOTTEST = "health/hottest_c"


class WindowValues(Struct, frozen=True):
    """The used fields of a line of windows-*.jsonl."""

    values: dict[str, float] = {}
    instruments: dict[str, ValueSummary] = {}
    warming_up: bool = False
    correction: bool = False
    iteration_first: int = 0
    iteration_last: int = 0


def window_values(run: ComparedRun, tag: str) -> list[float]:
    """Return the values of a metric in the windows after the warm-up; windows without a value are left out."""
    return [line.values[tag] for line in windows_of(run) if tag in line.values]


def windows_of(run: ComparedRun) -> list[WindowValues]:
    """Return the windows of a run after its warm-up."""
    return _windows(run.folder)


def first_temperature_c(run: ComparedRun) -> float | None:
    """Return the highest temperature of a GPU in the first window of a run, which may be in the warm-up."""
    try:
        for line in JsonLines(segments(run.folder, "windows"), WindowValues):
            return line.values.get(_HOTTEST)
    except OSError:
        pass
    return None


@lru_cache(maxsize=8)
def _windows(folder: Path) -> list[WindowValues]:
    found: list[WindowValues] = []
    try:
        for line in JsonLines(segments(folder, "windows"), WindowValues):
            if not (line.warming_up or line.correction or line.iteration_last < line.iteration_first):
                found.append(line)
            if len(found) >= MAX_WINDOWS:
                break
    except OSError:  # removed, or another user's
        return found
    return found
