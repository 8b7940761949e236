"""The settings that determine the memory of a Hugging Face Trainer, for the fact ``framework_plan``."""

from __future__ import annotations

import sys
from typing import Any

from effllm.hooks._deepspeed_plan import engine_settings
from effllm.hooks._plan import (
    NoPlan,
    is_language_model,
    layer_settings,
    optimizer_name,
    stated_plan,
    weights_of,
    world_size,
)
from effllm.hooks._trainer_layout import tensor_parallel
from effllm.hooks._wrap import Guard

_SFT = "trl.trainer.sft_trainer"
#: Modules of the Trainers whose step is one forward and backward pass of the model, with its own loss.
_KNOWN = {
    "transformers.trainer",
    "transformers.trainer_seq2seq",
    _SFT,
    "llamafactory.train.pt.trainer",
    "llamafactory.train.sft.trainer",
}
#: Arguments that change the memory in a way that no setting describes.
_OTHERS = (
    "torch_compile",
    "use_liger_kernel",
    "auto_find_batch_size",
    "label_smoothing_factor",
    "activation_offloading",
)
_SHARDING = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0}

_GUARD = Guard("the plan of the Trainer's memory")


def framework_plan(trainer: Any, args: Any, model: Any) -> str:
    """Return the settings of a Trainer whose model and optimizer are ready; empty if they cannot describe it.

    The length is left out: it is that of the longest micro-batch, which is measured.
    """
    return stated_plan(_GUARD, _settings, trainer, args, model)


def _settings(trainer: Any, args: Any, model: Any) -> dict[str, Any]:
    _check(trainer, args, model)
    accelerator: Any = trainer.accelerator
    mixed = getattr(accelerator, "mixed_precision", None)
    autocast = None if mixed == "no" else mixed
    kind = getattr(getattr(accelerator, "distributed_type", None), "name", "")
    weights = weights_of(model, autocast)
    optimizer = optimizer_name(trainer.optimizer)
    if optimizer == "adamw-8bit" and "lora_rank" not in weights:
        raise NoPlan("the Trainer keeps the states of the embedding in 32 bits")
    settings = {
        **weights,
        "optimizer": optimizer,
        **layer_settings(model),
        "fused_loss": _has_fused_loss(trainer) or None,
        "micro_batch": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        **_ranks(trainer),
    }
    if kind == "FSDP":
        settings |= _of_fsdp(accelerator.state.fsdp_plugin)
    elif kind == "DEEPSPEED":
        settings |= engine_settings(trainer.model_wrapped)
    elif kind != "NO" and not kind.startswith("MULTI_"):
        raise NoPlan(kind)
    return settings


def _check(trainer: Any, args: Any, model: Any) -> None:
    for name in ("compute_loss", "training_step"):
        if _module_of(type(trainer), name) not in _KNOWN:
            raise NoPlan(f"another {name}")
    if getattr(trainer, "compute_loss_func", None) is not None or any(getattr(args, one, None) for one in _OTHERS):
        raise NoPlan("another loss or another form of the model")
    if not is_language_model(model) or getattr(args, "n_gpu", 1) > 1:
        raise NoPlan("not a language model on one device")


def _has_fused_loss(trainer: Any) -> bool:
    """Whether head and loss are computed in tiles, as in the SFTTrainer since TRL 1.16."""
    return _module_of(type(trainer), "compute_loss") == _SFT and hasattr(sys.modules[_SFT], "add_fused_lm_head")


def _module_of(kind: type, name: str) -> str:
    return next((one.__module__ for one in kind.__mro__ if name in vars(one)), "")


def _ranks(trainer: Any) -> dict[str, int]:
    sizes = getattr(trainer.accelerator, "parallelism_config", None)
    if any((getattr(sizes, name, 1) or 1) > 1 for name in ("cp_size", "sp_size")):
        raise NoPlan("parts of a sequence")
    ranks, tp = world_size(), tensor_parallel(trainer)
    found = {"dp": max(ranks // tp, 1), "tp": tp}
    return {name: size for name, size in found.items() if size > 1}


def _of_fsdp(plugin: Any) -> dict[str, Any]:
    offload = getattr(plugin, "cpu_offload", None)
    if getattr(offload, "offload_params", offload) or type(offload).__name__ == "CPUOffloadPolicy":
        raise NoPlan("weights on the host")
    if getattr(plugin, "fsdp_version", 1) == 2:
        zero: int | None = 3 if plugin.reshard_after_forward else 2
    else:
        zero = _SHARDING.get(getattr(plugin.sharding_strategy, "name", ""))
    if zero is None:
        raise NoPlan("hybrid shards")
    return {"zero": zero, **({"checkpointing": "full"} if plugin.activation_checkpointing else {})}
