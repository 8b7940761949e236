"""Read the settings of a plan from a YAML of LLaMA-Factory or accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effllm.memory.model import WrongModel

Fields = Mapping[str, Any]

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "sgd": "sgd",
}


def is_llama_factory(fields: Fields) -> bool:
    return "model_name_or_path" in fields


def is_accelerate(fields: Fields) -> bool:
    return "distributed_type" in fields or "compute_environment" in fields


def llama_factory_settings(fields: Fields, deepspeed: Fields | None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a LLaMA-Factory YAML, and what of it is not estimated.

    LLaMA-Factory loads the model in the precision of the products, and trains weights or adapters in 32 bits unless
    ``pure_bf16`` is set; it checkpoints activations unless ``disable_gradient_checkpointing`` is set.
    """
    kind = str(fields.get("finetuning_type", "lora"))
    short = "fp16" if fields.get("fp16") else "bf16"
    is_short = bool(fields.get("bf16") or fields.get("fp16") or fields.get("pure_bf16"))
    found: dict[str, Any] = {
        "seq_length": _whole(fields, "cutoff_len", 2048),
        "micro_batch": _whole(fields, "per_device_train_batch_size", 8),
        "accumulation": _whole(fields, "gradient_accumulation_steps", 1),
        "checkpointing": "none" if fields.get("disable_gradient_checkpointing") else "full",
        "attention": "eager" if fields.get("flash_attn") == "disabled" else "sdpa",
    }
    notes = [f"{key} is not estimated" for key in ("use_galore", "use_badam", "use_apollo") if fields.get(key)]
    if kind == "lora":
        found["lora_rank"] = _whole(fields, "lora_rank", 8)
        found["lora_targets"] = _targets(fields.get("lora_target", "all"))
        found["precision"] = short if is_short else "fp32"
        if bits := fields.get("quantization_bit"):
            found["base_bits"] = bits
    else:
        found["precision"] = "bf16" if fields.get("pure_bf16") else f"{short}-mixed" if is_short else "fp32"
        if kind != "full":
            notes.append(f"finetuning_type {kind} is estimated as full")
    stated = str(fields.get("optim", "adamw_torch"))
    found["optimizer"] = _OPTIMIZERS.get(stated, "adamw")
    if stated not in _OPTIMIZERS:
        notes.append(f"optim {stated} is estimated as AdamW")
    if deepspeed is not None:
        found["zero"] = _whole(_mapping(deepspeed, "zero_optimization"), "stage", 0)
        if kind == "full" and is_short:
            found["precision"] = "bf16-zero"
    return found, notes


def accelerate_settings(fields: Fields) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of an accelerate YAML, and what of it is not estimated."""
    found: dict[str, Any] = {"gpus": _whole(fields, "num_processes", 1)}
    notes: list[str] = []
    if (mixed := fields.get("mixed_precision")) in ("bf16", "fp16"):
        found["precision"] = f"{mixed}-mixed"
    elif mixed == "no":
        found["precision"] = "fp32"
    kind = str(fields.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        config = _mapping(fields, "fsdp_config")
        strategy = str(config.get("fsdp_sharding_strategy", config.get("fsdp_reshard_after_forward", "FULL_SHARD")))
        found["zero"] = {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}.get(strategy.upper(), 3)
        if config.get("fsdp_activation_checkpointing"):
            found["checkpointing"] = "full"
        if config.get("fsdp_offload_params"):
            notes.append("fsdp_offload_params is not estimated: the estimate is without it")
    elif kind == "DEEPSPEED":
        config = _mapping(fields, "deepspeed_config")
        found["zero"] = _whole(config, "zero_stage", 2)
        found["accumulation"] = _whole(config, "gradient_accumulation_steps", 1)
        if mixed in ("bf16", "fp16"):
            found["precision"] = "bf16-zero"
        notes += [
            f"{key} {config[key]} is not estimated: the estimate is without it"
            for key in ("offload_optimizer_device", "offload_param_device")
            if config.get(key) not in (None, "none")
        ]
    elif kind == "MEGATRON_LM":
        config = _mapping(fields, "megatron_lm_config")
        found["tp"] = _whole(config, "megatron_lm_tp_degree", 1)
        found["pp"] = _whole(config, "megatron_lm_pp_degree", 1)
        found["implementation"] = "megatron"
    return found, notes


def _targets(stated: Any) -> str:
    names = {name.strip() for name in (stated if isinstance(stated, list) else str(stated).split(","))}
    if names <= {"q_proj", "v_proj"}:
        return "qv"
    return "attention" if names <= {"q_proj", "k_proj", "v_proj", "o_proj"} else "all"


def _mapping(fields: Fields, key: str) -> Fields:
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


def _whole(fields: Fields, key: str, default: int) -> int:
    value = fields.get(key, default)
    if isinstance(value, str) and value.isdigit():
        return int(value)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {value!r}, not a whole number")
    return value
