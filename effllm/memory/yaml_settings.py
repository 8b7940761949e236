"""Read the settings of a plan from a YAML of LLaMA-Factory, axolotl, ms-swift or accelerate.

The fields of a file remember what was read of them, for the note of the other ones.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from effllm.memory.plan import MAX_COUNT, WrongModel

Fields = Mapping[str, Any]
SettingsAndNotes = tuple[dict[str, Any], list[str]]

#: Keys of a training in Megatron, in a YAML of LLaMA-Factory or ms-swift, beside its sizes.
_MEGATRON = ("use_distributed_optimizer", "recompute_granularity", "use_mca", "use_megatron_bridge")

_OFF = ("none", "no", "false", "off", "null", "auto", "[]")  # values of a setting, in small letters; and zeros


class StatedFields(Mapping[str, Any]):
    """Fields that remember which of them were read, also by ``in``; mappings in them do likewise."""

    def __init__(self, fields: Mapping[Any, Any]) -> None:
        self._fields: dict[str, Any] = {
            str(key): StatedFields(value) if isinstance(value, Mapping) else value for key, value in fields.items()
        }
        self._read: set[str] = set()  # keys that were read

    def __getitem__(self, key: str) -> Any:
        value = self._fields[key]
        self._read.add(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def unread(self, system: str, path: str = "") -> Iterator[str]:
        """Yield the unread keys that are on, or off against their default, and may change the memory, as paths."""
        for key, value in self._fields.items():
            named = f"{path}{key}"
            if isinstance(value, StatedFields):
                inside = [] if _is_off(value._fields.get("enabled", True)) else list(value.unread(system, f"{named}."))
                if key in self._read:
                    yield from inside
                elif inside and not _is_without_effect(system, named, ""):
                    yield named
            elif key not in self._read:
                is_unusual = _is_off(value) == (key in training_systems()["on_by_default"])  # or off, but by default on
                if is_unusual and not _is_without_effect(system, named, str(value)):
                    yield named


def note_of_left_out(unread: Iterable[str]) -> list[str]:
    """Return a list with the note of the settings that the estimate does not contain; empty without such settings."""
    *names, last = dict.fromkeys(unread) or [""]
    return [f"not in the estimate: {', '.join(names)}{' and ' if names else ''}{last}"] if last else []


def _is_off(value: Any) -> bool:
    return (text := str(value).lower()) in _OFF or re.fullmatch(r"0(\.0*)?", text) is not None


def _is_without_effect(system: str, path: str, value: str) -> bool:
    named = path.replace("-", "_").lower()
    return any(_no_effect_pattern(system).fullmatch(f"{key}={value.lower()}") for key in (named, named.split(".")[-1]))


@cache
def _no_effect_pattern(system: str) -> re.Pattern[str]:
    data = training_systems()
    names = [name.lower() for table in data["systems"][system] for name in data["without_effect"][table]]
    return re.compile("|".join(fnmatch.translate(name if "=" in name else f"{name}=*") for name in names))


@cache
def training_systems() -> dict[str, Any]:
    return msgspec.toml.decode(Path(__file__).with_name("training_systems.toml").read_bytes(), type=dict[str, Any])


def _megatron_settings(fields: Fields, has_16_bits: bool) -> dict[str, Any]:
    """Return the settings of a training in Megatron; none if no key states one."""
    sizes = training_systems()["names"]["megatron"]
    if not [key for key in (*(key for key, _ in sizes.values()), *_MEGATRON) if fields.get(key)]:
        return {}
    settings: dict[str, Any] = {name: _whole_number(fields, *size) for name, size in sizes.items()}
    granularity = fields.get("recompute_granularity")
    return settings | {
        "implementation": "megatron",
        "precision": "bf16-master" if has_16_bits else "fp32",
        "zero": 1 if fields.get("use_distributed_optimizer") else 0,
        "checkpointing": {None: "none", "full": "full"}.get(granularity, "selective"),
        "sequence_parallel": settings["tp"] > 1 and bool(fields.get("sequence_parallel")),
    }


class _Training(NamedTuple):
    """What a YAML states of the kind of a training."""

    has_adapters: bool
    short: str  # the type of 16 bits: bf16 or fp16; "": everything in 32 bits
    is_autocast: bool  # of weights in 32 bits, without adapters
    is_checkpointed: bool
    base_bits: int
    notes: list[str]


def _llama_factory(fields: Fields) -> _Training:
    """Read a YAML of LLaMA-Factory: it trains weights or adapters in 32 bits unless ``pure_bf16`` is set."""
    kind, stage, notes = str(fields.get("finetuning_type", "lora")), fields.get("stage"), []
    has_adapters = kind in ("lora", "oft")
    if kind not in ("lora", "full"):
        notes.append(f"finetuning_type {kind} is estimated as {'LoRA' if has_adapters else 'full'}")
    if stage in ("dpo", "kto", "rm", "ppo"):
        notes.append(f"stage {stage} is estimated as sft: other models and pairs of answers are left out")
    short = "fp16" if fields.get("fp16") else "bf16" if fields.get("bf16") or fields.get("pure_bf16") else ""
    is_autocast = not has_adapters and not fields.get("pure_bf16")
    bits = _whole_number(fields, "quantization_bit", 0) if has_adapters else 0
    is_checkpointed = not fields.get("disable_gradient_checkpointing")
    return _Training(has_adapters, short, is_autocast, is_checkpointed, bits, notes)


def _axolotl(fields: Fields) -> _Training:
    """Read a YAML of axolotl: it loads the model in 16 bits with any ``bf16`` but false, and trains these weights."""
    has_adapters, is_mixed = bool(fields.get("adapter")), bool(fields.get("fp16"))  # the others are without autocast
    has_16_bits = fields.get("bf16", "auto") or fields.get("bfloat16")
    short = "fp16" if is_mixed or fields.get("float16") else "bf16" if has_16_bits else ""
    bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else 0
    return _Training(has_adapters, short, is_mixed, bool(fields.get("gradient_checkpointing")), bits, [])


def _ms_swift(fields: Fields) -> _Training:
    usual = "full" if _megatron_settings(fields, True) else "lora"
    kind = str(fields.get("tuner_type", fields.get("train_type", usual)))
    notes = [f"{kind} is estimated as LoRA"] if kind not in ("lora", "full") else []
    if rlhf := fields.get("rlhf_type"):
        notes.append(f"rlhf_type {rlhf} is estimated as sft: other models and pairs of answers are left out")
    if "max_length" not in fields:
        notes.append("max_length is not stated, so it is that of the model; the estimate has 2048: give --seq-length N")
    short = {"float16": "fp16", "float32": ""}.get(str(fields.get("torch_dtype")), "bf16")
    is_checkpointed = fields.get("gradient_checkpointing") is not False
    bits = _whole_number(fields, "quant_bits", 0, 0) if kind != "full" else 0
    return _Training(kind != "full", short, False, is_checkpointed, bits, notes)


_READERS = {"llama-factory": _llama_factory, "axolotl": _axolotl, "ms-swift": _ms_swift}


def _read_training(system: str, fields: Fields, deepspeed: Fields | None) -> SettingsAndNotes:
    """Read a YAML of a training, with the names of its system for numbers and choices."""
    names, training = training_systems()["names"][system], _READERS[system](fields)
    notes, has_adapters, short = training.notes, training.has_adapters, training.short
    settings: dict[str, Any] = {name: _first_number(fields, keys) for name, keys in names["numbers"].items()}
    by_flags = "flash" if fields.get("flash_attention") else "eager" if fields.get("eager_attention") else "sdpa"
    attention = str(fields.get(names["attention"]) or by_flags).lower()
    is_flash, is_eager = "flash" in attention or attention in ("fa2", "fa3"), attention in ("eager", "disabled")
    optimizer = str(fields.get(names["optimizer"]) or "adamw_torch")
    if optimizer not in training_systems()["optimizers"]:
        notes.append(f"{names['optimizer']} {optimizer} is estimated as AdamW")
    optimizer = "muon" if fields.get("use_muon") else training_systems()["optimizers"].get(optimizer, "adamw")
    settings |= {
        "checkpointing": "full" if training.is_checkpointed else "none",
        "attention": "flash" if is_flash else "eager" if is_eager else "sdpa",
        "precision": f"{short}-mixed" if short and training.is_autocast and not has_adapters else short or "fp32",
        "optimizer": optimizer,
        **_zero_settings(fields, deepspeed, notes),
    }
    if has_adapters:
        is_all = fields.get("lora_target_linear")
        settings["lora_targets"] = "all" if is_all else _lora_targets(fields, names["lora_targets"], notes)
        settings |= {"lora_rank": _first_number(fields, names["lora_rank"]), "base_bits": training.base_bits}
    elif deepspeed is not None and short:
        settings["precision"] = "bf16-zero"
    return settings | (_megatron_settings(fields, bool(short)) if system != "axolotl" else {}), notes


def _read_accelerate(fields: Fields, deepspeed: Fields | None) -> SettingsAndNotes:
    values: dict[str, Any] = {"gpus": _whole_number(fields, "num_processes", 1)}
    notes: list[str] = []
    if (mixed := fields.get("mixed_precision")) in ("bf16", "fp16", "no", False):  # YAML reads an unquoted no as false
        values["precision"] = f"{mixed}-mixed" if mixed in ("bf16", "fp16") else "fp32"
    elif mixed is not None:
        notes.append(f"mixed_precision {mixed} is not estimated")
    layout = _mapping(fields, "parallelism_config")
    for key, name in (("tp_size", "tp"), ("cp_size", "cp")):
        if (size := _whole_number(layout, f"parallelism_config_{key}", 1)) > 1:
            values[name] = size
    if _whole_number(layout, "parallelism_config_dp_replicate_size", 1) > 1:
        notes.append("parallelism_config_dp_replicate_size is estimated as sharding between all GPUs")
    kind = str(fields.get("distributed_type", "NO")).upper()
    if kind == "FSDP":
        values |= _zero_settings({"fsdp": True, "fsdp_config": _mapping(fields, "fsdp_config")}, None, notes)
    elif kind == "DEEPSPEED":
        config = _mapping(fields, "deepspeed_config")
        stage = _whole_number(config, "zero_stage", 2, 0)
        values |= {"zero": stage} if deepspeed is None else _zero_settings({}, deepspeed, notes)
        values["accumulation"] = _whole_number(config, "gradient_accumulation_steps", 1)
        if mixed in ("bf16", "fp16"):
            values["precision"] = "bf16-zero"
    elif kind == "MEGATRON_LM":
        config = _mapping(fields, "megatron_lm_config")
        values |= {name: _whole_number(config, f"megatron_lm_{name}_degree", 1) for name in ("tp", "pp")}
        values |= {"implementation": "megatron", "zero": int(bool(config.get("megatron_lm_use_distributed_optimizer")))}
        values["sequence_parallel"] = values["tp"] > 1 and bool(config.get("megatron_lm_sequence_parallelism"))
        values |= {"checkpointing": "selective"} if config.get("megatron_lm_recompute_activations") else {}
        values |= {"precision": "bf16-master"} if mixed in ("bf16", "fp16") else {}
    return values, notes


def _zero_settings(fields: Fields, deepspeed: Fields | None, notes: list[str]) -> dict[str, Any]:
    """Return the stage of ZeRO of a config of DeepSpeed, or of ``fsdp`` and ``fsdp_config``, if there is one."""
    stated = fields.get("fsdp")
    words = stated.split() if isinstance(stated, str) else stated if isinstance(stated, list) else []
    config = _mapping(fields, "fsdp_config")
    if deepspeed is not None:
        zero = _mapping(deepspeed, "zero_optimization")
        stage = _whole_number(zero, "stage", 0, 0)
        if stage == 3:  # which overlaps by default, so the key counts as read
            zero.get("overlap_comm")
        return {"zero": stage}
    if not stated and not config:
        return {}

    def fsdp_value(name: str, default: Any) -> Any:  # keys may begin with fsdp_
        return config.get(f"fsdp_{name}", config.get(name, default))

    named = [word for word in map(str, words) if word.endswith(("_shard", "_op", "_zero2"))]
    default = fsdp_value("reshard_after_forward", named[0] if named else "FULL_SHARD")
    strategy = str(fsdp_value("sharding_strategy", default)).upper()
    if strategy in ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"):
        notes.append(f"{strategy} is estimated as FULL_SHARD between all GPUs: a rank of several nodes needs more")
    if "offload" in words:
        notes.append("fsdp offload is not estimated: the estimate is without it")
    stages = {"SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "NO_SHARD": 0, "3": 0}
    settings: dict[str, Any] = {"zero": stages.get(strategy, 3)}
    return settings | ({"checkpointing": "full"} if fsdp_value("activation_checkpointing", False) else {})


def system_of(fields: Fields) -> tuple[str, str]:
    """Return the training system of a YAML, or "", and its key with the name or path of a model, if it has one."""
    for system, row in training_systems()["yaml"].items():
        needed, keys = {row["model"]} - {""}, set(row["keys"])  # "": the files of this system name no model
        if needed <= fields.keys() and (not keys or keys & fields.keys()):
            return system, row["model"]
    return "", ""


def read_yaml(system: str, fields: Fields, deepspeed: Fields | None = None) -> SettingsAndNotes:
    """Return the settings of a plan, and notes: what is estimated as another setting, or not in the estimate."""
    stated, stages = StatedFields(fields), StatedFields(deepspeed or {})
    given = None if deepspeed is None else stages
    settings, notes = _read_training(system, stated, given) if system in _READERS else _read_accelerate(stated, given)
    return settings, [*notes, *note_of_left_out([*stated.unread(system), *stages.unread(system)])]


def _lora_targets(fields: Fields, named: list[str], notes: list[str]) -> str:
    stated = fields.get(key := named[0]) or named[1]
    names = {str(name).strip() for name in (stated if isinstance(stated, list) else str(stated).split(","))}
    matrices = {name: set(listed) for name, listed in training_systems()["lora_targets"].items()}
    targets = next((name for name, own in matrices.items() if names <= own), "all")
    if names not in ({"all"}, {"all-linear"}, matrices[targets]):
        notes.append(f"{key} {', '.join(sorted(names))} is estimated as --lora-targets {targets}")
    return targets


def _mapping(fields: Fields, key: str) -> Fields:
    value = fields.get(key)
    return value if isinstance(value, Mapping) else {}


def _first_number(fields: Fields, keys: list[Any]) -> int:
    """Return the number of the first key that is stated, or else the last item of the list, the default."""
    *names, default = keys
    for name in reversed(names):  # a key before another one overrides it
        default = _whole_number(fields, name, default)
    return int(default)


def _whole_number(fields: Fields, key: str, default: int, lowest: int = 1) -> int:
    value = fields.get(key)
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        value = int(value)
    if value in ("auto", None):
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise WrongModel(f"{key} is {str(value)[:40]!r}, not a whole number")
    if not lowest <= value <= MAX_COUNT:
        raise WrongModel(f"{key} is {value}: a number from {lowest} to {MAX_COUNT:,} is possible")
    return value
