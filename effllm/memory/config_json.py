"""The shape of a model, from the fields of a Hugging Face config.json or from a row of known_models.json."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from effllm.memory.architectures import (
    ALIASES,
    Fields,
    UnknownArchitecture,
    architecture_of,
    architectures,
    configs,
    flag,
    shape_of,
    text,
    text_defaults,
    written,
)
from effllm.memory.model import ModelShape, WrongModel

ONLY_TEXT = "only the text model"  # beginning of a note


def read_config(fields: Fields, name: str = "") -> ModelShape:
    """Return the shape of the model that a config.json describes.

    Raises:
        UnknownArchitecture: there are no formulas for its architecture.
        WrongModel: sizes are missing or impossible.
    """
    quantized = [config for part in configs(fields) if isinstance(config := part.get("quantization_config"), Mapping)]
    notes = [
        f"the weights are quantized ({text(config, 'quant_method') or 'an unknown method'}), which is not read: the "
        "estimate is without it; --base-bits 4 or 8 estimates quantized matrices, for a training together with --lora"
        for config in quantized[-1:]
    ]
    other = [key for key in ("vision_config", "audio_config") if key in fields]
    if other:
        notes.append(f"{ONLY_TEXT}: the parameters of {' and '.join(other)} are not counted")
    if "dim" in fields and "n_layers" in fields:
        fields = _of_mistral(fields)
    inner = fields.get("text_config")
    if isinstance(inner, Mapping) and not any(key in fields for key in ALIASES["layers"]):
        fields = _text_model(inner, fields, notes)
    architecture = text(fields, "model_type") or architecture_of(fields)
    if not architecture:
        stated = written(fields.get("model_type"))
        raise WrongModel(f"model_type is {stated}, and architectures name no class: give the config.json of a model")
    if architecture not in architectures():
        key = "model_type" if text(fields, "model_type") else "architectures"
        raise UnknownArchitecture(f"unknown architecture ({key} {architecture})")
    try:
        shape = shape_of(fields, architecture)
    except WrongModel:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise WrongModel(f"a field of the config cannot be read: {error}") from None
    return replace(shape, name=name or text(fields, "_name_or_path") or architecture, notes=(*shape.notes, *notes))


def _of_mistral(fields: Fields) -> Fields:
    """Return the fields of Mistral's own params.json, some of whose sizes have other names."""
    if other := [name for name in ("kv_lora_rank", "vision_encoder", "ssm_cfg", "d_model") if fields.get(name)]:
        raise UnknownArchitecture(f"params.json with {', '.join(other)}")
    experts = fields.get("moe")
    if not isinstance(experts, Mapping):
        experts = {}
    elif set(experts) - {"num_experts", "num_experts_per_tok"}:
        raise UnknownArchitecture(f"params.json with moe: {', '.join(experts)}")
    renamed = {"n_kv_heads": "num_key_value_heads", "tied_embeddings": "tie_word_embeddings"}
    kind = {"model_type": "mixtral" if experts else "mistral"}
    return {**fields, **kind, **{name: fields[key] for key, name in renamed.items() if key in fields}, **experts}


def _text_model(inner: Fields, outer: Fields, notes: list[str]) -> Fields:
    """Return the fields of the text model in a multimodal config: transformers leaves out those with its defaults."""
    stated = {key: value for key, value in inner.items() if value is not None}
    key = "tie_word_embeddings"
    places = [flag(place, key, False) for place in (inner, outer) if place.get(key) is not None]
    stated[key] = any(places) if places else None
    if len(set(places)) != 1:  # the classes of transformers read one, the other, or either
        notes.append(f"{key} is not stated once: with the extra fit, the class of the model decides about its head")
    defaults = text_defaults().get(text(inner, "model_type"), {})
    absent = [key for key in defaults if key not in stated]
    if absent:
        notes.append(f"text_config has no {', '.join(absent)}: the defaults of transformers are taken")
    return {**defaults, **stated}


class KnownModel(msgspec.Struct, frozen=True):
    """A row of known_models.json: the sizes of a published config.json."""

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
        unsure = "" if self.compared else "the sizes of this row were not compared with a source: check its config.json"
        return tuple(note for note in (self.note, unsure) if note)

    @property
    def shape(self) -> ModelShape:
        return read_config(self.config, self.name)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all rows in the order of the file."""
    return msgspec.json.decode(Path(__file__).with_name("known_models.json").read_bytes(), type=tuple[KnownModel, ...])


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


def similar_names(name: str) -> list[str]:
    """Return the names of the table that are nearest to a name."""
    plain = {_plain(row.name): row.name for row in known_models()}
    return [plain[key] for key in difflib.get_close_matches(_plain(name.split("/")[-1]), plain, 4, 0.5)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _by_name() -> dict[str, KnownModel]:
    models: dict[str, KnownModel] = {}
    for row in known_models():
        for name in (row.name, row.repository, row.repository.split("/")[-1], *row.aliases):
            models.setdefault(_plain(name), row)
    return models
