"""A CSV file with one row for each finished run; several processes may append at the same time."""

from __future__ import annotations

import csv
import fcntl
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Measured values in the order of the file; integration/sft_play/README.md has the unit and the base of each column.
MEASURED = (
    "tokens_processed",
    "wall_s",
    "warmup_s",
    "energy_J",
    "avg_power_W",
    "peak_power_W",
    "tok_per_s",
    "J_per_token",
    "E10k_J",
    "vram_peak_MB",
    "vram_avg_MB",
)
#: Columns that describe the run.
METADATA = (
    "model",
    "dataset",
    "backend",
    "optimizer",
    "batch_size",
    "grad_accum",
    "seq_len",
    "precision",
    "seed",
    "notes",
)
COLUMNS = (*MEASURED, *METADATA)

LOCK_WITHIN_S = 10.0
DIGITS = 9  # significant digits of a number; the error of an energy is larger than the rounding


class OtherColumns(ValueError):
    """The file has other columns; nothing was written to this file."""


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
    """Append a row to the file, which is created with its header if it is missing or empty.

    A value that is missing, ``None`` or not a finite number becomes an empty cell.  The file is locked while the row is
    written, and after a failed write the file has its old length.

    Raises:
        OtherColumns: the first line of the file is not the header, or ``row`` has a key that is not a column.
        OSError: the file cannot be written, or is locked for longer than `LOCK_WITHIN_S` (`TimeoutError`).
    """
    if unknown := sorted(set(row) - set(COLUMNS)):
        raise OtherColumns(f"{path} has no column {unknown[0]}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        _lock(file, target)
        size = os.fstat(file).st_size
        text = _line([_cell(row.get(name)) for name in COLUMNS])
        try:
            _write(file, _before(file, size, target) + text)
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _lock(file: int, path: Path) -> None:
    deadline_s = time.monotonic() + LOCK_WITHIN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"another process has locked {path} for {LOCK_WITHIN_S:g} s") from None
            time.sleep(0.02)
        else:
            return


def _before(file: int, size: int, path: Path) -> str:
    """Return the text before the row: the header of an empty file, or the missing line break at the end."""
    if not size:
        return _line(COLUMNS)
    first = os.pread(file, 4096, 0).decode("utf-8-sig", errors="replace").partition("\n")[0]
    columns = _columns(first)
    if tuple(columns) != COLUMNS:
        missing = [name for name in COLUMNS if name not in columns]
        other = f"without {missing[0]}" if missing else "in another order or with further columns"
        raise OtherColumns(f"{path} has other columns ({other})")
    return "" if os.pread(file, 1, size - 1) == b"\n" else "\n"


def _columns(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a NUL, before Python 3.11
        return []


def _line(cells: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "" if value is None else str(value).lower()
    if isinstance(value, float):
        return f"{value:.{DIGITS}g}" if abs(value) < float("inf") else ""
    return " ".join(str(value).split())  # without line breaks, because one run is one line


def _write(file: int, text: str) -> None:
    data = text.encode("utf-8", errors="replace")
    while data:
        data = data[os.write(file, data) :]
