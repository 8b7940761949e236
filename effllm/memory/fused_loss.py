"""The head and the loss without whole logits, computed in tiles, as TRL's SFTTrainer does since version 1.16.

The formulas follow ``trl/kernels/chunked_logprob.py`` of TRL 1.16: one buffer of at most 4,096 tokens and 32,768 words
of the vocabulary, and gradients that are summed in 32 bits and converted at the end.  Liger and Cut Cross-Entropy were
not counted.
"""

from __future__ import annotations

from effllm.memory.blocks import FULL, LayerBlock, TensorSizes

TOKENS, WORDS = 4096, 32768
#: Vectors in 32 bits of all tokens that the forward pass keeps: the loss and its statistics.
STATISTICS = 6
#: Tiles in 32 bits that operations of torch need besides, as counted on the CPU; the kernels of Triton need no tile.
TORCH_TILES = 7.25


def fused_loss(sizes: TensorSizes, *, trains_head: bool) -> LayerBlock:
    """Return the bytes of head and loss; the buffer is that of a whole tile, also for a small vocabulary."""
    hidden, width = sizes.tokens * sizes.shape.hidden, sizes.shape.vocab / sizes.plan.tp
    tile = min(sizes.tokens, TOKENS) * WORDS * sizes.compute
    words = min(width, WORDS) * sizes.shape.hidden
    cast = words * sizes.compute if sizes.plan.numbers.autocast else 0.0
    short = sizes.plan.numbers.gradients != FULL
    of_head = width * sizes.shape.hidden * (FULL + (sizes.plan.numbers.gradients if short else 0)) if trains_head else 0
    return LayerBlock(
        kept=hidden * sizes.compute + STATISTICS * sizes.tokens * FULL,
        forward=tile + cast,
        backward=tile + cast + hidden * FULL + of_head,
    )


def torch_tiles(sizes: TensorSizes) -> float:
    """Return the bytes of temporary tiles without Triton."""
    words = min(sizes.shape.vocab / sizes.plan.tp, WORDS)
    return TORCH_TILES * min(sizes.tokens, TOKENS) * words * FULL
