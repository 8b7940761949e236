"""Lines at positions in the numbered JSON Lines files of a run, which may be large and may still grow.

Only a part of the files is read: lines before or after a position, or the first line for which a condition holds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from effllm.store.reader import segments_by_number
from effllm.store.regular_file import open_regular

#: Bytes that are read until enough lines are found.
CHUNK_BYTES, MAX_READ_BYTES = 2**16, 2**20
_READ_SIZES = (CHUNK_BYTES, 2**18, MAX_READ_BYTES)  # of the first read and, if it has too few lines, of the next ones


class Position(NamedTuple):
    """The start of a line: the number of the file, and the offset in this file."""

    number: int
    offset: int


START, END = Position(0, 0), Position(2**62, 0)
Lines = list[tuple[Position, bytes]]


class LineFiles:
    """The files ``<stem>-0001.jsonl`` and following of a run folder; torn last lines are left out."""

    def __init__(self, folder: Path, stem: str) -> None:
        self._folder, self._stem = folder, stem
        self._paths: dict[int, Path] = {}
        self._sizes: dict[int, int] = {}
        self.changed_s = 0.0  # unix time of the last change of a file

    def refresh(self) -> bool:
        """Read the sizes of the files again; return whether a size changed."""
        paths = segments_by_number(self._folder, self._stem)
        states = {number: path.stat() for number, path in paths.items()}
        sizes = {number: state.st_size for number, state in states.items()}
        has_changed = sizes != self._sizes
        self._paths, self._sizes = paths, sizes
        self.changed_s = max((state.st_mtime for state in states.values()), default=0.0)
        return has_changed

    def lines_before(self, position: Position, count: int) -> Lines:
        """Return the last lines that end before a position, oldest first: at most ``count``, and a mebibyte."""
        lines: Lines = []
        for number in sorted(self._sizes, reverse=True):
            if number > position.number or len(lines) >= count:
                continue
            end = position.offset if number == position.number else self._sizes[number]
            lines = self._last_lines(number, min(end, self._sizes[number]), count - len(lines)) + lines
        return lines

    def lines_after(self, position: Position, count: int) -> Lines:
        """Return the lines that start at a position or later: at most ``count``, and a mebibyte per file."""
        lines: Lines = []
        for number in sorted(self._sizes):
            if number < position.number or len(lines) >= count:
                continue
            begin = position.offset if number == position.number else 0
            lines += self._first_lines(number, begin, count - len(lines))
        return lines

    def share_of(self, position: Position) -> float:
        """Return the share of all bytes that are before a position."""
        whole = sum(self._sizes.values())
        bytes_before = sum(size for number, size in self._sizes.items() if number < position.number)
        bytes_in_file = position.offset if position.number in self._sizes else 0
        return (bytes_before + bytes_in_file) / whole if whole else 0.0

    def position_at_share(self, share: float) -> Position:
        """Return the position of the first line after a share of all bytes; or `END`."""
        bytes_left = int(share * sum(self._sizes.values()))
        for number in sorted(self._sizes):
            if bytes_left < self._sizes[number]:
                return Position(number, self._next_start(number, bytes_left) if bytes_left > 0 else 0)
            bytes_left -= self._sizes[number]
        return END

    def first_reached(self, is_reached: Callable[[bytes], bool]) -> Position:
        """Return the position of the first line for which a condition holds that holds for all later lines; or `END`.

        The order of the lines may be disturbed: then a position nearby is returned.
        """
        file_number = 0  # the last file whose first line is before the position
        for number in sorted(self._sizes):
            if (lines := self._first_lines(number, 0, 1)) and is_reached(lines[0][1]):
                break
            file_number = number
        if file_number not in self._sizes:
            return START
        low, high = 0, self._sizes[file_number]  # offsets around the position
        while high - low > CHUNK_BYTES:
            middle = (low + high) // 2
            lines = self._first_lines(file_number, self._next_start(file_number, middle), 1)
            if not lines or is_reached(lines[0][1]):
                high = middle
            else:
                low = middle
        start = self._next_start(file_number, low) if low else 0
        for position, line in self._first_lines(file_number, start, count=2**31):
            if is_reached(line):
                return position
        return Position(file_number + 1, 0)

    def _last_lines(self, number: int, end: int, count: int) -> Lines:
        lines: Lines = []
        for size in _READ_SIZES:
            begin = max(end - size, 0)
            text = read_at(self._paths[number], begin, end - begin)
            cut = text.find(b"\n") + 1 if begin else 0  # a read may begin inside of a line
            lines = _whole_lines(number, begin + cut, text[cut:])
            if len(lines) >= count or not begin:
                break
        return lines[-count:]

    def _first_lines(self, number: int, begin: int, count: int) -> Lines:
        """Return the first lines after a start; a line longer than any of effllm is returned in parts."""
        text, lines = b"", Lines()
        for size in _READ_SIZES:
            text = read_at(self._paths[number], begin, size)
            lines = _whole_lines(number, begin, text)
            if len(lines) >= count or begin + len(text) >= self._sizes[number]:
                return lines[:count]
        return lines[:count] or [(Position(number, begin), text)]

    def _next_start(self, number: int, offset: int) -> int:
        """Return the start of the first line after an offset; the size of the file if no start is found."""
        for size in _READ_SIZES:
            if (index := read_at(self._paths[number], offset, size).find(b"\n")) >= 0:
                return offset + index + 1
        return self._sizes[number]


def _whole_lines(number: int, begin: int, text: bytes) -> Lines:
    lines = []
    for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):
        if not line.isspace():
            lines.append((Position(number, begin), line))
        begin += len(line)
    return lines


def end_of(lines: Lines) -> Position:
    """Return the position after the last of some lines."""
    start, line = lines[-1]
    return Position(start.number, start.offset + len(line))


def read_at(path: Path, offset: int, size: int) -> bytes:
    """Return bytes of a regular file."""
    descriptor = open_regular(path)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        os.close(descriptor)
