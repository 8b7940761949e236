"""The shape of a model, from the fields of a Hugging Face config.json or from a row of known_models.json."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from effllm.memory.architectures import FAMILIES
from effllm.memory.config_fields import ALIASES, TEXT_DEFAULTS, Fields, architecture_of, dense, text, whole
from effllm.memory.model import Experts, ModelShape, WrongModel


def read_config(fields: Fields, name: str = "") -> ModelShape:
    """Return the shape of the model that a config.json describes.

    A config of an unknown architecture gives an upper bound, if it has the usual sizes.

    Raises:
        WrongModel: sizes are missing or impossible.
    """
    notes = [*_quantization(fields)]
    other = [key for key in ("vision_config", "audio_config") if key in fields]
    if other:
        notes.append(f"only the text model: the parameters of {' and '.join(other)} are not counted")
    inner = fields.get("text_config")
    if isinstance(inner, Mapping) and not any(key in fields for key in ALIASES["layers"]):
        fields = _text_model(inner, fields, notes)
    architecture = text(fields, "model_type") or architecture_of(fields)
    read = FAMILIES.get(architecture)
    try:
        shape = read(fields) if read else _unknown(fields, architecture)
    except WrongModel:
        raise
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise WrongModel(f"a field of the config cannot be read: {error}") from None
    return replace(shape, name=name or text(fields, "_name_or_path") or architecture, notes=(*shape.notes, *notes))


def _text_model(inner: Fields, outer: Fields, notes: list[str]) -> Fields:
    """Return the fields of the text model in a multimodal config: transformers leaves out those with its defaults."""
    stated = {key: value for key, value in inner.items() if value is not None}
    if "tie_word_embeddings" in outer:
        stated.setdefault("tie_word_embeddings", outer["tie_word_embeddings"])
    defaults = TEXT_DEFAULTS.get(text(inner, "model_type"), {})
    absent = [key for key in defaults if key not in stated]
    if absent:
        notes.append(f"text_config has no {', '.join(absent)}: the defaults of transformers are taken")
    return {**defaults, **stated}


def _quantization(fields: Fields) -> Iterator[str]:
    """Yield a note if the weights of a config are quantized: the estimate is that of the unquantized model."""
    inner = fields.get("text_config")
    for one in (fields, inner if isinstance(inner, Mapping) else {}):
        stated = one.get("quantization_config")
        if isinstance(stated, Mapping):
            method = text(stated, "quant_method") or "an unknown method"
            yield (
                f"the weights are quantized ({method}), which is not read: the estimate is without it; --base-bits 4 "
                "or 8 estimates quantized matrices, for a training together with --lora"
            )
            return


def _unknown(fields: Fields, architecture: str) -> ModelShape:
    """Return an upper bound for an unknown architecture: every bias and norm, a gated MLP and a head of its own."""
    named = architecture or "no model_type"
    absent = [names[0] for names in ALIASES.values() if not any(fields.get(key) is not None for key in names)]
    if "intermediate_size" in absent and len(absent) == 1:
        absent = []
    if absent:
        raise WrongModel(
            f"unknown architecture ({named}), and the config has no {', '.join(absent)}: give a config.json of a "
            "decoder-only language model with these sizes"
        )
    sizes = {**fields, "num_key_value_heads": None}  # other architectures may name or use it differently
    shape = dense(sizes, bias=True, mlp_bias=True, norm_bias=True, head_bias=True)
    shape = replace(
        shape,
        architecture=architecture,
        tied=False,
        norms_per_layer=4,
        qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim,
        positions=whole(fields, "max_position_embeddings", 0) if fields.get("max_position_embeddings", 0) else 0,
        sliding_window=0,
        sliding_layers=0,
        is_upper_bound=True,
        notes=(f"unknown architecture ({named}): an upper bound of the usual layer with every bias and norm",),
    )
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((whole(fields, key) for key in keys if fields.get(key)), 0)
    if not total:
        return shape
    width = whole(fields, "moe_intermediate_size", shape.intermediate)
    experts = Experts(
        total=total,
        active=whole(fields, "num_experts_per_tok", 1),
        intermediate=width,
        layers=shape.layers,
        shared_intermediate=width * whole(fields, "n_shared_experts", 0)
        or whole(fields, "shared_expert_intermediate_size", 0),
        shared_gate=True,
        router_bias=True,
        expert_bias=True,
    )
    return replace(shape, experts=experts)


@dataclass(frozen=True)
class KnownModel:
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
        """Return the remarks of the row, and that its sizes were not compared."""
        unsure = "" if self.compared else "the sizes of this row were not compared with a source: check its config.json"
        return tuple(one for one in (self.note, unsure) if one)

    @property
    def shape(self) -> ModelShape:
        return read_config(self.config, self.name)


@cache
def known_models() -> tuple[KnownModel, ...]:
    """Return all rows in the order of the file."""
    rows = json.loads(Path(__file__).with_name("known_models.json").read_text())
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


def similar_names(name: str) -> list[str]:
    """Return the names of the table that are nearest to a name."""
    plain = {_plain(row.name): row.name for row in known_models()}
    return [plain[one] for one in difflib.get_close_matches(_plain(name.split("/")[-1]), plain, 4, 0.5)]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _by_name() -> dict[str, KnownModel]:
    found: dict[str, KnownModel] = {}
    for row in known_models():
        for name in (row.name, row.repository, row.repository.split("/")[-1], *row.aliases):
            found.setdefault(_plain(name), row)
    return found
