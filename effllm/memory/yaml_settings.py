"""Read the settings of a plan from a YAML of LLaMA-Factory, axolotl, ms-swift or accelerate."""

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

#: Options of LLaMA-Factory that change the memory, and that no plan has.
_NOT_ESTIMATED = (
    *("use_galore", "use_badam", "use_apollo", "use_adam_mini", "use_llama_pro", "use_dora", "use_unsloth"),
    *(
        "use_unsloth_gc",
        "enable_liger_kernel",
        "mixture_of_depths",
        "fp8",
        "use_kt",
        "virtual_pipeline_model_parallel_size",
    ),
    *("use_hyper_parallel", "cp_size", "additional_target", "ref_model", "reward_model", "use_asft_loss", "shift_attn"),
    *("freeze_vision_tower", "freeze_language_model", "fsdp"),
)


#: Keys of Megatron's layout, in a YAML of LLaMA-Factory or ms-swift -> settings of a plan.
_MEGATRON_LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
}
_MEGATRON = (*_MEGATRON_LAYOUT, "use_distributed_optimizer", "recompute_granularity", "use_mca", "use_megatron_bridge")


def megatron_settings(fields: Fields) -> dict[str, Any]:
    """Return the settings of a YAML whose training runs in Megatron; none if it has no such key."""
    if not any(fields.get(key) for key in _MEGATRON):
        return {}
    found: dict[str, Any] = {name: _whole(fields, key, 1) for key, name in _MEGATRON_LAYOUT.items()}
    granularity = fields.get("recompute_granularity")
    is_short = bool(fields.get("bf16") or fields.get("fp16"))
    return found | {
        "implementation": "megatron",
        "precision": "bf16-master" if is_short else "fp32",
        "zero": 1 if fields.get("use_distributed_optimizer") else 0,
        "checkpointing": {None: "none", "full": "full"}.get(granularity, "selective"),
        "sequence_parallel": found["tp"] > 1 and bool(fields.get("sequence_parallel")),
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
    notes = [f"{key} is not estimated: the estimate is without it" for key in _NOT_ESTIMATED if fields.get(key)]
    if (stage := fields.get("stage")) in ("dpo", "kto", "rm", "ppo"):
        notes.append(
            f"stage {stage} is estimated as sft: a reference or reward model and pairs of answers are left out"
        )
    if kind in ("lora", "oft"):
        found["lora_rank"] = _whole(fields, "lora_rank", 8)
        found["lora_targets"] = _targets(fields.get("lora_target", "all"))
        found["precision"] = short if is_short else "fp32"
        if kind == "oft":
            notes.append("finetuning_type oft is estimated as LoRA")
        if fields.get("quantization_bit") is not None:
            found["base_bits"] = _whole(fields, "quantization_bit", 0)
    else:
        found["precision"] = "bf16" if fields.get("pure_bf16") else f"{short}-mixed" if is_short else "fp32"
        if kind != "full":
            notes.append(f"finetuning_type {kind} is estimated as full")
    stated = str(fields.get("optim", "adamw_torch"))
    found["optimizer"] = "muon" if fields.get("use_muon") else _OPTIMIZERS.get(stated, "adamw")
    if stated not in _OPTIMIZERS:
        notes.append(f"optim {stated} is estimated as AdamW")
    if deepspeed is not None:
        found["zero"] = _zero_stage(deepspeed, notes)
        if kind == "full" and is_short:
            found["precision"] = "bf16-zero"
    return found | megatron_settings(fields), notes


#: Options of axolotl that change the memory, and that no plan has.
_NOT_OF_AXOLOTL = (
    "unfrozen_parameters",
    "lora_modules_to_save",
    "plugins",
    "qat",
    "fp8",
    "rl",
    "peft_use_dora",
    "relora",
)


def is_axolotl(fields: Fields) -> bool:
    return "base_model" in fields and bool({"sequence_len", "micro_batch_size"} & set(fields))


def axolotl_settings(fields: Fields, deepspeed: Fields | None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a YAML of axolotl, and what of it is not estimated.

    axolotl loads the model in 16 bits with ``bf16: true``, ``auto`` or ``full``, and trains these weights.
    """
    adapter, short = fields.get("adapter"), "fp16" if fields.get("fp16") else "bf16"
    is_short = bool(fields.get("bf16") or fields.get("bfloat16") or fields.get("fp16"))
    stated = str(fields.get("optimizer", "adamw_torch_fused"))
    found: dict[str, Any] = {
        "seq_length": _whole(fields, "sequence_len", 512),
        "micro_batch": _whole(fields, "micro_batch_size", 1),
        "accumulation": _whole(fields, "gradient_accumulation_steps", 1),
        "checkpointing": "full" if fields.get("gradient_checkpointing") else "none",
        "attention": "flash" if fields.get("flash_attention") else "eager" if fields.get("eager_attention") else "sdpa",
        "precision": short if is_short and (adapter or short == "bf16") else f"{short}-mixed" if is_short else "fp32",
        "optimizer": _OPTIMIZERS.get(stated, "adamw"),
        "tp": _whole(fields, "tensor_parallel_size", 1),
        "cp": _whole(fields, "context_parallel_size", _whole(fields, "sequence_parallel_degree", 1)),
    }
    notes = [f"{key} is not estimated: the estimate is without it" for key in _NOT_OF_AXOLOTL if fields.get(key)]
    notes += [f"optimizer {stated} is estimated as AdamW"] if stated not in _OPTIMIZERS else []
    if adapter:
        found["lora_rank"] = _whole(fields, "lora_r", 8)
        found["lora_targets"] = (
            "all" if fields.get("lora_target_linear") else _targets(fields.get("lora_target_modules"))
        )
        found["base_bits"] = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else 0
    if deepspeed is not None:
        found["zero"] = _zero_stage(deepspeed, notes)
        found["precision"] = f"{short}-zero" if is_short and not adapter and short == "bf16" else found["precision"]
    elif fields.get("fsdp") or fields.get("fsdp_config"):
        config = _mapping(fields, "fsdp_config")
        found["zero"] = 2 if config.get("reshard_after_forward") is False else 3
        if config.get("offload_params") or config.get("fsdp_offload_params"):
            notes.append("offload_params is not estimated: the estimate is without it")
    return found, notes


def is_swift(fields: Fields) -> bool:
    return "model" in fields and bool({"tuner_type", "train_type", "torch_dtype", "max_length"} & set(fields))


def swift_settings(fields: Fields, deepspeed: Fields | None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a YAML of ms-swift, and what of it is not estimated."""
    usual = "full" if any(fields.get(key) for key in _MEGATRON) else "lora"
    kind = str(fields.get("tuner_type", fields.get("train_type", usual)))
    short = {"float16": "fp16", "float32": ""}.get(str(fields.get("torch_dtype")), "bf16")
    found: dict[str, Any] = {
        "micro_batch": _whole(fields, "per_device_train_batch_size", _whole(fields, "micro_batch_size", 1)),
        "accumulation": _whole(fields, "gradient_accumulation_steps", 1),
        "checkpointing": "none" if fields.get("gradient_checkpointing") is False else "full",
        "attention": {"flash_attn": "flash", "flash_attention_2": "flash", "eager": "eager"}.get(
            str(fields.get("attn_impl")), "sdpa"
        ),
        "precision": short or "fp32",
    }
    if "global_batch_size" in fields:
        found["global_batch"] = _whole(fields, "global_batch_size", 1)
    notes = [
        f"{key} is not estimated" for key in ("rlhf_type", "use_liger_kernel", "modules_to_save") if fields.get(key)
    ]
    if "max_length" in fields:
        found["seq_length"] = _whole(fields, "max_length", 2048)
    else:
        notes.append("max_length is not stated, so it is that of the model; the estimate has 2048: give --seq-length N")
    if kind == "full":
        found["precision"] = f"{short}-zero" if deepspeed is not None and short == "bf16" else found["precision"]
    else:
        found["lora_rank"] = _whole(fields, "lora_rank", 8)
        found["lora_targets"] = _targets(fields.get("target_modules", "all-linear"))
        found["base_bits"] = _whole(fields, "quant_bits", 0, 0)
        notes += [f"{kind} is estimated as LoRA"] if kind != "lora" else []
    if deepspeed is not None:
        found["zero"] = _zero_stage(deepspeed, notes)
    return found | megatron_settings({"bf16": short, **fields}), notes


def accelerate_settings(fields: Fields, deepspeed: Fields | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of an accelerate YAML, and what of it is not estimated."""
    found: dict[str, Any] = {"gpus": _whole(fields, "num_processes", 1)}
    notes: list[str] = []
    if (mixed := fields.get("mixed_precision")) in ("bf16", "fp16"):
        found["precision"] = f"{mixed}-mixed"
    elif mixed in ("no", False):  # YAML reads an unquoted no as false
        found["precision"] = "fp32"
    elif mixed is not None:
        notes.append(f"mixed_precision {mixed} is not estimated")
    layout = _mapping(fields, "parallelism_config")
    for key, name in (("tp_size", "tp"), ("cp_size", "cp"), ("dp_replicate_size", ""), ("dp_shard_size", "")):
        size = _whole(layout, f"parallelism_config_{key}", 1)
        if name and size > 1:
            found[name] = size
        elif size > 1 and key == "dp_replicate_size":
            notes.append("parallelism_config_dp_replicate_size is estimated as sharding between all GPUs")
    kind = str(fields.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        config = _mapping(fields, "fsdp_config")
        strategy = str(config.get("fsdp_sharding_strategy", config.get("fsdp_reshard_after_forward", "FULL_SHARD")))
        found["zero"] = {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}.get(strategy.upper(), 3)
        if strategy.upper() in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"):
            notes.append(f"{strategy} is estimated as FULL_SHARD between all GPUs: a rank of several nodes needs more")
        if config.get("fsdp_activation_checkpointing"):
            found["checkpointing"] = "full"
        if config.get("fsdp_offload_params"):
            notes.append("fsdp_offload_params is not estimated: the estimate is without it")
    elif kind == "DEEPSPEED":
        config = _mapping(fields, "deepspeed_config")
        found["zero"] = _whole(config, "zero_stage", 2, 0) if deepspeed is None else _zero_stage(deepspeed, notes)
        found["accumulation"] = _whole(config, "gradient_accumulation_steps", 1)
        if mixed in ("bf16", "fp16"):
            found["precision"] = "bf16-zero"
        notes += _offloads(config, "offload_optimizer_device", "offload_param_device")
    elif kind == "MEGATRON_LM":
        config = _mapping(fields, "megatron_lm_config")
        found["tp"] = _whole(config, "megatron_lm_tp_degree", 1)
        found["pp"] = _whole(config, "megatron_lm_pp_degree", 1)
        found["implementation"] = "megatron"
        found["zero"] = 1 if config.get("megatron_lm_use_distributed_optimizer") else 0
        found["sequence_parallel"] = found["tp"] > 1 and bool(config.get("megatron_lm_sequence_parallelism"))
        if config.get("megatron_lm_recompute_activations"):
            found["checkpointing"] = "selective"
        if mixed in ("bf16", "fp16"):
            found["precision"] = "bf16-master"
    return found, notes


def _zero_stage(deepspeed: Fields, notes: list[str]) -> int:
    """Return the stage of ZeRO in a config of DeepSpeed, and add what of it is not estimated."""
    zero = _mapping(deepspeed, "zero_optimization")
    notes += _offloads(zero, "offload_optimizer", "offload_param")
    notes += [f"{key} of DeepSpeed is not estimated" for key in ("tensor_parallel", "fp8") if deepspeed.get(key)]
    return _whole(zero, "stage", 0, 0)


def _offloads(config: Fields, *keys: str) -> list[str]:
    """Return the notes of memory that is moved to CPU or NVMe; DeepSpeed states a device, or a mapping with it."""
    devices = {key: config.get(key) for key in keys}
    stated = {key: one.get("device") if isinstance(one, Mapping) else one for key, one in devices.items()}
    return [
        f"{key} {device} is not estimated: the estimate is without it"
        for key, device in stated.items()
        if device not in (None, "none")
    ]


def _targets(stated: Any) -> str:
    names = {name.strip() for name in (stated if isinstance(stated, list) else str(stated).split(","))}
    if names <= {"q_proj", "v_proj"}:
        return "qv"
    return "attention" if names <= {"q_proj", "k_proj", "v_proj", "o_proj"} else "all"


def _mapping(fields: Fields, key: str) -> Fields:
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


def _whole(fields: Fields, key: str, default: int, lowest: int = 1) -> int:
    value = fields.get(key, default)
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        value = int(value)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {str(value)[:40]!r}, not a whole number")
    if value < lowest:
        raise WrongModel(f"{key} is {value}: a number from {lowest} is possible")
    return value
