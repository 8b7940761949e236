"""The formulas of other estimators, for the same configurations.

Each returns the bytes that the estimator states for training.  Functions of accelerate and DeepSpeed are called;
that of Megatron needs its command line, so its formula is computed here.
"""

from __future__ import annotations

from effllm.memory.model import ModelShape
from effllm.memory.plan import MemoryPlan

ACCELERATE = "accelerate estimate-memory"
DEEPSPEED, DEEPSPEED_3 = "DeepSpeed estimate_zero2", "DeepSpeed estimate_zero3"
MEGATRON = "Megatron theoretical_memory_usage"


def accelerate(parameters: int, plan: MemoryPlan) -> float:
    """Return the largest figure of ``accelerate.commands.estimate.estimate_training_usage``: Adam, no activations."""
    from accelerate.commands.estimate import estimate_training_usage

    sizes = estimate_training_usage(parameters * 4, "bfloat16" if plan.numbers.compute == 2 else "float32")
    return float(max(sizes.values()))


def deepspeed(parameters: int) -> float:
    """Return DeepSpeed's estimate of the states with ZeRO 2 on one GPU without offload: no activations."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, gpu = estimate_zero2_model_states_mem_needs(parameters, cpu_offload=False)
    return float(gpu)


def deepspeed_3(shape: ModelShape, parameters: int) -> float:
    """Return DeepSpeed's estimate of the states with ZeRO 3 on one GPU without offload: no activations.

    The largest layer is the largest module with parameters of its own, which is the embedding in all configurations or
    a matrix of the MLP.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    routed = shape.experts.total * shape.experts.intermediate * 2 if shape.experts else 0
    largest = shape.hidden * max(
        shape.vocab, 2 * shape.intermediate if shape.fused_gate else shape.intermediate, routed
    )
    _, gpu, _ = estimate_zero3_model_states_mem_needs(parameters, largest, cpu_offload=False, cpu_offload_params=False)
    return float(gpu)


def megatron(shape: ModelShape, parameters: int, plan: MemoryPlan) -> float:
    """Return the formula of megatron/training/theoretical_memory_usage.py (commit 00caa53a) for one GPU.

    It is that without sequence parallelism, which one GPU does not have: 18 bytes for each parameter, 34 bytes for each
    token, element of the hidden state and layer, the ids and the dropout of the embedding, the last norm and the
    logits in 16 bits, and 5 % of these activations.  The parameters are the exact ones; Megatron's own number leaves
    out biases, learned positions and routers.
    """
    tokens = plan.tokens
    layers = tokens * shape.hidden * 34 * shape.layers
    embedding, logits = 8 * tokens + tokens * shape.hidden, 2 * tokens * (shape.vocab + shape.hidden)
    return 18.0 * parameters + 1.05 * (layers + embedding + logits)
