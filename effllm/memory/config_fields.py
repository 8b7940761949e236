"""Fields of a config.json, and the usual layer that most architectures share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effllm.memory.model import MAX_LAYERS, MAX_SIZE, ModelShape, WrongModel

Fields = Mapping[str, Any]


class UnknownArchitecture(WrongModel):
    """A config whose architecture has no formulas here."""


#: Numbers that may be 0.
_MAY_BE_ZERO = re.compile(
    "first_k_dense_replace|n_(routed|shared)_experts|q_lora_rank|qk_rope_head_dim|shared_expert_intermediate_size"
    "|sliding_window(_pattern)?|max_window_layers"
)
#: Fields that are lists, with a value for each layer.
_PER_LAYER = re.compile(".*per_layer.*|block_configs|.*_multipliers")
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


#: Names of the same size in different architectures.
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}

#: Sizes that transformers leaves out of a text_config, because they are the defaults of its configuration classes.
TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": _sizes(32000, 4096, 11008, 32, 32, 32),
    "mistral": _sizes(32000, 4096, 14336, 32, 32, 8),
    "gemma3_text": {**_sizes(262208, 2304, 9216, 26, 8, 4), "head_dim": 256},
}


def text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def architecture_of(fields: Fields) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


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


def either(fields: Fields, key: str, other: str, default: int) -> int:
    return whole(fields, key, whole(fields, other, default))


def flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key)
    if value not in (None, True, False):
        raise WrongModel(f"{key} is {written(value)}, not true or false")
    return default if value is None else bool(value)


def dense(fields: Fields, *, tied: bool = False, bias: bool = False, **changes: Any) -> ModelShape:
    """Return the shape of the usual layer: attention with grouped queries, a gated MLP and two norms.

    Args:
        fields: the fields of the config.
        tied: whether the head is the embedding, unless the fields say it.
        bias: whether the matrices of the attention have biases.
        changes: other fields of the shape.
    """
    if listed := [key for key in fields if _PER_LAYER.fullmatch(key) and isinstance(fields[key], (list, dict))]:
        raise UnknownArchitecture(
            f"{listed[0]} is {written(fields[listed[0]])}: there are no formulas for a size of each layer"
        )
    hidden, heads = size(fields, "hidden"), size(fields, "heads")
    if not fields.get("head_dim") and hidden % heads:
        raise WrongModel(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    layers = size(fields, "layers")
    window = whole(fields, "sliding_window", 0) if flag(fields, "use_sliding_window", True) else 0
    sliding = _sliding_layers(fields, layers)
    shape = ModelShape(
        name="",
        architecture=text(fields, "model_type"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole(fields, "num_key_value_heads", heads),
        head_dim=whole(fields, "head_dim", hidden // heads),
        intermediate=size(fields, "intermediate", 4 * hidden),
        vocab=size(fields, "vocab"),
        tied=flag(fields, "tie_word_embeddings", tied),
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=window,
        sliding_layers=sliding if window else 0,
        activation=activation(fields),
    )
    return replace(shape, **changes)


def activation(fields: Fields) -> str:
    stated = [text(fields, key) for key in ("hidden_activation", "hidden_act", "activation_function")]
    default = {"opt": "relu", "gpt2": "gelu_new", "phi": "gelu_new"}.get(text(fields, "model_type"), "silu")
    return next(filter(None, stated), default)


def _sliding_layers(fields: Fields, layers: int) -> int:
    kinds, pattern = fields.get("layer_types"), fields.get("sliding_window_pattern")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise WrongModel(f"layer_types is {written(kinds)}, not a list of {layers} layers")
        if other := [kind for kind in kinds if kind not in _LAYER_TYPES]:
            raise UnknownArchitecture(f"layer_types has {written(other[0])}: there are no formulas for such a layer")
        return kinds.count("sliding_attention")
    if isinstance(pattern, str):  # such as LLLG of EXAONE 4: local and global layers, of which the last one is global
        if not re.fullmatch("[LG]+", pattern):
            raise WrongModel(f"sliding_window_pattern is {written(pattern)}, not a number or letters L and G")
        return sum(pattern[layer % len(pattern)] == "L" for layer in range(layers - 1))
    if every := whole(fields, "sliding_window_pattern", 0):
        return layers - layers // every
    if "max_window_layers" in fields:
        return max(layers - whole(fields, "max_window_layers", layers), 0)
    return layers
