"""A CSV file with one row for each finished run; several processes may append at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effllm.store.csv_file import OtherColumns, append_rows

__all__ = ["COLUMNS", "MEASURED", "METADATA", "OtherColumns", "append_row"]

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


def append_row(path: str | Path, row: Mapping[str, Any]) -> None:
    """Append a row to the file, which is created with its header if it is missing or empty.

    A value that is missing, ``None`` or not a finite number becomes an empty cell.  The file is locked while the row is
    written, and after a failed write the file has its old length.

    Raises:
        OtherColumns: the first line of the file is not the header, or ``row`` has a key that is not a column.
        OSError: the file cannot be written, or is locked for longer than 10 s (`TimeoutError`).
    """
    if unknown := sorted(set(row) - set(COLUMNS)):
        raise OtherColumns(f"{path} has no column {unknown[0]}")
    append_rows(Path(path), COLUMNS, [row], mode=0o666)
