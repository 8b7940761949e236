"""The settings that determine the memory of a training, read from its model and its optimizer.

The fact ``framework_plan`` has them as words such as ``precision=bf16``, named as in the fact ``memory_plan`` of a
script.  A setting that the objects do not show is left out.  If the settings cannot describe a training, all are.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from effllm.hooks._parameters import config_of, size_of, unwrapped
from effllm.hooks._wrap import Guard

#: At least this share of the elements has the type of the weights; norms and routers may have another type.
MAIN_SHARE = 0.99
_TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
#: Type of the weights, type of autocast -> precision.  Autocast casts no weights that have its type.
_PRECISIONS = {
    ("fp32", None): "fp32",
    ("fp32", "bf16"): "bf16-mixed",
    ("fp32", "fp16"): "fp16-mixed",
    ("bf16", None): "bf16",
    ("bf16", "bf16"): "bf16",
    ("fp16", None): "fp16",
}
_QUANTIZED = {"Params4bit": 4, "Int8Params": 8}
_ATTENTION = {"sdpa": "sdpa", "eager": "eager", "flash_attention_2": "flash", "flash_attention_3": "flash"}
#: Name of a module that can have an adapter -> the matrices of it.
_MATRICES = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o", "out_proj": "o", "dense": "o", "attn.c_proj": "o",
    "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv",
    "gate_proj": "mlp", "up_proj": "mlp", "down_proj": "mlp", "gate_up_proj": "mlp", "fc1": "mlp", "fc2": "mlp",
    "c_fc": "mlp", "mlp.c_proj": "mlp", "dense_h_to_4h": "mlp", "dense_4h_to_h": "mlp",
}  # fmt: skip
_TARGETS = {
    frozenset(("q", "v")): "qv",
    frozenset(("qkv",)): "qv",
    frozenset(("q", "k", "v", "o")): "attention",
    frozenset(("qkv", "o")): "attention",
    frozenset(("q", "k", "v", "o", "mlp")): "all",
    frozenset(("qkv", "o", "mlp")): "all",
}


class NoPlan(Exception):
    """The settings of a plan cannot describe this training."""


def plan_text(settings: Mapping[str, Any]) -> str:
    """Return the settings as words; those that are ``None`` are left out."""
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
    return " ".join(f"{name}={value}" for name, value in words.items() if value is not None)


def stated_plan(guard: Guard, settings: Callable[..., Mapping[str, Any]], *objects: Any) -> str:
    """Return the settings that a function reads from objects, as words; empty if they cannot describe the training."""

    def text() -> str:
        try:
            return plan_text(settings(*objects))
        except NoPlan:
            return ""

    return guard(text) or ""


def world_size() -> int:
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    known = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if known else 1


def type_of_weights(model: Any) -> str | None:
    """Return the type of the first weight; the name of torch if it has no short name."""
    kind = next((str(one.dtype) for one in model.parameters() if one.is_floating_point()), None) if model else None
    return _TYPES.get(kind, kind) if kind else None


def precision_of(kind: str | None, autocast: str | None) -> str | None:
    """Return the precision of weights of a type; ``None`` if it is not known."""
    return _PRECISIONS.get((kind or "", autocast))


def optimizer_name(optimizer: Any) -> str | None:
    """Return the name of an optimizer, which may be wrapped; ``None`` if its states are not known."""
    for _ in range(4):
        optimizer = getattr(optimizer, "optimizer", None) or optimizer
    kind, package = type(optimizer).__name__, type(optimizer).__module__.partition(".")[0]
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", None) or [{}]
    if package == "bitsandbytes":
        return _of_bitsandbytes(optimizer, kind, groups)
    if kind in ("Adam", "AdamW") and package == "torch":
        return None if any(one.get("amsgrad") for one in groups) else "adamw"
    if kind == "SGD" and package == "torch":
        momenta = {bool(one.get("momentum")) for one in groups}
        return None if len(momenta) > 1 else "sgd-momentum" if momenta == {True} else "sgd"
    if kind == "Adafactor" and package in ("torch", "transformers"):
        return None if any(one.get("beta1") is not None for one in groups) else "adafactor"
    return {("deepspeed", "FusedAdam"): "adamw", ("apex", "FusedAdam"): "adamw", ("lion_pytorch", "Lion"): "lion"}.get(
        (package, kind)
    )


def _of_bitsandbytes(optimizer: Any, kind: str, groups: list[dict[str, Any]]) -> str | None:
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    if getattr(optimizer, "is_paged", True):  # torch's allocator does not have paged states
        return None
    if bits == 8:
        return "adamw-8bit" if kind.startswith("Adam") else None
    is_long = all(str(one.dtype) == "torch.float32" for group in groups for one in group.get("params", ()))
    names = {"Adam": "adamw", "AdamW": "adamw", "Lion": "lion"}
    return names.get(kind.removesuffix("32bit")) if bits == 32 and is_long else None


def is_language_model(model: Any) -> bool:
    """Whether this is a language model of transformers, perhaps with adapters."""
    inner = unwrapped(model)
    base = inner.get_base_model() if hasattr(inner, "peft_config") else inner
    return type(base).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def layer_settings(model: Any) -> dict[str, str]:
    """Return checkpointing and attention of a language model of transformers.

    Raises:
        NoPlan: they are others than those of a plan, or the model is on several devices.
    """
    inner = unwrapped(model)
    base = inner.get_base_model() if hasattr(inner, "peft_config") else inner
    if len(set((getattr(base, "hf_device_map", None) or {}).values())) > 1:
        raise NoPlan("several devices of a process")
    return {"checkpointing": checkpointing_of(model), "attention": attention_of(model)}


def attention_of(model: Any) -> str:
    """Return the attention of a model of transformers.

    Raises:
        NoPlan: it is another one.
    """
    stated = getattr(config_of(model), "_attn_implementation", None)
    if stated not in _ATTENTION:
        raise NoPlan("attention")
    return _ATTENTION[stated]


def checkpointing_of(model: Any) -> str:
    """Return whether a model of transformers keeps the activations of no layer or recomputes those of all layers.

    Raises:
        NoPlan: only some layers are checkpointed.
    """
    flagged = [one for one in model.modules() if hasattr(one, "gradient_checkpointing")]
    layers = [one for one in flagged if any(k.__name__ == "GradientCheckpointingLayer" for k in type(one).__mro__)]
    flags = {bool(one.gradient_checkpointing) for one in layers or flagged}
    if len(flags) > 1:
        raise NoPlan("some layers are checkpointed")
    return "full" if True in flags else "none"


def weights_of(model: Any, autocast: str | None) -> dict[str, Any]:
    """Return precision, adapters and bits of the base of a model whose weights are all trained, or only its adapters.

    Raises:
        NoPlan: other weights are trained.
    """
    kinds: Counter[str] = Counter()
    trained = total = adapters = bits = 0
    for name, one in model.named_parameters():
        size = size_of(one)
        total += size
        trained += size if one.requires_grad else 0
        if ".lora_" in name:
            adapters += size
        elif found := _QUANTIZED.get(type(one).__name__):
            bits = found
        else:
            kinds[str(one.dtype)] += size
    found_lora = lora_of(model)
    if trained < MAIN_SHARE * total if not found_lora else trained != adapters:
        raise NoPlan("some weights are frozen")
    if not bits and getattr(getattr(unwrapped(model), "config", None), "quantization_config", None) is not None:
        raise NoPlan("another quantization")
    kind, size = kinds.most_common(1)[0]
    main = _TYPES.get(kind) if size >= MAIN_SHARE * sum(kinds.values()) else None
    return {"precision": precision_of(main, autocast), **found_lora, **({"base_bits": bits} if bits else {})}


def lora_of(model: Any) -> dict[str, Any]:
    """Return rank and targets of the adapters of PEFT; an empty mapping without adapters.

    Raises:
        NoPlan: the adapters are not LoRA, or not on a known set of all layers.
    """
    known = getattr(unwrapped(model), "peft_config", None)
    if known is None:
        return {}
    configs = list(known.values()) if isinstance(known, Mapping) else []
    if len(configs) != 1 or getattr(configs[0].peft_type, "value", configs[0].peft_type) != "LORA":
        raise NoPlan("other adapters")
    one = configs[0]
    others = ("use_dora", "rank_pattern", "modules_to_save", "target_parameters", "trainable_token_indices")
    if getattr(one, "bias", "none") != "none" or any(getattr(one, name, None) for name in others):
        raise NoPlan("more than LoRA")
    return {"lora_rank": int(one.r), "lora_targets": _targets(model)}


def _targets(model: Any) -> str:
    adapted: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    for name, module in model.named_modules():
        words = name.split(".")
        matrix = _MATRICES.get(words[-1]) or _MATRICES.get(".".join(words[-2:]))
        has_adapter = hasattr(module, "lora_A")
        if has_adapter and (matrix is None or "experts" in words):
            raise NoPlan("an adapter of another module")
        if matrix is not None and "experts" not in words:
            (adapted if has_adapter else plain)[matrix] += 1
    found = _TARGETS.get(frozenset(adapted))
    if found is None or adapted.keys() & plain.keys():
        raise NoPlan("other targets")
    return found
