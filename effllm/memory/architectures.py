"""The shapes of known architectures, from the fields of their config.json.

The sizes follow the modules of transformers; a test builds these modules on the meta device and compares the numbers of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from effllm.memory.config_fields import Fields, dense, either, flag, size, text, whole
from effllm.memory.model import Experts, LatentAttention, ModelShape, WrongModel


def _llama(fields: Fields) -> ModelShape:
    mlp_bias = flag(fields, "mlp_bias", False)
    return dense(fields, bias=_attention_bias(fields), mlp_bias=mlp_bias, sliding_window=0, sliding_layers=0)


def _attention_bias(fields: Fields, default: bool = False) -> bool:
    return flag(fields, "attention_bias", default)


def _mistral(fields: Fields) -> ModelShape:
    is_phi = text(fields, "model_type") == "phi3"
    return dense(fields, fused_qkv=is_phi, fused_gate=is_phi)


def _mixtral(fields: Fields) -> ModelShape:
    shape = dense(fields, bias=_attention_bias(fields))
    experts = Experts(
        total=either(fields, "num_local_experts", "num_experts", 8),
        active=whole(fields, "num_experts_per_tok", 2),
        intermediate=shape.intermediate,
        layers=shape.layers,
    )
    return replace(shape, experts=experts)


def _qwen2(fields: Fields) -> ModelShape:
    return dense(_windowed(fields), qkv_bias=flag(fields, "qkv_bias", True))


def _windowed(fields: Fields) -> Fields:
    """Return the fields of Qwen, whose window is used only if they say so."""
    return fields if fields.get("use_sliding_window") else {**fields, "sliding_window": None}


def _qwen2_moe(fields: Fields) -> ModelShape:
    shared = whole(fields, "shared_expert_intermediate_size", 5632)
    return _with_experts(fields, _qwen2(fields), (60, 4, 1408), shared_intermediate=shared, shared_gate=True)


def _with_experts(fields: Fields, shape: ModelShape, default: tuple[int, int, int], **changes: Any) -> ModelShape:
    """Return a shape of Qwen with experts; ``default``: all experts, active ones, and the width of one."""
    experts = Experts(
        total=either(fields, "num_experts", "num_local_experts", default[0]),
        active=whole(fields, "num_experts_per_tok", default[1]),
        intermediate=whole(fields, "moe_intermediate_size", default[2]),
        layers=_sparse_layers(fields, shape.layers),
    )
    return replace(shape, experts=replace(experts, **changes))


def _sparse_layers(fields: Fields, layers: int) -> int:
    step, dense = whole(fields, "decoder_sparse_step", 1), fields.get("mlp_only_layers") or []
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(min(layers, 10_000)))


def _head_norms(fields: Fields) -> ModelShape:
    """Return the usual layer with a norm of the queries and one of the keys of each head."""
    pattern = {"sliding_window_pattern": 4} if text(fields, "model_type") == "exaone4" else {}
    shape = dense({**pattern, **fields}, bias=_attention_bias(fields))
    return replace(shape, qk_norm_per_layer=2 * shape.head_dim)


def _qwen3(fields: Fields) -> ModelShape:
    return _head_norms({"head_dim": 128, **_windowed(fields)})


def _qwen3_moe(fields: Fields) -> ModelShape:
    head_dim = size(fields, "hidden") // size(fields, "heads")
    return _with_experts(fields, _qwen3({"head_dim": head_dim, **fields}), (128, 8, 768))


def _gemma(fields: Fields) -> ModelShape:
    sizes = {"head_dim": 256, **fields}
    kind, bias = text(fields, "model_type"), _attention_bias(fields)
    if kind == "gemma":
        return dense(sizes, tied=True, bias=bias)
    sizes.setdefault("sliding_window", 4096)
    if kind == "gemma2" and "layer_types" not in sizes:
        sizes["sliding_window_pattern"] = 2
    elif "layer_types" not in sizes:
        sizes.setdefault("sliding_window_pattern", 6)
    shape = dense(sizes, tied=True, bias=bias, norms_per_layer=4)
    caps = (30.0, 50.0) if kind == "gemma2" else (None, None)
    return replace(
        shape,
        qk_norm_per_layer=0 if kind == "gemma2" else 2 * shape.head_dim,
        logit_cap=bool(fields.get("final_logit_softcapping", caps[0])),
        attention_cap=bool(fields.get("attn_logit_softcapping", caps[1])),
    )


def _gpt(fields: Fields, bias: bool = True, **changes: Any) -> ModelShape:
    """Return the layer of GPT-2 and its followers: LayerNorm, an MLP without a gate, and biases."""
    usual = {"mlp_bias": bias, "gated_mlp": False, "layer_norm": True, "norm_bias": True}
    return dense(fields, bias=bias, **{**usual, **changes})


def _gpt2(fields: Fields) -> ModelShape:
    positions = whole(fields, "n_positions", whole(fields, "n_ctx", 1024))
    fields = {**fields, "num_key_value_heads": None, "intermediate_size": fields.get("n_inner")}
    return _gpt(fields, fused_qkv=True, tied=True, positions=positions)


def _gpt_neox(fields: Fields) -> ModelShape:
    bias = _attention_bias(fields, default=True)
    return _gpt({**fields, "num_key_value_heads": None}, bias, mlp_bias=True, fused_qkv=True)


def _phi(fields: Fields) -> ModelShape:
    if flag(fields, "qk_layernorm", False):
        raise WrongModel("phi with qk_layernorm is not known")
    return _gpt(fields, head_bias=True, norms_per_layer=1)


def _opt(fields: Fields) -> ModelShape:
    hidden = size(fields, "hidden")
    if whole(fields, "word_embed_proj_dim", hidden) != hidden:
        raise WrongModel("opt with word_embed_proj_dim other than hidden_size is not known")
    return _gpt(
        {**fields, "num_key_value_heads": None},
        flag(fields, "enable_bias", True),
        tied=True,
        final_norm=flag(fields, "do_layer_norm_before", True) and not fields.get("_remove_final_layer_norm"),
        positions=whole(fields, "max_position_embeddings", 2048) + 2,
    )


def _starcoder2(fields: Fields) -> ModelShape:
    return _gpt(fields, flag(fields, "use_bias", True), tied=True)


def _falcon(fields: Fields) -> ModelShape:
    is_new, is_parallel = flag(fields, "new_decoder_architecture", False), flag(fields, "parallel_attn", True)
    heads = size(fields, "heads")
    keys = whole(fields, "num_kv_heads", heads) if is_new else 1 if flag(fields, "multi_query", True) else heads
    norms = whole(fields, "num_ln_in_parallel_attn", 2) if is_new else 1 if is_parallel else 2
    sizes = {**fields, "num_key_value_heads": keys, "intermediate_size": fields.get("ffn_hidden_size")}
    bias = flag(fields, "bias", False)
    return _gpt(sizes, bias, tied=True, fused_qkv=True, norms_per_layer=norms, activation="gelu")


def _nemotron(fields: Fields) -> ModelShape:
    return _gpt(fields, _attention_bias(fields), mlp_bias=flag(fields, "mlp_bias", False))


def _stablelm(fields: Fields) -> ModelShape:
    if flag(fields, "qk_layernorm", False):
        raise WrongModel("stablelm with qk_layernorm is not known")
    parallel = flag(fields, "use_parallel_residual", False)
    return dense(
        fields,
        qkv_bias=flag(fields, "use_qkv_bias", False),
        layer_norm=True,
        norm_bias=True,
        norms_per_layer=1 if parallel else 2,
    )


def _olmo(fields: Fields) -> ModelShape:
    kind = text(fields, "model_type")
    shape = dense(_with_windows(fields) if kind == "olmo3" else fields, bias=_attention_bias(fields))
    if kind == "olmo":
        return replace(shape, layer_norm=True, norm_weight=False)
    return replace(shape, qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim)


def _with_windows(fields: Fields) -> Fields:
    """Return the fields with windows in three of four layers, unless the fields have the type of each layer."""
    return fields if fields.get("layer_types") else {"sliding_window": 4096, "sliding_window_pattern": 4, **fields}


def _cohere(fields: Fields) -> ModelShape:
    sizes = _with_windows(fields) if text(fields, "model_type") == "cohere2" else fields
    shape = dense(sizes, tied=True, bias=_attention_bias(fields), layer_norm=True, norms_per_layer=1)
    if flag(fields, "use_qk_norm", False):
        shape = replace(shape, qk_norm_per_layer=(shape.heads + shape.kv_heads) * shape.head_dim)
    return shape


def _seed_oss(fields: Fields) -> ModelShape:
    return dense(
        {"head_dim": 128, **fields},
        qkv_bias=_attention_bias(fields, default=True),
        out_bias=flag(fields, "attention_out_bias", False),
        mlp_bias=flag(fields, "mlp_bias", False),
    )


def _ernie(fields: Fields) -> ModelShape:
    bias = flag(fields, "use_bias", False)
    return dense({"head_dim": 128, **fields}, tied=True, bias=bias, mlp_bias=bias)


def _glm(fields: Fields) -> ModelShape:
    sizes, norms = {"head_dim": 128, **fields}, 4 if text(fields, "model_type") == "glm4" else 2
    return dense(sizes, qkv_bias=_attention_bias(fields, default=True), fused_gate=True, norms_per_layer=norms)


def _glm4_moe(fields: Fields) -> ModelShape:
    shape = dense(fields, qkv_bias=_attention_bias(fields))
    if flag(fields, "use_qk_norm", False):
        shape = replace(shape, qk_norm_per_layer=2 * shape.head_dim)
    return _routed(fields, shape)


def _llama4(fields: Fields) -> ModelShape:
    width = size(fields, "intermediate")
    sizes = {"head_dim": 128, **fields, "intermediate_size": whole(fields, "intermediate_size_mlp", width)}
    shape = dense(sizes, bias=_attention_bias(fields))
    every, stated = whole(fields, "interleave_moe_layer_step", 1), fields.get("moe_layers")
    experts = Experts(
        total=whole(fields, "num_local_experts", 16),
        active=whole(fields, "num_experts_per_tok", 1),
        intermediate=width,
        layers=len(stated) if isinstance(stated, list) else shape.layers // every,
        shared_intermediate=width,
    )
    return replace(shape, experts=experts)


def _gpt_oss(fields: Fields) -> ModelShape:
    shape = dense({"head_dim": 64, **fields}, bias=_attention_bias(fields, default=True))
    experts = Experts(
        total=either(fields, "num_local_experts", "num_experts", 128),
        active=whole(fields, "num_experts_per_tok", whole(fields, "experts_per_token", 4)),
        intermediate=shape.intermediate,
        layers=shape.layers,
        router_bias=True,
        expert_bias=True,
    )
    return replace(shape, experts=experts, other_per_layer=shape.heads)  # a sink for each head


def _deepseek(fields: Fields) -> ModelShape:
    latent = LatentAttention(
        kv_rank=whole(fields, "kv_lora_rank", 512),
        nope_head_dim=whole(fields, "qk_nope_head_dim", 128),
        rope_head_dim=whole(fields, "qk_rope_head_dim", 64),
        value_head_dim=whole(fields, "v_head_dim", 128),
        q_rank=whole(fields, "q_lora_rank", 0),
    )
    qk_dim = latent.nope_head_dim + latent.rope_head_dim
    sizes = {**fields, "head_dim": qk_dim, "num_key_value_heads": size(fields, "heads")}
    return _routed(fields, dense(sizes, bias=_attention_bias(fields), latent=latent))


def _routed(fields: Fields, shape: ModelShape) -> ModelShape:
    """Return the shape with the experts of DeepSeek's fields, in the layers after the first dense ones."""
    first, every = whole(fields, "first_k_dense_replace", 0), whole(fields, "moe_layer_freq", 1)
    total = whole(fields, "n_routed_experts", 0)
    if not total:
        return shape
    width = whole(fields, "moe_intermediate_size")
    experts = Experts(
        total=total,
        active=whole(fields, "num_experts_per_tok"),
        intermediate=width,
        layers=sum(layer >= first and layer % every == 0 for layer in range(min(shape.layers, 10_000))),
        shared_intermediate=width * whole(fields, "n_shared_experts", 0),
    )
    notes = ("the module that predicts a further token (MTP) is not counted",)
    return replace(shape, experts=experts, notes=notes if fields.get("num_nextn_predict_layers") else ())


_READERS: dict[Callable[[Fields], ModelShape], str] = {
    _llama: "llama granite smollm3",
    _mistral: "mistral phi3 ministral3",
    _mixtral: "mixtral granitemoe",
    _qwen2: "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
    _qwen2_moe: "qwen2_moe",
    _qwen3: "qwen3 qwen3_vl_text",
    _qwen3_moe: "qwen3_moe qwen3_vl_moe_text",
    _gemma: "gemma gemma2 gemma3_text",
    _gpt2: "gpt2",
    _gpt_neox: "gpt_neox",
    _gpt_oss: "gpt_oss",
    _phi: "phi",
    _opt: "opt",
    _starcoder2: "starcoder2",
    _stablelm: "stablelm",
    _olmo: "olmo olmo2 olmo3",
    _cohere: "cohere cohere2",
    _falcon: "falcon",
    _nemotron: "nemotron",
    _seed_oss: "seed_oss",
    _ernie: "ernie4_5",
    _head_norms: "exaone4 hunyuan_v1_dense",
    _glm: "glm glm4",
    _glm4_moe: "glm4_moe",
    _llama4: "llama4_text",
    _deepseek: "deepseek_v2 deepseek_v3 kimi_k2",
}
FAMILIES = {name: read for read, names in _READERS.items() for name in names.split()}
