"""Run folders with given values, for tests of the analysis."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from effllm.records.job import SCHEMA_VERSION

#: A run that tests/golden_run.py recorded.
GOLDEN = Path(__file__).parent / "golden" / "run_folder_5"
BOARD = {"key": "GPU-1", "name": "NVIDIA H100", "is_gpu": True, "power_limit_w": 700.0, "driver": "nvml 570"}


def copy_golden(folder: Path) -> Path:
    """Copy the recorded run; the name of the folder becomes the id of the run."""
    shutil.copytree(GOLDEN, folder)
    for name in ("run.json", "summary.json"):
        document = msgspec.json.decode((folder / name).read_bytes()) | {"run_id": folder.name}
        (folder / name).write_bytes(msgspec.json.encode(document))
    return folder


def write_run(
    folder: Path,
    metrics: Mapping[str, float],
    *,
    tags: Sequence[str] = (),
    run: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    board: Mapping[str, Any] | None = None,
    windows: Sequence[Mapping[str, float]] = (),
    sensor_error: float | None = None,
) -> Path:
    """Write a finished run with metrics by tag; ``run``, ``summary`` and ``board`` replace fields."""
    folder.mkdir(parents=True)
    about = {
        "run_id": folder.name,
        "schema_version": SCHEMA_VERSION,
        "ranks": {"0": {"host": "n1", "devices": [{**BOARD, **(board or {})}]}},
        "world_size": 1,
        "tags": list(tags),
        "command": ["train.py"],
        **(run or {}),
    }
    errors = {} if sensor_error is None else {"sensor_error": sensor_error}
    result = {
        "run_id": folder.name,
        "status": "completed",
        "is_over": True,
        "updated_time_s": time.time(),
        "started_time_s": time.time(),
        "iterations": 1000,
        "parameters": 1000,
        "parameters_kind": "total",
        "simulated": False,
        "energy": {"scope": "gpu"},
        "metrics": {tag: {"value": value, "unit": "", **errors} for tag, value in metrics.items()},
        "tags": list(tags),
        "schema_version": SCHEMA_VERSION,
        **(summary or {}),
    }
    (folder / "run.json").write_bytes(msgspec.json.encode(about))
    (folder / "summary.json").write_bytes(msgspec.json.encode(result))
    lines = (
        msgspec.json.encode({"window": at, "iteration_first": at, "iteration_last": at, "values": values})
        for at, values in enumerate(windows, start=1)
    )
    (folder / "windows-0001.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    return folder
