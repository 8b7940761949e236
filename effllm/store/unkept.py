"""Lines that a killed aggregator wrote but did not save in its state; their reports are sent again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from effllm.records.job import ClusterReport
from effllm.records.rank import RankReport
from effllm.store import own_files
from effllm.store.reader import DECODE_ERRORS, segments

#: Twice the size of the lines that a `Journal` stores for a full disk; all of these are written before the next state.
_TAIL_BYTES = 64 * 2**20


class _Line(Struct):
    attempt: int
    window: int
    rank: int = 0
    time_s: float = 0.0
    start_time_s: float = 0.0
    correction: bool = False


class Written:
    """The windows and rank reports at the end of a run folder's files.

    The state does not show which lines are written: it may be missing, unreadable, or from the previous attempt.

    Raises:
        OSError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        windows = (line for line in _newest(folder, "windows") if not line.correction)
        self._ends_s = {(line.attempt, line.window): line.time_s for line in windows}
        self._rows = {(line.attempt, line.rank, line.window, line.start_time_s) for line in _newest(folder, "ranks")}

    def has_window(self, report: ClusterReport, start_time_s: float | None) -> bool:
        """Whether a window is written.

        A written window with the same number that ended before the start of this window belongs to another job.
        """
        end_s = self._ends_s.get((report.attempt, report.window))
        return end_s is not None and (start_time_s is None or end_s >= start_time_s)

    def has_row(self, attempt: int, row: RankReport) -> bool:
        """Whether a report is written; a report that an agent sends again has exactly the same start time."""
        return (attempt, row.rank, row.window, row.start_time_s) in self._rows


def _newest(folder: Path, stem: str) -> Iterator[_Line]:
    tails, left_bytes = [], _TAIL_BYTES
    for path in reversed(segments(folder, stem)):
        if left_bytes <= 0:
            break
        size = path.lstat().st_size  # size of a link itself; opening the link fails below
        tails.append((path, max(size - left_bytes, 0)))
        left_bytes -= size
    decoder = msgspec.json.Decoder(_Line)
    for path, begin in reversed(tails):
        with os.fdopen(own_files.open_file(path, os.O_RDONLY), "rb") as file:
            file.seek(begin)
            for text in file:
                try:
                    yield decoder.decode(text)
                except DECODE_ERRORS:
                    continue  # a torn line, or a line that begins before the tail
