"""The own times of ranks in the newest windows of a run folder, for the map of ``effllm top``."""

from __future__ import annotations

from typing import Any

import msgspec

from effllm.store.line_files import END, LineFiles, Position, end_of
from effllm.store.reader import DECODE_ERRORS, RankRow
from effllm.views.top.frame import RankTimes

MAX_LINES, MAX_WINDOWS = 4000, 200  # that are read at once, and kept


row_decoder = msgspec.json.Decoder(RankRow)


def decoded(decoder: msgspec.json.Decoder[Any], line: bytes) -> Any:
    """Return a decoded line, or ``None`` if it is invalid."""
    try:
        return decoder.decode(line)
    except DECODE_ERRORS:
        return None


class OwnTimes:
    """Reads the times of new lines in the files of the ranks."""

    def __init__(self, files: LineFiles) -> None:
        self._files = files
        self._next: Position | None = None
        self._windows: dict[tuple[int, int], dict[int, float]] = {}

    def refresh(self) -> bool:
        """Read new lines, at first the newest ones; return whether there are any."""
        lines = self._files.before(END, MAX_LINES) if self._next is None else self._files.after(self._next, MAX_LINES)
        for _, line in lines:
            one: RankRow | None = decoded(row_decoder, line)
            if one is None:
                continue
            count, seconds = one.own_steps, one.own_step_s
            if count <= 0:
                count, seconds = one.iteration_last - one.iteration_first + 1, one.busy_s
            if count > 0 and seconds > 0:
                self._windows.setdefault((one.attempt, one.window), {})[one.rank] = seconds / count
        if lines:
            self._next = end_of(lines)
            for key in sorted(self._windows)[:-MAX_WINDOWS]:
                del self._windows[key]
        return bool(lines)

    def until(self, attempt: int, window: int) -> RankTimes:
        """Return the times of the windows up to one, the oldest first."""
        return [self._windows[key] for key in sorted(self._windows) if key <= (attempt, window)]
