"""What a killed aggregator has written of windows that its state does not hold: its replacement comes to them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from effllm.runs import own_files
from effllm.runs.runfolder import segments

#: Windows are kept at a pace; what lies between two states is far less.
_TAIL_BYTES = 4 * 2**20


class Written(Struct):
    """Windows and rows of ranks that are in the files already."""

    attempt: int = 0
    windows: set[int] = set()
    rows: set[tuple[int, int]] = set()  # of rank and window


class _State(Struct):
    attempt: int = 0
    job: str = ""
    closed: int = 0


class _Line(Struct):
    attempt: int
    window: int
    rank: int = 0
    correction: bool = False


def written_beyond_state(folder: Path, job: str) -> Written:
    """Return what is written of windows that closed after the state was kept; nothing where the job is another."""
    try:
        state = msgspec.json.decode(own_files.read_file(folder / "state.json"), type=_State)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Written()
    if not job or state.job != job:
        return Written()
    windows, rows = (
        [line for line in _newest(folder, stem) if line.attempt == state.attempt and line.window > state.closed]
        for stem in ("windows", "ranks")
    )
    return Written(
        state.attempt,
        {line.window for line in windows if not line.correction},
        {(line.rank, line.window) for line in rows},
    )


def _newest(folder: Path, stem: str) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for path in segments(folder, stem)[-2:]:
        with os.fdopen(own_files.open_file(path, os.O_RDONLY), "rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            for text in file:
                try:
                    yield decoder.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue  # torn, or begun before the tail
