"""The models that ``effllm fit`` finds by name: rows of known_models.json, each with its source."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from effllm.memory.config_json import read_config
from effllm.memory.model import ModelShape


@dataclass(frozen=True)
class KnownModel:
    """A row of the table: the sizes of a published config.json."""

    name: str
    repository: str
    source: str
    compared: str | None  # the public place whose sizes were compared with the row; None: not compared
    config: dict[str, Any]
    published_parameters: int | None = None
    aliases: tuple[str, ...] = ()
    note: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the remarks of the row, and that its sizes were not compared."""
        unsure = "" if self.compared else "the sizes of this row were not compared with a source: check its config.json"
        return tuple(one for one in (self.note, unsure) if one)

    @property
    def shape(self) -> ModelShape:
        return read_config(self.config, self.name)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all rows in the order of the file."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tuple(KnownModel(**{**row, "aliases": tuple(row.get("aliases", ()))}) for row in rows)


def find_model(name: str) -> KnownModel | None:
    """Return the model with a name, an alias or a repository; letters other than a to z and digits do not count."""
    return _by_name().get(_plain(name))


def find_variant(name: str) -> KnownModel | None:
    """Return the model of which a name is a variant, such as an Instruct model: variants have the sizes of their base.

    Quantized variants are not found, because their weights are others.
    """
    short = name.split("/")[-1].lower().removeprefix("meta-")
    while (shorter := re.sub(_VARIANT, "", short)) != short:
        short = shorter
    return find_model(short)


#: Ends of names that leave the sizes of a model as they are: tuned models, releases by month, formats.
_VARIANT = r"[-_](instruct|chat|base|it|pt|hf|thinking|bf16|\d{4})$"


def similar_names(name: str, count: int = 4) -> list[str]:
    """Return the names of the table that are nearest to a name."""
    plain = {_plain(row.name): row.name for row in known_models()}
    return [plain[one] for one in difflib.get_close_matches(_plain(name.split("/")[-1]), plain, count, 0.5)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _by_name() -> dict[str, KnownModel]:
    found: dict[str, KnownModel] = {}
    for row in known_models():
        for name in (row.name, row.repository, row.repository.split("/")[-1], *row.aliases):
            found.setdefault(_plain(name), row)
    return found
