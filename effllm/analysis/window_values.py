"""The values of metrics in the windows of a run, for statements about one run."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from effllm.analysis.sides import Run
from effllm.store.reader import JsonLines, segments

MAX_WINDOWS = 200_000  # further windows of a run are not read
_HOTTEST = "health/hottest_c"


class _Line(Struct, frozen=True):
    values: dict[str, float] = {}
    warming_up: bool = False
    correction: bool = False
    iteration_first: int = 0
    iteration_last: int = 0


def window_values(run: Run, tag: str) -> list[float]:
    """Return the values of a metric in the windows after the warm-up; windows without a value are left out."""
    return [values[tag] for values in _windows(run.folder) if tag in values]


def first_temperature_c(run: Run) -> float | None:
    """Return the highest temperature of a GPU in the first window of a run, which may be in the warm-up."""
    try:
        for line in JsonLines(segments(run.folder, "windows"), _Line):
            return line.values.get(_HOTTEST)
    except OSError:
        pass
    return None


@lru_cache(maxsize=8)
def _windows(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = []
    try:
        for line in JsonLines(segments(folder, "windows"), _Line):
            if not (line.warming_up or line.correction or line.iteration_last < line.iteration_first):
                found.append(line.values)
            if len(found) >= MAX_WINDOWS:
                break
    except OSError:  # removed, or another user's
        return found
    return found
