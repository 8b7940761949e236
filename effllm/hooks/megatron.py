"""Megatron: what a rank holds of the model, and whether it speaks for its data.

Both are local questions: each rank answers for itself, without a collective, and the sum over all
ranks is the job's.  megatron-core is imported by the functions, never by importing this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def parameter_share(model_chunks: Iterable[Any]) -> dict[str, int]:
    """Return the parameters that this rank counts, so that over all ranks each one is counted once.

    Of the ranks that hold the same tensor one counts it: replicas of data and context parallelism,
    tensors that tensor parallelism does not split, and the last stage's copy of a tied embedding are
    left to their first holder.
    """
    share = {"total": 0, "trainable": 0}
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if _is_counted_here(name, parameter):
                share["total"] += parameter.numel()
                share["trainable"] += parameter.numel() if parameter.requires_grad else 0
    return share


def reports_data() -> bool:
    """Whether this rank gives the tokens and samples of its model-parallel group; its peers give zero.

    It is the rank that also has the loss: on the last pipeline stage, first in tensor and context
    parallelism.
    """
    from megatron.core import parallel_state as groups

    return bool(
        groups.get_tensor_model_parallel_rank() == 0
        and groups.get_context_parallel_rank() == 0
        and groups.get_pipeline_model_parallel_rank() == groups.get_pipeline_model_parallel_world_size() - 1
    )


def _is_counted_here(name: str, parameter: Any) -> bool:
    from megatron.core import parallel_state as groups
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate

    if getattr(parameter, "shared", False):
        return False
    if not _is_expert(name, parameter):
        is_first_replica = groups.get_data_parallel_rank(with_context_parallel=True) == 0
        return is_first_replica and bool(param_is_not_tensor_parallel_duplicate(parameter))
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return _expert_replica(groups) == 0 and (is_split or _expert_tensor_rank(groups) == 0)


def _is_expert(name: str, parameter: Any) -> bool:
    # Without expert parallelism Megatron does not mark experts, yet they may be split over fewer ranks
    # than the dense layers (expert_tensor_parallel_size), so their name is asked too.
    return not getattr(parameter, "allreduce", True) or ".experts." in name


def _expert_replica(groups: Any) -> int:
    # The second name is the one of megatron-core 0.8, which knows no expert data parallelism.
    rank: Callable[[], int] = getattr(groups, "get_expert_data_parallel_rank", None) or (
        groups.get_data_modulo_expert_parallel_rank
    )
    return rank()


def _expert_tensor_rank(groups: Any) -> int:
    rank: Callable[[], int] = getattr(groups, "get_expert_tensor_parallel_rank", None) or (
        groups.get_tensor_model_parallel_rank
    )
    return rank()
