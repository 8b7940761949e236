"""Read a model's shape from the fields of a Hugging Face config.json.

Each architecture is a function or a row below; the sizes follow the modules of transformers, and a test builds these
modules on the meta device and compares the number of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from effllm.memory.model import Experts, LatentAttention, ModelShape, WrongModel

Fields = Mapping[str, Any]

#: Names of the same size in different architectures.
ALIASES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
}


def read_config(fields: Fields, name: str = "") -> ModelShape:
    """Return the shape of the model that a config.json describes.

    A config of an unknown architecture gives an upper bound, if it has the usual sizes.

    Raises:
        WrongModel: sizes are missing or impossible.
    """
    notes: tuple[str, ...] = ()
    inner = fields.get("text_config")
    if isinstance(inner, Mapping) and not any(key in fields for key in ALIASES["layers"]):
        other = [key for key in ("vision_config", "audio_config") if key in fields]
        if other:
            notes = (f"only the text model: the parameters of {' and '.join(other)} are not counted",)
        merged = {**inner}
        merged.setdefault("tie_word_embeddings", fields.get("tie_word_embeddings", True))
        fields = merged
    architecture = _text(fields, "model_type") or _architecture(fields)
    read = FAMILIES.get(architecture)
    shape = read(fields) if read else _unknown(fields, architecture)
    return replace(shape, name=name or _text(fields, "_name_or_path") or architecture, notes=(*shape.notes, *notes))


# --- fields --------------------------------------------------------------------------------------


def _text(fields: Fields, key: str) -> str:
    value = fields.get(key)
    return value if isinstance(value, str) else ""


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _whole(fields: Fields, key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None:
        if default is None:
            raise WrongModel(f"the config has no {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, float) and value.is_integer():
            return int(value)
        raise WrongModel(f"{key} is {value!r}, not a whole number")
    return value


def _size(fields: Fields, kind: str, default: int | None = None) -> int:
    for key in ALIASES[kind]:
        if fields.get(key) is not None:
            return _whole(fields, key)
    if default is None:
        raise WrongModel(f"the config has no {ALIASES[kind][0]}")
    return default


def _either(fields: Fields, key: str, other: str, default: int) -> int:
    return _whole(fields, key, _whole(fields, other, default))


def _flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.get(key)
    return default if value is None else bool(value)


def _dense(fields: Fields, architecture: str, *, tied: bool = False, **changes: Any) -> ModelShape:
    """Return the shape of the usual layer: attention with grouped queries, a gated MLP and two norms."""
    hidden, heads = _size(fields, "hidden"), _size(fields, "heads")
    if not fields.get("head_dim") and (heads < 1 or hidden % heads):
        raise WrongModel(f"hidden size {hidden:,} is not a multiple of {heads:,} attention heads")
    layers = _size(fields, "layers")
    window = _whole(fields, "sliding_window", 0) if fields.get("use_sliding_window", True) else 0
    shape = ModelShape(
        name="",
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(fields, "num_key_value_heads", heads),
        head_dim=_whole(fields, "head_dim", hidden // max(heads, 1)),
        intermediate=_size(fields, "intermediate", 4 * hidden),
        vocab=_size(fields, "vocab"),
        tied=_flag(fields, "tie_word_embeddings", tied),
        sliding_window=window,
        sliding_layers=_sliding_layers(fields, layers) if window else 0,
        activation=_activation(fields),
    )
    return replace(shape, **changes)


def _activation(fields: Fields) -> str:
    stated = [_text(fields, key) for key in ("hidden_activation", "hidden_act", "activation_function")]
    default = {"opt": "relu", "gpt2": "gelu_new", "phi": "gelu_new"}.get(_text(fields, "model_type"), "silu")
    return next(filter(None, stated), default)


def _sliding_layers(fields: Fields, layers: int) -> int:
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds)
    if pattern := fields.get("sliding_window_pattern"):
        return layers - layers // int(pattern)
    if "max_window_layers" in fields:
        return max(layers - _whole(fields, "max_window_layers"), 0)
    return layers


# --- architectures -------------------------------------------------------------------------------


def _llama(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", False)
    return _dense(
        fields,
        _text(fields, "model_type"),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=_flag(fields, "mlp_bias", False),
        sliding_window=0,
        sliding_layers=0,
    )


def _mistral(fields: Fields) -> ModelShape:
    return _dense(fields, _text(fields, "model_type"))


def _mixtral(fields: Fields) -> ModelShape:
    shape = _mistral(fields)
    experts = Experts(
        total=_either(fields, "num_local_experts", "num_experts", 8),
        active=_whole(fields, "num_experts_per_tok", 2),
        intermediate=shape.intermediate,
        layers=shape.layers,
    )
    return replace(shape, experts=experts)


def _qwen2(fields: Fields) -> ModelShape:
    window = fields if fields.get("use_sliding_window") else {**fields, "sliding_window": None}
    return _dense(window, _text(fields, "model_type"), qkv_bias=_flag(fields, "qkv_bias", True))


def _qwen2_moe(fields: Fields) -> ModelShape:
    shape = _qwen2(fields)
    return replace(
        shape,
        experts=Experts(
            total=_either(fields, "num_experts", "num_local_experts", 60),
            active=_whole(fields, "num_experts_per_tok", 4),
            intermediate=_whole(fields, "moe_intermediate_size", 1408),
            layers=_sparse_layers(fields, shape.layers),
            shared_intermediate=_whole(fields, "shared_expert_intermediate_size", 5632),
            shared_gate=True,
        ),
    )


def _sparse_layers(fields: Fields, layers: int) -> int:
    step, dense = _whole(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    if step < 1:
        raise WrongModel(f"decoder_sparse_step is {step}")
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(min(layers, 10_000)))


def _qwen3(fields: Fields) -> ModelShape:
    window = fields if fields.get("use_sliding_window") else {**fields, "sliding_window": None}
    bias = _flag(fields, "attention_bias", False)
    shape = _dense({"head_dim": 128, **window}, _text(fields, "model_type"), qkv_bias=bias, out_bias=bias)
    return replace(shape, qk_norm_per_layer=2 * shape.head_dim)


def _qwen3_moe(fields: Fields) -> ModelShape:
    heads, hidden = _size(fields, "heads"), _size(fields, "hidden")
    shape = _qwen3({"head_dim": hidden // max(heads, 1), **fields})
    return replace(
        shape,
        experts=Experts(
            total=_either(fields, "num_experts", "num_local_experts", 128),
            active=_whole(fields, "num_experts_per_tok", 8),
            intermediate=_whole(fields, "moe_intermediate_size", 768),
            layers=_sparse_layers(fields, shape.layers),
        ),
    )


def _gemma(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", False)
    sizes = {"head_dim": 256, **fields}
    kind = _text(fields, "model_type")
    if kind == "gemma":
        return _dense(sizes, kind, tied=True, qkv_bias=bias, out_bias=bias)
    sizes.setdefault("sliding_window", 4096)
    if kind == "gemma2" and "layer_types" not in sizes:
        sizes["sliding_window_pattern"] = 2
    elif "layer_types" not in sizes:
        sizes.setdefault("sliding_window_pattern", 6)
    shape = _dense(sizes, kind, tied=True, qkv_bias=bias, out_bias=bias, norms_per_layer=4)
    return replace(shape, qk_norm_per_layer=0 if kind == "gemma2" else 2 * shape.head_dim)


def _gpt2(fields: Fields) -> ModelShape:
    return _dense(
        {**fields, "num_key_value_heads": None, "intermediate_size": fields.get("n_inner")},
        "gpt2",
        tied=True,
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
        positions=_whole(fields, "n_positions", _whole(fields, "n_ctx", 1024)),
    )


def _gpt_neox(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", True)
    return _dense(
        {**fields, "num_key_value_heads": None},
        "gpt_neox",
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        layer_norm=True,
        norm_bias=True,
    )


def _phi(fields: Fields) -> ModelShape:
    if _flag(fields, "qk_layernorm", False):
        raise WrongModel("phi with qk_layernorm is not known")
    return _dense(
        fields,
        "phi",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
        layer_norm=True,
        norm_bias=True,
        norms_per_layer=1,
    )


def _opt(fields: Fields) -> ModelShape:
    hidden = _size(fields, "hidden")
    if _whole(fields, "word_embed_proj_dim", hidden) != hidden:
        raise WrongModel("opt with word_embed_proj_dim other than hidden_size is not known")
    bias = _flag(fields, "enable_bias", True)
    return _dense(
        {**fields, "num_key_value_heads": None},
        "opt",
        tied=True,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
        final_norm=_flag(fields, "do_layer_norm_before", True) and not fields.get("_remove_final_layer_norm"),
        positions=_whole(fields, "max_position_embeddings", 2048) + 2,
    )


def _starcoder2(fields: Fields) -> ModelShape:
    bias = _flag(fields, "use_bias", True)
    return _dense(
        fields,
        "starcoder2",
        tied=True,
        gated_mlp=False,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        layer_norm=True,
        norm_bias=True,
    )


def _stablelm(fields: Fields) -> ModelShape:
    if _flag(fields, "qk_layernorm", False):
        raise WrongModel("stablelm with qk_layernorm is not known")
    parallel = _flag(fields, "use_parallel_residual", False)
    return _dense(
        fields,
        "stablelm",
        qkv_bias=_flag(fields, "use_qkv_bias", False),
        layer_norm=True,
        norm_bias=True,
        norms_per_layer=1 if parallel else 2,
    )


def _olmo(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", False)
    kind = _text(fields, "model_type")
    shape = _dense(fields, kind, qkv_bias=bias, out_bias=bias)
    if kind == "olmo":
        return replace(shape, layer_norm=True, norm_weight=False)
    return replace(shape, qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim)


def _cohere(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", False)
    shape = _dense(fields, "cohere", tied=True, qkv_bias=bias, out_bias=bias, layer_norm=True, norms_per_layer=1)
    if _flag(fields, "use_qk_norm", False):
        shape = replace(shape, qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim)
    return shape


def _gpt_oss(fields: Fields) -> ModelShape:
    bias = _flag(fields, "attention_bias", True)
    shape = _dense({"head_dim": 64, **fields}, "gpt_oss", qkv_bias=bias, out_bias=bias)
    experts = Experts(
        total=_either(fields, "num_local_experts", "num_experts", 128),
        active=_whole(fields, "num_experts_per_tok", _whole(fields, "experts_per_token", 4)),
        intermediate=shape.intermediate,
        layers=shape.layers,
        router_bias=True,
        expert_bias=True,
    )
    return replace(shape, experts=experts, other_per_layer=shape.heads)  # a sink for each head


def _deepseek(fields: Fields) -> ModelShape:
    q_rank = _whole(fields, "q_lora_rank", 0)
    latent = LatentAttention(
        kv_rank=_whole(fields, "kv_lora_rank", 512),
        nope_head_dim=_whole(fields, "qk_nope_head_dim", 128),
        rope_head_dim=_whole(fields, "qk_rope_head_dim", 64),
        value_head_dim=_whole(fields, "v_head_dim", 128),
        q_rank=q_rank,
    )
    bias = _flag(fields, "attention_bias", False)
    qk_dim = latent.nope_head_dim + latent.rope_head_dim
    sizes = {**fields, "head_dim": qk_dim, "num_key_value_heads": _size(fields, "heads")}
    shape = _dense(sizes, _text(fields, "model_type"), qkv_bias=bias, out_bias=bias, latent=latent)
    first, every = _whole(fields, "first_k_dense_replace", 0), _whole(fields, "moe_layer_freq", 1)
    total = _whole(fields, "n_routed_experts", 0)
    if not total:
        return shape
    if every < 1:
        raise WrongModel(f"moe_layer_freq is {every}")
    width = _whole(fields, "moe_intermediate_size")
    experts = Experts(
        total=total,
        active=_whole(fields, "num_experts_per_tok"),
        intermediate=width,
        layers=sum(layer >= first and layer % every == 0 for layer in range(min(shape.layers, 10_000))),
        shared_intermediate=width * _whole(fields, "n_shared_experts", 0),
    )
    notes = ("the module that predicts a further token (MTP) is not counted",)
    return replace(shape, experts=experts, notes=notes if fields.get("num_nextn_predict_layers") else ())


FAMILIES: dict[str, Callable[[Fields], ModelShape]] = {
    "llama": _llama,
    "granite": _llama,
    "smollm3": _llama,
    "mistral": _mistral,
    "phi3": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "phi": _phi,
    "opt": _opt,
    "starcoder2": _starcoder2,
    "stablelm": _stablelm,
    "olmo": _olmo,
    "olmo2": _olmo,
    "cohere": _cohere,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}


def _unknown(fields: Fields, architecture: str) -> ModelShape:
    """Return an upper bound for an unknown architecture: every bias and norm, a gated MLP and a head of its own."""
    named = architecture or "no model_type"
    absent = [names[0] for names in ALIASES.values() if not any(fields.get(key) is not None for key in names)]
    if "intermediate_size" in absent and len(absent) == 1:
        absent = []
    if absent:
        raise WrongModel(f"unknown architecture ({named}), and the config has no {', '.join(absent)}")
    sizes = {**fields, "num_key_value_heads": None}  # other architectures may name or use it differently
    shape = _dense(sizes, architecture, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True, head_bias=True)
    shape = replace(
        shape,
        tied=False,
        norms_per_layer=4,
        qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim,
        positions=_whole(fields, "max_position_embeddings", 0) if fields.get("max_position_embeddings", 0) else 0,
        sliding_window=0,
        sliding_layers=0,
        is_upper_bound=True,
        notes=(f"unknown architecture ({named}): an upper bound of the usual layer with every bias and norm",),
    )
    total = next(
        (fields[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if fields.get(key)), 0
    )
    if not total:
        return shape
    width = _whole(fields, "moe_intermediate_size", shape.intermediate)
    experts = Experts(
        total=int(total),
        active=_whole(fields, "num_experts_per_tok", 1),
        intermediate=width,
        layers=shape.layers,
        shared_intermediate=width * _whole(fields, "n_shared_experts", 0)
        or _whole(fields, "shared_expert_intermediate_size", 0),
        shared_gate=True,
        router_bias=True,
        expert_bias=True,
    )
    return replace(shape, experts=experts)
