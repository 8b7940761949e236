"""The formulas of other estimators, for the same configurations.

Each returns the bytes that the estimator states for training; the sources name the code in which the formula is found.
"""

from __future__ import annotations

from effllm.memory.model import ModelShape
from effllm.memory.plan import MemoryPlan

ACCELERATE = "accelerate estimate-memory"
DEEPSPEED = "DeepSpeed estimate_zero2"
MEGATRON = "Megatron theoretical_memory_usage"


def accelerate(parameters: int, plan: MemoryPlan) -> float | None:
    """Return the largest figure of ``accelerate.commands.estimate.estimate_training_usage``: Adam, no activations."""
    from accelerate.commands.estimate import estimate_training_usage

    sizes = estimate_training_usage(parameters * 4, "bfloat16" if plan.numbers.compute == 2 else "float32")
    return float(max(sizes.values()))


def deepspeed(parameters: int) -> float:
    """Return deepspeed.runtime.zero.stage_1_and_2.estimate_zero2_model_states_mem_needs of one GPU without offload.

    Weights and gradients in 16 bits, and 16 bytes for the optimizer; no activations.
    """
    return 4.0 * parameters + 16.0 * parameters


def megatron(shape: ModelShape, parameters: int, plan: MemoryPlan) -> float:
    """Return the formula of megatron/training/theoretical_memory_usage.py for one GPU.

    18 bytes for each parameter, and the activations of a layer with sequence parallelism and selective recomputation,
    s b h (18 + 4 f / h), with dropout of the embedding and logits in 32 bits.
    """
    tokens = plan.tokens
    activations = tokens * shape.hidden * (18 + 4 * shape.intermediate / shape.hidden) * shape.layers
    activations += 8 * tokens + tokens * shape.hidden + tokens * shape.hidden * 4 * (1 + shape.vocab / shape.hidden)
    return 18.0 * parameters + activations
