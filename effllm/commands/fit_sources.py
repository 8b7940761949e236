"""Find the model of an argument of ``effllm fit``: a file, a folder or a name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effllm.memory.config_json import read_config
from effllm.memory.known_models import find_model, known_models, similar_names
from effllm.memory.model import ModelShape, WrongModel

MAX_BYTES = 10**7  # of a config file


class UnreadableModel(ValueError):
    """An argument that names no readable model, with the reason and the remedy."""


@dataclass(frozen=True)
class FoundModel:
    """A model with the source of its sizes, and the settings that its file states."""

    shape: ModelShape
    source: str
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # of a plan


def find(text: str) -> FoundModel:
    """Return the model of an argument.

    Raises:
        UnreadableModel: there is no such file or name, or the file describes no model.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise UnreadableModel(f"{text} is a folder without a config.json")
    if path.is_file():
        return _file(path)
    if known := find_model(text):
        return FoundModel(known.shape, f"table: {known.source}", (*([known.note] if known.note else []),))
    near = ", ".join(similar_names(text)) or ", ".join(one.name for one in known_models()[:4]) + ", ..."
    if "/" in text and not text.startswith(("/", ".")):
        raise UnreadableModel(
            f"{text} is not in the table, and nothing is downloaded: download config.json of this model, and give the "
            f"path of that file. Names of the table near to it: {near}"
        )
    raise UnreadableModel(f"there is no file {text}, and no model of this name in the table: {near}")


def _file(path: Path) -> FoundModel:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UnreadableModel(f"{path} is too large for a config: give the config.json of the model")
        fields = json.loads(path.read_text())
    except OSError as error:
        raise UnreadableModel(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableModel(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise UnreadableModel(f"{path} is not the config of a model: it has no fields")
    try:
        shape = read_config(fields, _name(path, fields))
    except WrongModel as error:
        raise UnreadableModel(f"{path}: {error}") from None
    return FoundModel(shape, str(path), shape.notes)


def _name(path: Path, fields: dict[str, Any]) -> str:
    stated = fields.get("_name_or_path")
    if isinstance(stated, str) and stated.strip("./"):
        return stated.rstrip("/").split("/")[-1]
    return path.resolve().parent.name if path.name == "config.json" else path.stem
