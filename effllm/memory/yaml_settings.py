"""Read the settings of a plan from a YAML of LLaMA-Factory, axolotl, ms-swift or accelerate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from effllm.memory.model import WrongModel
from effllm.memory.plan import MAX_COUNT
from effllm.memory.stated_fields import StatedFields, left_out, training_systems

Fields = Mapping[str, Any]
Read = tuple[dict[str, Any], list[str]]

_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_TARGETS = {
    "qv": {"q_proj", "v_proj"},
    "attention": _ATTENTION,
    "all": _ATTENTION | {"gate_proj", "up_proj", "down_proj"},
}
#: Keys of Megatron's layout, in a YAML of LLaMA-Factory or ms-swift -> settings of a plan.
_MEGATRON_LAYOUT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
    "context_parallel_size": "cp",
}
_MEGATRON = (*_MEGATRON_LAYOUT, "use_distributed_optimizer", "recompute_granularity", "use_mca", "use_megatron_bridge")


def _is_of_megatron(fields: Fields) -> bool:
    return bool([key for key in _MEGATRON if fields.get(key)])


def _megatron(fields: Fields, is_short: bool) -> dict[str, Any]:
    """Return the settings of a YAML whose training runs in Megatron; none if it has no such key."""
    if not _is_of_megatron(fields):
        return {}
    found: dict[str, Any] = {name: _whole(fields, key, 1) for key, name in _MEGATRON_LAYOUT.items()}
    granularity = fields.get("recompute_granularity")
    return found | {
        "implementation": "megatron",
        "precision": "bf16-master" if is_short else "fp32",
        "zero": 1 if fields.get("use_distributed_optimizer") else 0,
        "checkpointing": {None: "none", "full": "full"}.get(granularity, "selective"),
        "sequence_parallel": found["tp"] > 1 and bool(fields.get("sequence_parallel")),
    }


def _llama_factory(fields: Fields, deepspeed: Fields | None) -> Read:
    """Read a YAML of LLaMA-Factory.

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
        "attention": _attention(fields.get("flash_attn")),
    }
    notes = []
    if (stage := fields.get("stage")) in ("dpo", "kto", "rm", "ppo"):
        notes.append(
            f"stage {stage} is estimated as sft: a reference or reward model and pairs of answers are left out"
        )
    if kind in ("lora", "oft"):
        found["lora_rank"] = _whole(fields, "lora_rank", 8)
        found["lora_targets"] = _targets(fields, "lora_target", "all", notes)
        found["precision"] = short if is_short else "fp32"
        if kind == "oft":
            notes.append("finetuning_type oft is estimated as LoRA")
        if fields.get("quantization_bit") is not None:
            found["base_bits"] = _whole(fields, "quantization_bit", 0)
    else:
        found["precision"] = "bf16" if fields.get("pure_bf16") else f"{short}-mixed" if is_short else "fp32"
        if kind != "full":
            notes.append(f"finetuning_type {kind} is estimated as full")
    found["optimizer"] = _optimizer(fields, "optim", notes)
    if fields.get("use_muon"):
        found["optimizer"] = "muon"
    found |= _sharded(fields, deepspeed, notes)
    if deepspeed is not None and kind == "full" and is_short:
        found["precision"] = "bf16-zero"
    return found | _megatron(fields, is_short), notes


def _axolotl(fields: Fields, deepspeed: Fields | None) -> Read:
    """Read a YAML of axolotl: it loads the model in 16 bits with any ``bf16`` but false, and trains these weights."""
    adapter, is_mixed = fields.get("adapter"), bool(fields.get("fp16"))  # bfloat16 and float16 are without autocast
    short = "fp16" if is_mixed or fields.get("float16") else "bf16"
    is_short = is_mixed or bool(fields.get("float16") or fields.get("bf16", "auto") or fields.get("bfloat16"))
    attention = "flash" if fields.get("flash_attention") else "eager" if fields.get("eager_attention") else "sdpa"
    notes: list[str] = []
    found: dict[str, Any] = {
        "seq_length": _whole(fields, "sequence_len", 512),
        "micro_batch": _whole(fields, "micro_batch_size", 1),
        "accumulation": _whole(fields, "gradient_accumulation_steps", 1),
        "checkpointing": "full" if fields.get("gradient_checkpointing") else "none",
        "attention": _attention(fields.get("attn_implementation") or attention),
        "precision": f"{short}-mixed" if is_mixed and not adapter else short if is_short else "fp32",
        "optimizer": _optimizer(fields, "optimizer", notes),
        "tp": _whole(fields, "tensor_parallel_size", 1),
        "cp": _whole(fields, "context_parallel_size", _whole(fields, "sequence_parallel_degree", 1)),
        **_sharded(fields, deepspeed, notes),
    }
    if adapter:
        found["lora_rank"] = _whole(fields, "lora_r", 8)
        is_all = fields.get("lora_target_linear")
        found["lora_targets"] = "all" if is_all else _targets(fields, "lora_target_modules", "not stated", notes)
        found["base_bits"] = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else 0
    if deepspeed is not None:
        found["precision"] = f"{short}-zero" if is_short and not adapter and short == "bf16" else found["precision"]
    return found, notes


def _swift(fields: Fields, deepspeed: Fields | None) -> Read:
    usual = "full" if _is_of_megatron(fields) else "lora"
    kind = str(fields.get("tuner_type", fields.get("train_type", usual)))
    short = {"float16": "fp16", "float32": ""}.get(str(fields.get("torch_dtype")), "bf16")
    notes: list[str] = []
    found: dict[str, Any] = {
        "micro_batch": _whole(fields, "per_device_train_batch_size", _whole(fields, "micro_batch_size", 1)),
        "accumulation": _whole(fields, "gradient_accumulation_steps", 1),
        "checkpointing": "none" if fields.get("gradient_checkpointing") is False else "full",
        "attention": _attention(fields.get("attn_impl")),
        "precision": short or "fp32",
        "optimizer": _optimizer(fields, "optim", notes),
        **_sharded(fields, deepspeed, notes),
    }
    if "global_batch_size" in fields:
        found["global_batch"] = _whole(fields, "global_batch_size", 1)
    if rlhf := fields.get("rlhf_type"):
        notes.append(f"rlhf_type {rlhf} is estimated as sft: other models and pairs of answers are left out")
    if "max_length" in fields:
        found["seq_length"] = _whole(fields, "max_length", 2048)
    else:
        notes.append("max_length is not stated, so it is that of the model; the estimate has 2048: give --seq-length N")
    if kind == "full":
        found["precision"] = f"{short}-zero" if deepspeed is not None and short == "bf16" else found["precision"]
    else:
        found["lora_rank"] = _whole(fields, "lora_rank", 8)
        found["lora_targets"] = _targets(fields, "target_modules", "all", notes)
        found["base_bits"] = _whole(fields, "quant_bits", 0, 0)
        notes += [f"{kind} is estimated as LoRA"] if kind != "lora" else []
    return found | _megatron(fields, bool(short)), notes


def _accelerate(fields: Fields, deepspeed: Fields | None) -> Read:
    found: dict[str, Any] = {"gpus": _whole(fields, "num_processes", 1)}
    notes: list[str] = []
    if (mixed := fields.get("mixed_precision")) in ("bf16", "fp16"):
        found["precision"] = f"{mixed}-mixed"
    elif mixed in ("no", False):  # YAML reads an unquoted no as false
        found["precision"] = "fp32"
    elif mixed is not None:
        notes.append(f"mixed_precision {mixed} is not estimated")
    layout = _mapping(fields, "parallelism_config")
    for key, name in (("tp_size", "tp"), ("cp_size", "cp")):
        if (size := _whole(layout, f"parallelism_config_{key}", 1)) > 1:
            found[name] = size
    if _whole(layout, "parallelism_config_dp_replicate_size", 1) > 1:
        notes.append("parallelism_config_dp_replicate_size is estimated as sharding between all GPUs")
    kind = str(fields.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        found |= _sharded({"fsdp": True, "fsdp_config": _mapping(fields, "fsdp_config")}, None, notes)
    elif kind == "DEEPSPEED":
        config = _mapping(fields, "deepspeed_config")
        stage = _whole(config, "zero_stage", 2, 0)
        found |= {"zero": stage} if deepspeed is None else _sharded({}, deepspeed, notes)
        found["accumulation"] = _whole(config, "gradient_accumulation_steps", 1)
        if mixed in ("bf16", "fp16"):
            found["precision"] = "bf16-zero"
    elif kind == "MEGATRON_LM":
        config = _mapping(fields, "megatron_lm_config")
        found["tp"] = _whole(config, "megatron_lm_tp_degree", 1)
        found["pp"] = _whole(config, "megatron_lm_pp_degree", 1)
        found["implementation"] = "megatron"
        found["zero"] = 1 if config.get("megatron_lm_use_distributed_optimizer") else 0
        is_sequence_parallel = bool(config.get("megatron_lm_sequence_parallelism"))
        found["sequence_parallel"] = found["tp"] > 1 and is_sequence_parallel
        if config.get("megatron_lm_recompute_activations"):
            found["checkpointing"] = "selective"
        if mixed in ("bf16", "fp16"):
            found["precision"] = "bf16-master"
    return found, notes


def _sharded(fields: Fields, deepspeed: Fields | None, notes: list[str]) -> dict[str, Any]:
    """Return the stage of ZeRO of a config of DeepSpeed, or of ``fsdp`` and ``fsdp_config``, if there is one.

    Keys of ``fsdp_config`` may begin with ``fsdp_``.
    """
    stated = fields.get("fsdp")
    words = stated.split() if isinstance(stated, str) else stated if isinstance(stated, list) else []
    config = _mapping(fields, "fsdp_config")
    if deepspeed is not None:
        zero = _mapping(deepspeed, "zero_optimization")
        stage = _whole(zero, "stage", 0, 0)
        if stage == 3:  # which overlaps by default
            zero.get("overlap_comm")
        return {"zero": stage}
    if not stated and not config:
        return {}

    def of(name: str, default: Any) -> Any:
        return config.get(f"fsdp_{name}", config.get(name, default))

    named = [word for word in map(str, words) if word.endswith(("_shard", "_op", "_zero2"))]
    default = of("reshard_after_forward", *named[:1] or ["FULL_SHARD"])
    strategy = str(of("sharding_strategy", default)).upper()
    if strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"):
        notes.append(f"{strategy} is estimated as FULL_SHARD between all GPUs: a rank of several nodes needs more")
    if "offload" in words:
        notes.append("fsdp offload is not estimated: the estimate is without it")
    stages = {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}
    found: dict[str, Any] = {"zero": stages.get(strategy, 3)}
    return found | ({"checkpointing": "full"} if of("activation_checkpointing", False) else {})


def _attention(stated: Any) -> str:
    name = str(stated).lower()
    if "flash" in name or name in ("fa2", "fa3"):
        return "flash"
    return "eager" if name in ("eager", "disabled") else "sdpa"


def _optimizer(fields: Fields, key: str, notes: list[str]) -> str:
    stated, known = str(fields.get(key) or "adamw_torch"), training_systems()["optimizers"]
    if stated not in known:
        notes.append(f"{key} {stated} is estimated as AdamW")
    return str(known.get(stated, "adamw"))


class System(NamedTuple):
    """A training system with its own YAML."""

    name: str  # in training_systems.toml
    model: str  # the key with the name or path of the model; "": the YAML has only settings
    keys: frozenset[str]  # a YAML has one of these keys, if there are any
    read: Callable[[Fields, Fields | None], Read]


SYSTEMS = (
    System("accelerate", "", frozenset({"distributed_type", "compute_environment"}), _accelerate),
    System("llama-factory", "model_name_or_path", frozenset(), _llama_factory),
    System("axolotl", "base_model", frozenset({"sequence_len", "micro_batch_size"}), _axolotl),
    System("ms-swift", "model", frozenset({"tuner_type", "train_type", "torch_dtype", "max_length"}), _swift),
)


def system_of(fields: Fields) -> System | None:
    keys = set(fields)
    return next((one for one in SYSTEMS if {one.model} - {""} <= keys and (not one.keys or one.keys & keys)), None)


def read_yaml(system: System, fields: Fields, deepspeed: Fields | None = None) -> Read:
    """Return the settings of a plan, and notes: what is estimated as another setting, or not in the estimate.

    Raises:
        WrongModel: a number is not possible.
    """
    stated, stages = StatedFields(fields), StatedFields(deepspeed or {})
    found, notes = system.read(stated, None if deepspeed is None else stages)
    return found, [*notes, *left_out([*stated.unread(system.name), *stages.unread(system.name)])]


def _targets(fields: Fields, key: str, default: str, notes: list[str]) -> str:
    stated = fields.get(key) or default
    names = {str(name).strip() for name in (stated if isinstance(stated, list) else str(stated).split(","))}
    found = next((name for name, matrices in _TARGETS.items() if names <= matrices), "all")
    if names not in ({"all"}, {"all-linear"}, _TARGETS[found]):
        notes.append(f"{key} {', '.join(sorted(names))} is estimated as --lora-targets {found}")
    return found


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
    if not lowest <= value <= MAX_COUNT:
        raise WrongModel(f"{key} is {value}: a number from {lowest} to {MAX_COUNT:,} is possible")
    return value
