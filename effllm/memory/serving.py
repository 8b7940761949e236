"""The memory of inference: the KV cache, and the tensors of one layer."""

from __future__ import annotations

from effllm.memory.blocks import FULL
from effllm.memory.byte_range import ByteRange
from effllm.memory.model import ModelShape
from effllm.memory.plan import MemoryPlan
from effllm.memory.states import Stage


def serving_parts(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> tuple[ByteRange, ByteRange]:
    """Return the KV cache and the working tensors of a stage.

    The plan's sequence length is that of prompt and answer together, and its micro-batch the number of sequences.
    """
    return _cache(shape, plan, stage), _working(shape, plan, stage)


def _cache(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> ByteRange:
    """Return the bytes of keys and values.

    Layers with a sliding window need the window alone; transformers' DynamicCache and older servers keep all tokens.
    With latent attention, vLLM and SGLang keep the latent vector of a token; transformers keeps keys and values.
    """
    share = stage.layers / shape.layers
    tokens = plan.micro_batch * -(-plan.seq_length // plan.cp)
    windowed = plan.micro_batch * min(shape.sliding_window or plan.seq_length, plan.seq_length)
    size = plan.numbers.compute
    if shape.latent:
        whole = shape.layers * tokens * (shape.q_size + shape.value_size) / plan.tp
        latent = shape.layers * tokens * (shape.latent.kv_rank + shape.latent.rope_head_dim) * size * share
        return ByteRange(latent, latent, max(whole * size * share, latent))
    heads = 2 * max(shape.kv_heads / plan.tp, 1) * shape.head_dim * size * share
    full = shape.layers - shape.sliding_layers
    least = (full * tokens + shape.sliding_layers * min(windowed, tokens)) * heads
    return ByteRange(least, least, shape.layers * tokens * heads)


def _working(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> ByteRange:
    """Return the tensors of the widest layer during the prefill of all sequences, and the logits."""
    tokens, size = float(plan.tokens), plan.numbers.compute
    width = float(shape.intermediate)
    if shape.experts:
        width = max(width if shape.dense_layers else 0, shape.experts.intermediate * shape.experts.active)
    layer: float = tokens * (2 * shape.hidden + max(3 * width, 2 * shape.q_size + shape.value_size) / plan.tp) * size
    if plan.attention == "eager":
        layer += tokens * plan.seq_length * shape.heads / plan.tp * (FULL + size)
    logits = shape.vocab / plan.tp * (size + FULL) if stage.is_last else 0.0
    one = plan.micro_batch * logits
    return ByteRange(plan.micro_batch * 2 * shape.hidden * size + one, layer + one, layer + tokens * logits)
