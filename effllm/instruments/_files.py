"""JSON files of the instruments."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: str | Path, body: Any) -> Path:
    """Replace a file atomically, so that no process reads half of it; NaN and infinite values become ``null``.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_with_null(body), indent=2, allow_nan=False) + "\n"
    new_file = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        new_file.write_text(text, encoding="utf-8")
        new_file.replace(target)
    finally:
        new_file.unlink(missing_ok=True)
    return target


def _with_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _with_null(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
