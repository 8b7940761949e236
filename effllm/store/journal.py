"""JSON Lines in numbered files: unwritten lines wait in memory, and a full disk leaves no partial line.

Above the size limit of a run folder, the oldest files are removed.

A killed aggregator may have written lines that are not in its state (`Written`): their reports are sent again.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from effllm.records.job import SCHEMA_VERSION, ClusterReport
from effllm.records.rank import RankReport
from effllm.store import own_files, regular_file
from effllm.store.reader import DECODE_ERRORS, JsonLines, segments, segments_by_number

SEGMENT_BYTES = 64 * 2**20
MB = 1_000_000
#: Kinds of files with the detail of a run, from which totals were computed.
DETAIL = ("windows", "ranks")
MIN_SEGMENTS = 16  # number of files in a full folder, so that each removed file is only a small part of it
#: Maximum size of the lines that wait for a full disk: hours of windows of a job of a thousand ranks.
MAX_WAITING_BYTES = 32 * 2**20
_MAX_WRITE_BYTES = 2**20
_BACKWARD_READ_BYTES = 2**12  # a torn line is searched from the end of the file in reads of this size
#: Twice the size of the lines that wait for a full disk; all of these are written before the next state.
_TAIL_BYTES = 2 * MAX_WAITING_BYTES

_encoder = msgspec.json.Encoder(enc_hook=str)  # facts may contain types that JSON lacks, such as paths


class Journal:
    """The lines of one kind: files ``<stem>-0001.jsonl`` and following, or ``<stem>.jsonl`` without a segment size."""

    def __init__(
        self,
        folder: Path,
        stem: str,
        segment_bytes: int | None = SEGMENT_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._folder, self._stem = folder, stem
        self._segment_bytes, self._max_waiting_bytes = segment_bytes, max_waiting_bytes
        self._waiting: deque[tuple[bytes, bytes]] = deque()  # encoded lines, each with its encoded constants
        self._constants = b""  # the last constants in the file
        self._waiting_bytes = 0
        self.num_dropped = 0  # lines
        self.number = max([1, *segments_by_number(folder, stem)]) if segment_bytes else 1  # of the open file
        self._descriptor = -1
        self._open(self.number)

    def __len__(self) -> int:
        return len(self._waiting)

    def queue(self, rows: Iterable[Any], constants: Any = None) -> None:
        """Queue rows as lines for `flush`; if too many lines wait, the oldest lines are dropped and counted.

        ``constants`` are a field of a line if they differ from the previous constants in the file.
        """
        encoded = _encoder.encode(constants) if constants is not None else b""
        for row in rows:
            line = _encoder.encode(row) + b"\n"
            self._waiting.append((line, encoded))
            self._waiting_bytes += len(line)
        while self._waiting_bytes > self._max_waiting_bytes:
            self._waiting_bytes -= len(self._waiting.popleft()[0])
            self.num_dropped += 1

    def flush(self) -> None:
        """Write the waiting lines, oldest first; after an `OSError` some wait, and the file has no part of them."""
        while self._waiting:
            self._reopen_if_needed()
            text, constants, num_lines = bytearray(), self._constants, 0
            for line, line_constants in self._waiting:
                if num_lines and len(text) + len(line) > _MAX_WRITE_BYTES:
                    break
                text += line if line_constants == constants else b'{"constants":%b,%b' % (line_constants, line[1:])
                constants = line_constants
                num_lines += 1
            if self._append(bytes(text)):
                self._constants = constants
                for _ in range(num_lines):
                    self._waiting_bytes -= len(self._waiting.popleft()[0])

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _reopen_if_needed(self) -> None:
        """Open a new file if the current file is too large, or was removed or renamed."""
        # If the folder was removed or its file system was remounted, lines written to the old file would be lost.
        if self._descriptor < 0 or not regular_file.is_still_at(self._descriptor, self._path(self.number)):
            self._open(self.number)
        if self._segment_bytes and os.fstat(self._descriptor).st_size >= self._segment_bytes:
            self._open(self.number + 1)

    def _path(self, number: int) -> Path:
        return self._folder / (f"{self._stem}-{number:04d}.jsonl" if self._segment_bytes else f"{self._stem}.jsonl")

    def _open(self, number: int) -> None:
        descriptor = own_files.open_file(self._path(number), os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self.close()
        self._descriptor, self.number, self._constants = descriptor, number, b""

    def _append(self, text: bytes) -> bool:
        """Write lines; return ``False`` if they belong to the next file, which is now open."""
        size = self._remove_torn_line()
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            text = b"\n" + text
        if not size and text.startswith(b'{"'):  # the version is written once per file
            text = b'{"schema_version":%d,%b' % (SCHEMA_VERSION, text[1:])
        try:
            regular_file.append(self._descriptor, text)
        except OSError as error:
            if error.errno == errno.EFBIG and self._segment_bytes and size:
                self._open(self.number + 1)  # EFBIG is a limit per file, so the next file can be written
                return False
            raise
        return True

    def _remove_torn_line(self) -> int:
        """Remove a partial last line of a killed writer; return the size of the file."""
        begin = size = os.fstat(self._descriptor).st_size
        tail = b""
        while begin and b"\n" not in tail:
            begin = max(begin - _BACKWARD_READ_BYTES, 0)
            tail = os.pread(self._descriptor, size - begin, begin)
            if tail.endswith(b"\n"):
                return size
        last_line = tail[tail.rfind(b"\n") + 1 :]
        with contextlib.suppress(*DECODE_ERRORS):  # a whole line without its line break stays
            if last_line:
                msgspec.json.decode(last_line)
            return size
        os.ftruncate(self._descriptor, size - len(last_line))
        return size - len(last_line)


class _Line(Struct):  # the fields by which `Written` finds a line
    attempt: int
    window: int
    rank: int = 0
    time_s: float = 0.0
    start_time_s: float = 0.0
    correction: bool = False


class Written:
    """The windows and rank reports at the end of a run folder's files.

    The state does not show which lines are written: it may be missing, unreadable, or from the previous attempt.
    """

    def __init__(self, folder: Path) -> None:
        windows, ranks = (JsonLines(segments(folder, stem), _Line, _TAIL_BYTES) for stem in ("windows", "ranks"))
        self._window_ends_unix_s = {(line.attempt, line.window): line.time_s for line in windows if not line.correction}
        self._report_keys = {(line.attempt, line.rank, line.window, line.start_time_s) for line in ranks}

    def has_window(self, report: ClusterReport, start_time_s: float | None) -> bool:
        """Whether a window is written.

        A written window with the same number that ended before the start of this window belongs to another job.
        """
        end_s = self._window_ends_unix_s.get((report.attempt, report.window))
        return end_s is not None and (start_time_s is None or end_s >= start_time_s)

    def has_row(self, attempt: int, row: RankReport) -> bool:
        """Whether a report is written; a report that an agent sends again has exactly the same start time."""
        return (attempt, row.rank, row.window, row.start_time_s) in self._report_keys


# --- the size limit of a run folder ---


def folder_bytes(folder: Path) -> int:
    total = 0
    for subfolder, _, names in os.walk(folder):
        for name in names:
            try:
                total += Path(subfolder, name).lstat().st_size
            except FileNotFoundError:  # the file was replaced after the folder was listed
                continue
    return total


def remove_oldest_detail(folder: Path, limit_mb: int) -> int:
    """Remove the oldest files of detail until a folder is below its limit; return the number of removed files.

    The newest file of each kind, totals, events and facts are kept.
    """
    over_bytes = folder_bytes(folder) - limit_mb * MB
    if over_bytes <= 0:
        return 0
    num_removed = 0
    candidates = [(path.lstat(), path) for stem in DETAIL for path in segments(folder, stem)[:-1]]
    for status, path in sorted(candidates, key=lambda pair: pair[0].st_mtime_ns):
        path.unlink(missing_ok=True)
        num_removed += 1
        over_bytes -= status.st_size
        if over_bytes <= 0:
            break
    return num_removed
