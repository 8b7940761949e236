"""Megatron: a rank's share of the parameters, the ranks that count data, and the layout of data parallelism.

Each rank computes these numbers without a collective, and the sum over all ranks is the job's total.  The functions
import megatron-core; this module does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from effllm.hooks._layout import DDP, FSDP, SINGLE, ZERO

#: Megatron before 0.5, used by the old examples of Pai-Megatron-Patch, has no context parallelism.
_CONTEXT_RANK = "get_context_parallel_rank"


def parameter_share(model_chunks: Iterable[Any]) -> dict[str, int]:
    """Return the parameters that this rank counts; over all ranks each parameter is counted once.

    If several ranks have the same tensor, only the first rank counts it: replicas of data and context parallelism,
    tensors that tensor parallelism does not split, and the last stage's copy of a tied embedding.  ``active`` is the
    number of parameters that one token uses; the router chooses a share of the experts.  ``active`` is missing if there
    are experts, but no chunk's configuration has their number.
    """
    total = trainable = in_experts = 0
    active_and_all: tuple[int, int] | None = None  # number of experts that a token uses, and number of all experts
    for chunk in model_chunks:
        config = configuration(chunk)
        num_active, num_experts = getattr(config, "moe_router_topk", None), getattr(config, "num_moe_experts", None)
        active_and_all = active_and_all or ((num_active, num_experts) if num_active and num_experts else None)
        for name, parameter in chunk.named_parameters():
            if _counts_parameter(name, parameter):
                total += parameter.numel()
                trainable += parameter.numel() if parameter.requires_grad else 0
                in_experts += parameter.numel() if _is_expert(name, parameter) else 0
    share = {"total": total, "trainable": trainable}
    if active_and_all:
        share["active"] = total - in_experts + in_experts * active_and_all[0] // active_and_all[1]
    elif not in_experts:
        share["active"] = total
    return share


def reports_data() -> bool:
    """Whether this rank reports the tokens and samples of its model-parallel group; its peers report 0.

    This rank also has the loss: it is on the last pipeline stage, and has rank 0 in tensor and context parallelism.
    """
    from megatron.core import parallel_state as groups

    return bool(
        groups.get_tensor_model_parallel_rank() == 0
        and _first_result(groups, _CONTEXT_RANK) == 0
        and groups.get_pipeline_model_parallel_rank() == groups.get_pipeline_model_parallel_world_size() - 1
    )


def peer_group_and_replica() -> tuple[str, str]:
    """Return the peer group and the replica of this rank, for `effllm.set_peer_group`.

    The peer group is the pipeline stage.  The ranks of a replica exchange activations within an iteration, in tensor,
    pipeline, context or expert parallelism.  Without such parallelism, the replica is empty.
    """
    from megatron.core import parallel_state as groups

    stage = groups.get_pipeline_model_parallel_rank()
    context_size = getattr(groups, "get_context_parallel_world_size", lambda: 1)()
    expert_size = groups.get_expert_model_parallel_world_size()
    sizes = (groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size())
    replica = groups.get_data_parallel_rank() // expert_size  # ranks that share experts are consecutive
    return f"stage {stage}", f"replica {replica}" if max(*sizes, context_size, expert_size) > 1 else ""


def layout_facts(settings: Any, replicas: int) -> dict[str, Any]:
    """Return what each rank of data parallelism has; Megatron's distributed optimizer is ZeRO of stage 1.

    ``settings`` are Megatron's arguments, or the ``ddp_config`` of a chunk of the model.
    """
    # The second name is that of megatron-core before 0.13.
    if any(getattr(settings, f"use_{name}", False) for name in ("megatron_fsdp", "custom_fsdp", "torch_fsdp2")):
        return {"parallel_layout": FSDP}
    if replicas > 1 and getattr(settings, "use_distributed_optimizer", False):
        return {"parallel_layout": ZERO, "zero_stage": 1}
    return {"parallel_layout": DDP if replicas > 1 else SINGLE}


def configuration(chunk: Any) -> Any:
    """Return the ``TransformerConfig`` of a wrapped model chunk, or ``None`` without one."""
    for _ in range(8):  # at most so many wrappers
        config = getattr(chunk, "config", None)
        if hasattr(config, "hidden_size"):
            return config
        chunk = getattr(chunk, "module", None)
    return None


def _counts_parameter(name: str, parameter: Any) -> bool:  # whether this rank is the first with this tensor
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    if getattr(parameter, "shared", False):  # the last stage's copy of a tied embedding
        return False
    if not _is_expert(name, parameter):
        is_first_replica = groups.get_data_parallel_rank() == 0 and _first_result(groups, _CONTEXT_RANK) == 0
        return is_first_replica and bool(param_is_not_tensor_parallel_duplicate(parameter))
    is_split = getattr(parameter, "tensor_model_parallel", False)
    # The second name is from megatron-core 0.8, which has no expert data parallelism.
    data_rank = _first_result(groups, "get_expert_data_parallel_rank", "get_data_modulo_expert_parallel_rank")
    tensor_rank = _first_result(groups, "get_expert_tensor_parallel_rank", "get_tensor_model_parallel_rank")
    return data_rank == 0 and (is_split or tensor_rank == 0)


def _is_expert(name: str, parameter: Any) -> bool:
    # Without expert parallelism Megatron does not mark experts, but they may be split over fewer ranks than the dense
    # layers (expert_tensor_parallel_size), so the name is checked too.
    return not getattr(parameter, "allreduce", True) or ".experts." in name


def _first_result(groups: Any, *names: str) -> int:
    """Return the result of the first of these functions that this version of megatron-core has; 0 without one."""
    function: Callable[[], int] = next((getattr(groups, name) for name in names if hasattr(groups, name)), int)
    return function()  # int() is 0
