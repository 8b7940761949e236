"""The user's file in the ledger folder: lines of JSON of runs, while they run and at the end of each attempt.

Many runs of many hosts append to one folder.  Each user writes only to a file of his own, which his group can read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from effllm.records.identity import Identity
from effllm.records.job import SCHEMA_VERSION, Summary
from effllm.records.verdict import OF_GPUS
from effllm.store import own_files, regular_file
from effllm.store.run_folder import StoreUnavailable
from effllm.views.text.summary import value_of

LOCK_TIMEOUT_S = 5.0
_SUMMARY_FIELDS = ("status", "attempts", "simulated", "iterations", "tokens", "elapsed_s", "currency",
               "updated_time_s")  # fmt: skip
_ENERGY_FIELDS = ("total_joules", "measured_joules", "error_joules", "gain_error", "scope")
_FIGURES = (
    "gpu_cost", "electricity_cost", "co2_kg", "tokens_per_second_per_gpu", "mfu_ratio", "joules_per_token",
)  # fmt: skip
FIRST_LINE_S, LINE_AFTER_S = 60.0, 3600.0  # first line of a running job, and largest time between two lines
MODE = 0o640  # the group of the project reads the lines of its members


def ledger_line(summary: Summary, folder: Path | None) -> dict[str, Any]:
    """Return the line of a run: identity, outcome, GPU-hours, joules and money.

    The line has nothing of the configuration, because other users can read it. A later line of a run replaces an
    earlier one.
    """
    # The hours of a job without GPUs are no GPU-hours.
    gpu_waterfall = waterfall if (waterfall := summary.waterfall) is not None and waterfall.unit == OF_GPUS else None
    figures = {name: value_of(summary, name) for name in _FIGURES}
    return {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(summary, name) for name in (*Identity.__struct_fields__, *_SUMMARY_FIELDS)},
        "folder": None if folder is None else str(folder),
        "cause": None if summary.verdict is None else summary.verdict.cause,
        "goodput_ratio": None if summary.goodput is None else summary.goodput.ratio,
        "ranks": summary.coverage.ranks_expected,
        "gpus": summary.coverage.gpus_expected,
        "gpu_hours": None if gpu_waterfall is None else gpu_waterfall.device_seconds / 3600.0,
        "wasted_gpu_hours": None if gpu_waterfall is None else gpu_waterfall.avoidable_seconds / 3600.0,
        **{name: getattr(summary.energy, name) for name in _ENERGY_FIELDS},
        **{name: None if figure is None else figure.value for name, figure in figures.items()},
    }


class LedgerFile:
    """Appends lines to the user's file in the ledger folder, which is made if only its last part is missing."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{own_files.user_name()}.jsonl"
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o750)  # noqa: PTH102 - the group reads the folder
            os.close(own_files.open_folder(folder))
        except OSError as error:
            raise StoreUnavailable(f"EFFICIENTLLM_LEDGER={folder}: {error.strerror or error}") from error

    def append(self, line: dict[str, Any]) -> None:
        """Append a line; parallel runs wait for each other, and after a failed write the file has its old length."""
        descriptor = own_files.open_file(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        with regular_file.locked(descriptor, self.path, LOCK_TIMEOUT_S):  # closes the descriptor at its end
            size = os.fstat(descriptor).st_size
            if not size:
                os.fchmod(descriptor, MODE)
            # A torn line of a killed process ends before the new line.
            line_break = b"" if not size or os.pread(descriptor, 1, size - 1) == b"\n" else b"\n"
            regular_file.append(descriptor, line_break + msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Do nothing: the file is open only during a write."""
