"""Memory beside the tensors of a step: CUDA context, communication buffers, fragmentation, temporary copies.

These parts are not computed from the model.  Their intervals are ranges that others have published or that settings
allow, and are not measured on a GPU here.
"""

from __future__ import annotations

from effllm.memory.byte_range import ByteRange
from effllm.memory.plan import MemoryPlan

#: A CUDA context with the kernels of torch and cuBLAS; 0.3 to 0.5 GB are common, newer GPUs need more.
CUDA_CONTEXT = ByteRange(0.3e9, 0.5e9, 0.9e9)
#: NCCL for each group of ranks: channels of 4 MiB buffers (NCCL_BUFFSIZE) to each neighbour.
NCCL_GROUP = ByteRange(0.1e9, 0.3e9, 1.0e9)
#: Unused parts of blocks of the caching allocator, relative to the tensors that come and go in a step.
FRAGMENTATION = (0.0, 0.05, 0.2)
#: cuBLAS workspaces: 32 MiB for each handle on Hopper, 8 MiB on other GPUs.
CUBLAS_WORKSPACE = ByteRange(8 * 2**20, 32 * 2**20, 64 * 2**20)


def nccl_buffers(plan: MemoryPlan) -> ByteRange:
    """Return the buffers that NCCL allocates beside torch's allocator."""
    groups = sum(size > 1 for size in (plan.tp, plan.pp, plan.cp, plan.ep, plan.dp))
    return ByteRange(NCCL_GROUP.low * groups, NCCL_GROUP.expected * groups, NCCL_GROUP.high * groups)


def communication(plan: MemoryPlan, gradients: float, weights: float, layer_weights: float) -> ByteRange:
    """Return the buffers of collectives.

    DDP copies gradients to buckets of their total size, unless gradients are views of the buckets.  FSDP and ZeRO-3
    gather the weights of the layer in use and of the next one, and reduce the gradients of a layer.
    """
    nccl = nccl_buffers(plan)
    if not nccl.expected:
        return nccl
    low, expected, high = nccl.low, nccl.expected, nccl.high
    if plan.is_training and plan.shards > 1:
        if plan.zero == 0 and plan.implementation == "transformers":
            expected, high = expected + gradients, high + gradients
        elif plan.zero in (1, 2):
            expected, high = expected + min(gradients, 1e9), high + min(2 * gradients, 4e9)
    if plan.zero == 3:
        low, expected, high = low + layer_weights, expected + 3 * layer_weights, high + min(weights, 6 * layer_weights)
    return ByteRange(low, expected, high)


def fragmentation(dynamic: float) -> ByteRange:
    return ByteRange(*(dynamic * share for share in FRAGMENTATION))
