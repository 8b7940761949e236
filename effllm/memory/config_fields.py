"""Fields of a config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from effllm.memory.model import MAX_LAYERS, MAX_SIZE, WrongModel

Fields = Mapping[str, Any]


class UnknownArchitecture(WrongModel):
    """A config whose architecture has no formulas here."""


#: Numbers that may be 0.
_MAY_BE_ZERO = re.compile(
    "first_k_dense_replace|n_(routed|shared)_experts|q_lora_rank|qk_rope_head_dim|shared_expert_intermediate_size"
    "|sliding_window(_pattern)?|max_window_layers"
)


#: Names of the same size in different architectures.
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "hidden_dim"),
}


def text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def architecture_of(fields: Fields) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def configs(fields: Fields) -> list[Fields]:
    """Return the config of the text model, if there is one, and the whole config."""
    inner = fields.get("text_config")
    return [inner, fields] if isinstance(inner, Mapping) else [fields]


def written(value: Any) -> str:
    """Return the beginning of a value as it is in a JSON file."""
    return json.dumps(value)[:60]


def whole(fields: Fields, key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise WrongModel(f"{key} is null" if key in fields else f"the config has no {key}")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        raise UnknownArchitecture(f"{key} is {written(value)}: there are no formulas for a size of each layer")
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {written(value)}, not a whole number")
    lowest, limit = not _MAY_BE_ZERO.fullmatch(key), MAX_LAYERS if key in ALIASES["layers"] else MAX_SIZE
    if not lowest <= value <= limit:
        raise WrongModel(f"{key} is {written(fields[key])}: a number from {lowest:d} to {limit:,} is possible")
    return value


def size(fields: Fields, kind: str, default: int | None = None) -> int:
    stated = [key for key in ALIASES[kind] if key in fields]
    key = next((key for key in stated if fields[key] is not None), stated[0] if stated else ALIASES[kind][0])
    return whole(fields, key, default)


def flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key)
    if value not in (None, True, False):
        raise WrongModel(f"{key} is {written(value)}, not true or false")
    return default if value is None else bool(value)
