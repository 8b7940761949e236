"""Fields of a config.json, and the usual layer that most architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from effllm.memory.model import ModelShape, WrongModel

Fields = Mapping[str, Any]

MAX_VALUE = 10**12  # of a size; larger numbers are errors of the file


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


def whole(fields: Fields, key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise WrongModel(f"the config has no {key}")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {str(value)[:40]!r}, not a whole number")
    if not 0 <= value <= MAX_VALUE:
        raise WrongModel(f"{key} is {'negative' if value < 0 else f'above {MAX_VALUE:,}'}: correct it in the config")
    return value


def size(fields: Fields, kind: str, default: int | None = None) -> int:
    for key in ALIASES[kind]:
        if fields.get(key) is not None:
            return whole(fields, key)
    if default is None:
        raise WrongModel(f"the config has no {ALIASES[kind][0]}")
    return default


def either(fields: Fields, key: str, other: str, default: int) -> int:
    return whole(fields, key, whole(fields, other, default))


def flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key)
    return default if value is None else bool(value)


def dense(fields: Fields, *, tied: bool = False, bias: bool = False, **changes: Any) -> ModelShape:
    """Return the shape of the usual layer: attention with grouped queries, a gated MLP and two norms.

    Args:
        fields: the fields of the config.
        tied: whether the head is the embedding, unless the fields say it.
        bias: whether the matrices of the attention have biases.
        changes: other fields of the shape.
    """
    hidden, heads = size(fields, "hidden"), size(fields, "heads")
    if not fields.get("head_dim") and (heads < 1 or hidden % heads):
        raise WrongModel(f"hidden size {hidden:,} is not a multiple of {heads:,} attention heads")
    layers = size(fields, "layers")
    window = whole(fields, "sliding_window", 0) if fields.get("use_sliding_window", True) else 0
    shape = ModelShape(
        name="",
        architecture=text(fields, "model_type"),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=whole(fields, "num_key_value_heads", heads),
        head_dim=whole(fields, "head_dim", hidden // max(heads, 1)),
        intermediate=size(fields, "intermediate", 4 * hidden),
        vocab=size(fields, "vocab"),
        tied=flag(fields, "tie_word_embeddings", tied),
        qkv_bias=bias,
        out_bias=bias,
        sliding_window=window,
        sliding_layers=_sliding_layers(fields, layers) if window else 0,
        activation=activation(fields),
    )
    return replace(shape, **changes)


def activation(fields: Fields) -> str:
    stated = [text(fields, key) for key in ("hidden_activation", "hidden_act", "activation_function")]
    default = {"opt": "relu", "gpt2": "gelu_new", "phi": "gelu_new"}.get(text(fields, "model_type"), "silu")
    return next(filter(None, stated), default)


def _sliding_layers(fields: Fields, layers: int) -> int:
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    if pattern := fields.get("sliding_window_pattern"):
        return layers - layers // int(pattern)
    if "max_window_layers" in fields:
        return max(layers - whole(fields, "max_window_layers"), 0)
    return layers
