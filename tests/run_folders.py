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
        change_document(folder / name, run_id=folder.name)
    return folder


def change_document(path: Path, **fields: Any) -> None:
    """Replace fields of a JSON document."""
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | fields))


def write_files(folder: Path, run: Any = None, summary: Any = None, **lines: str | Sequence[Any]) -> Path:
    """Write a run folder of documents (objects, or bytes) and of lines by the kind of file (text, or objects)."""
    folder.mkdir(parents=True)
    for name, document in (("run", run), ("summary", summary)):
        if document is not None:
            text = document if isinstance(document, bytes) else msgspec.json.encode(document)
            (folder / f"{name}.json").write_bytes(text)
    for kind, given in lines.items():
        encoded = (
            given.encode() if isinstance(given, str) else b"".join(msgspec.json.encode(one) + b"\n" for one in given)
        )
        (folder / ("events.jsonl" if kind == "events" else f"{kind}-0001.jsonl")).write_bytes(encoded)
    return folder


def write_run(
    folder: Path,
    metrics: Mapping[str, float],
    *,
    tags: Sequence[str] = (),
    run: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
    board: Mapping[str, Any] | None = None,
    sensor_error: float | None = None,
) -> Path:
    """Write a finished run with metrics by tag; ``run``, ``summary`` and ``board`` replace fields."""
    known = {"run_id": folder.name, "schema_version": SCHEMA_VERSION, "tags": list(tags)}
    about = {
        **known,
        "ranks": {"0": {"host": "n1", "devices": [{**BOARD, **(board or {})}]}},
        "world_size": 1,
        "command": ["train.py"],
    }
    errors = {} if sensor_error is None else {"sensor_error": sensor_error}
    result = {
        **known,
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
    }
    return write_files(folder, {**about, **(run or {})}, {**result, **(summary or {})})
