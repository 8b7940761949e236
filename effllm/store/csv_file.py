"""A CSV file of rows that several processes append at the same time: one lock, one header, no partial row.

The training process imports this module, so the module uses only the standard library.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from effllm.store import regular_file

LOCK_TIMEOUT_S = 10.0
DIGITS = 9  # significant digits of a number; the error of an energy is larger than the rounding
MAX_HEADER_BYTES = 2**16
#: A spreadsheet evaluates a cell that begins with one of these characters as a formula.
_FORMULA = ("=", "+", "-", "@")


class OtherColumns(ValueError):
    """The file has other columns; nothing was written to this file."""


def append_rows(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    mode: int = 0o600,
    skip_existing: bool = False,
) -> int:
    """Append rows to the file, which is created with its header if it is missing or empty; return their number.

    A value that is missing, ``None`` or not a finite number becomes an empty cell.  The file is locked while the rows
    are written, and after a failed write the file has its old length. ``skip_existing`` leaves out rows that the file
    has already.
    """
    lines = [_csv_line([cell(row.get(name)) for name in columns]) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
    with regular_file.locked(descriptor, path, LOCK_TIMEOUT_S):  # closes the descriptor at its end
        size = os.fstat(descriptor).st_size
        prefix = _header_or_line_break(descriptor, size, path, columns)
        if skip_existing:
            existing = set(path.read_bytes().splitlines(keepends=True))
            lines = [line for line in lines if line.encode("utf-8", errors="replace") not in existing]
        regular_file.append(descriptor, (prefix + "".join(lines)).encode("utf-8", errors="replace"))
    return len(lines)


def cell(value: Any) -> str:
    """Return a value as the text of a cell: one line, and never a formula of a spreadsheet.

    A text that could be a formula begins with an apostrophe, as spreadsheets write a text.

    >>> cell("=HYPERLINK(A1)"), cell(-1.5), cell(None), cell(True)
    ("'=HYPERLINK(A1)", '-1.5', '', 'true')
    """
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}" if abs(value) < float("inf") else ""
    if isinstance(value, int):
        return str(value)
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return f"'{text}" if text.startswith(_FORMULA) else text


def _header_or_line_break(descriptor: int, size: int, path: Path, columns: Sequence[str]) -> str:
    """Return the text before new rows: the header of an empty file, the missing line break of the last line, or ""."""
    if not size:
        return _csv_line(columns)
    first_line = os.pread(descriptor, MAX_HEADER_BYTES, 0).decode("utf-8-sig", errors="replace").partition("\n")[0]
    names = _names_in_header(first_line)
    if names != list(columns):
        missing = [name for name in columns if name not in names]
        other = f"without {missing[0]}" if missing else "in another order or with further columns"
        raise OtherColumns(f"{path} has other columns ({other})")
    return "" if os.pread(descriptor, 1, size - 1) == b"\n" else "\n"


def _names_in_header(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a NUL, before Python 3.11
        return []


def _csv_line(cells: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
