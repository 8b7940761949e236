"""The settings that determine the memory of Megatron, for the fact ``framework_plan``.

They are read from arguments with the names of Megatron-LM.  A loop around megatron-core has no such arguments, so they
are collected from the configurations of its model, its gradients and its optimizer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from effllm.hooks._plan import NoPlan, stated_plan
from effllm.hooks._wrap import Guard
from effllm.hooks.megatron import configuration

_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "dp": "data_parallel_size",
}
#: Arguments that change the memory in a way that no setting describes.
_OTHERS = (
    *("virtual_pipeline_model_parallel_size", "use_megatron_fsdp", "use_torch_fsdp2", "optimizer_cpu_offload"),
    *("use_precision_aware_optimizer", "cpu_offloading", "mtp_num_layers"),
)
#: Settings of a model's configuration with the same name.
_OF_MODEL = (
    *("fp4", "fp8", "bf16", "fp16", "sequence_parallel", "attention_backend"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
)
_OPTIMIZERS = {"adam": "adamw", "sgd": "sgd-momentum"}

_GUARD = Guard("the plan of Megatron's memory")


def plan_of_arguments(args: Any) -> str:
    """Return the settings of a training; empty if they cannot describe it."""
    return stated_plan(_GUARD, _settings, args)


def plan_of_core(call: Any, micro_batches: int, chunk: Any, optimizer: Any) -> str:
    """Return the settings of a loop around megatron-core.

    Args:
        call: a call of a schedule.
        micro_batches: number of micro-batches before a step.
        chunk: a chunk of the model.
        optimizer: Megatron's optimizer.
    """
    return stated_plan(_GUARD, lambda: _settings(_arguments(call, micro_batches, chunk, optimizer)))


def _settings(args: Any) -> dict[str, Any]:
    if any(getattr(args, name, None) for name in _OTHERS):
        raise NoPlan("another form of the training")
    sizes = {name: getattr(args, of, None) or 1 for name, of in _SIZES.items()}
    if not getattr(args, "num_experts", None):
        del sizes["ep"]  # a dense model divides nothing between these ranks
    micro, whole = args.micro_batch_size, getattr(args, "global_batch_size", None)
    return {
        "implementation": "megatron",
        "precision": _precision(args),
        "optimizer": _OPTIMIZERS.get(str(getattr(args, "optimizer", None))),
        "checkpointing": _checkpointing(args),
        "attention": "eager" if _is_unfused(args) else "flash",
        "seq_length": args.seq_length,
        "micro_batch": micro,
        "accumulation": max(whole // (micro * sizes["dp"]), 1) if whole else None,
        **{name: size for name, size in sizes.items() if size > 1},
        "zero": 1 if getattr(args, "use_distributed_optimizer", False) else None,
        "sequence_parallel": True if getattr(args, "sequence_parallel", False) and sizes["tp"] > 1 else None,
    }


def _precision(args: Any) -> str | None:
    """Return the precision; with 16 bits, gradients are summed in 32 bits unless it is stated otherwise."""
    if any(getattr(args, name, None) for name in ("fp4", "fp8")):
        return None
    if not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        return "fp32"
    return "bf16-master" if getattr(args, "accumulate_allreduce_grads_in_fp32", True) else None


def _checkpointing(args: Any) -> str | None:
    """Return what is recomputed; ``None`` if it is neither each layer nor the core of each attention."""
    stated = getattr(args, "recompute_granularity", None)
    if stated == "full":
        is_uniform = getattr(args, "recompute_method", None) == "uniform"
        is_each = is_uniform and getattr(args, "recompute_num_layers", None) in (None, 1)
        return "full" if is_each else None
    if stated == "selective":
        return "selective" if (getattr(args, "recompute_modules", None) or ["core_attn"]) == ["core_attn"] else None
    return "none"


def _is_unfused(args: Any) -> bool:
    backend = getattr(getattr(args, "attention_backend", None), "name", "auto")
    is_local = getattr(args, "transformer_impl", None) == "local" and not getattr(args, "use_flash_attn", False)
    return is_local or backend in ("unfused", "local")


def _arguments(call: Any, micro_batches: int, chunk: Any, optimizer: Any) -> SimpleNamespace:
    """Return the settings of the objects of megatron-core with the names of Megatron-LM's arguments."""
    from megatron.core import parallel_state as groups

    config, gradients, stepped = configuration(chunk), getattr(chunk, "ddp_config", None), optimizer.config
    found = SimpleNamespace(**{name: getattr(config, name, None) for name in _OF_MODEL})
    for name in _OTHERS:
        setattr(found, name, getattr(config, name, None) or getattr(stepped, name, None))
    kinds = {type(one).__name__ for one in chunk.modules()}
    found.transformer_impl = "local" if "DotProductAttention" in kinds else "transformer_engine"
    found.num_experts, found.optimizer = getattr(config, "num_moe_experts", None), stepped.optimizer
    found.accumulate_allreduce_grads_in_fp32 = getattr(gradients, "grad_reduce_in_fp32", False)
    found.use_distributed_optimizer = getattr(gradients, "use_distributed_optimizer", False)
    found.tensor_model_parallel_size = groups.get_tensor_model_parallel_world_size()
    found.pipeline_model_parallel_size = groups.get_pipeline_model_parallel_world_size()
    found.context_parallel_size = groups.get_context_parallel_world_size()
    found.expert_model_parallel_size = groups.get_expert_model_parallel_world_size() if found.num_experts else 1
    found.data_parallel_size = groups.get_data_parallel_world_size()
    found.seq_length, found.micro_batch_size = call.get("seq_length"), call.get("micro_batch_size")
    found.global_batch_size = found.micro_batch_size * found.data_parallel_size * micro_batches
    return found
