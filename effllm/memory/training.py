"""The course of a training step of a model: its blocks in the order of the forward pass, and its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from effllm.memory.blocks import FULL, LayerBlock, TensorSizes, attention, experts, mlp, norm
from effllm.memory.model import (
    ATTENTION,
    EMBEDDING,
    EXPERT,
    HEAD,
    MLP,
    NORM,
    ROUTER,
    SHARED,
    ModelShape,
)
from effllm.memory.plan import MemoryPlan
from effllm.memory.states import (
    RankTensor,
    Stage,
    elements,
    gradient_bytes,
    largest_matrix,
    quantized_elements,
    trained_tensors,
)

#: A tile of TRL's head and loss without whole logits has at most this many tokens, and words of the vocabulary.
TILE_TOKENS, TILE_WORDS = 4096, 32768
#: Vectors in 32 bits of all tokens that the forward pass keeps: the loss and its statistics.
LOSS_STATISTICS = 6
#: Tiles in 32 bits that operations of torch need besides, as counted on the CPU; the kernels of Triton need no tile.
TORCH_TILES = 7.25


def training_course(shape: ModelShape, plan: MemoryPlan, stage: Stage, held: list[RankTensor]) -> StepCourse:
    """Return what a step of a rank needs beside weights and optimizer states."""
    sizes = TensorSizes(shape, plan)
    weights = _BlockWeights(sizes, held, stage)
    dense = [norm(sizes), weights.attach(_attention(sizes), ATTENTION), *[norm(sizes)] * (shape.norms_per_layer - 1)]
    layers = [[*dense, weights.attach(mlp(sizes, shape.intermediate), MLP)]]
    routed = shape.experts
    if routed:
        share = routed.layers / shape.layers
        blocks = [*dense, weights.attach(experts(sizes, routed), EXPERT, ROUTER)]
        if routed.shared_intermediate:
            blocks.append(weights.attach(mlp(sizes, routed.shared_intermediate), SHARED))
        count = round(stage.layers * share)
        layers = layers * (stage.layers - count) + [blocks] * count
    else:
        layers = layers * stage.layers
    stream = sizes.tokens * shape.hidden * sizes.stream / sizes.spread
    return course_of(
        StepBlocks(
            first=_first(sizes, weights, stream),
            layers=layers,
            final=_final(sizes) if stage.is_last else None,
            last=_last(sizes, weights) if stage.is_last else None,
            input_bytes=stream + held_by_products(sizes),
            is_checkpointed=plan.checkpointing == "full",
            gradients=gradient_bytes(plan, weights.trained),
            resident=plan.accumulation > 1 or plan.numbers.master == 4 or plan.dp > 1 or plan.pp > 1,
            in_flight=min(plan.pp, plan.accumulation) if stage.is_first else 1,
        )
    )


def held_by_products(sizes: TensorSizes) -> float:
    """Return the inputs of a layer's products of 8 bits that checkpointing does not free, as transformers 5 uses it.

    MatMul8bitLt of bitsandbytes 0.50 holds them as attributes of the node, which no hook of autograd replaces. With
    ``use_reentrant=True``, the default of transformers 4, there is no such node.
    """
    shape, plan = sizes.shape, sizes.plan
    if plan.base_bits != 8 or plan.checkpointing != "full":
        return 0.0
    of_mlp = (shape.hidden / sizes.spread + shape.intermediate / plan.tp) * shape.dense_layers / shape.layers
    of_attention = shape.hidden / sizes.spread + shape.value_size / plan.tp
    return sizes.tokens * sizes.compute * (of_attention + of_mlp)


class _BlockWeights:
    """The gradients, and the casts of autocast, of the weights of a block."""

    def __init__(self, sizes: TensorSizes, held: list[RankTensor], stage: Stage) -> None:
        self.sizes, self.stage, self.held = sizes, stage, held
        self.trained = trained_tensors(sizes.plan, held)
        shape = sizes.shape
        self.sparse_layers = stage.layers * (shape.experts.layers / shape.layers if shape.experts else 0.0)

    def attach(self, block: LayerBlock, *groups: str) -> LayerBlock:
        plan, numbers = self.sizes.plan, self.sizes.plan.numbers
        layers = self._layers(groups[0])
        held = [one for one in self.held if one.tensor.group in groups]
        trained = [one for one in self.trained if one.tensor.group in groups]
        if HEAD in groups and self.sizes.shape.tied and not held:
            held = [one for one in self.held if one.tensor.group == EMBEDDING][:1]
            trained = held if not plan.lora_rank else []
        size = 4 if plan.lora_rank else numbers.gradients
        cast = [one for one in held if one.tensor.columns and one.tensor.group != EXPERT]
        matrices = elements(cast) - (quantized_elements(cast) if plan.base_bits else 0.0)
        adapters = elements(trained) if plan.lora_rank else 0.0
        # FSDP gathers weights in the precision of the products, so autocast has nothing to cast.
        scale = numbers.compute / layers if numbers.autocast and plan.zero < 3 else 0.0
        largest = max((one.tensor.elements for one in trained), default=0) / plan.tp
        # A product with a quantized matrix makes a copy of it in the precision of the product.
        copy = largest_matrix(held) / plan.tp * numbers.compute if plan.base_bits and HEAD not in groups else 0.0
        return replace(
            block,
            forward=block.forward + copy,
            backward=block.backward + copy,
            gradients=elements(trained) / layers * size,
            casts=(matrices + adapters) * scale,
            cached=(adapters if plan.lora_rank else matrices) * scale,
            largest=largest * size,
        )

    def _layers(self, group: str) -> float:
        if group in (HEAD, EMBEDDING):
            return 1.0
        if group in (EXPERT, SHARED):
            return max(self.sparse_layers, 1.0)
        return max(self.stage.layers - (self.sparse_layers if group == MLP else 0.0), 1.0)


def _attention(sizes: TensorSizes) -> LayerBlock:
    """Return the attention; selective checkpointing recomputes its probabilities (Korthikanti et al., section 5)."""
    block = attention(sizes)
    if sizes.plan.checkpointing != "selective":
        return block
    fused = attention(replace(sizes, plan=replace(sizes.plan, attention="sdpa")))
    return replace(block, kept=fused.kept, backward=block.backward + block.kept - fused.kept)


def _first(sizes: TensorSizes, weights: _BlockWeights, stream: float) -> LayerBlock:
    """Return what lives during the whole step: the residual stream, tables of rotations and the mask."""
    shape, plan = sizes.shape, sizes.plan
    tables = 0 if shape.positions else 2 * plan.seq_length * shape.qk_head_dim * sizes.stream
    mask = float(plan.micro_batch * plan.seq_length**2 * sizes.stream) if plan.attention == "eager" else 0.0
    if sizes.windowed and plan.attention == "sdpa":
        mask = float(plan.micro_batch * plan.seq_length**2)
    elif 0 < sizes.windowed < 1:
        mask *= 2  # another one for the layers with a window
    embedding = weights.attach(LayerBlock(0.0), EMBEDDING)
    gradient = 0.0 if shape.tied else embedding.gradients
    # The gradient of the embedding is a tensor of its own before it is added to an existing one.
    again = embedding.gradients if shape.tied or plan.accumulation > 1 else 0.0
    norms = elements([one for one in weights.trained if one.tensor.group == NORM])
    return LayerBlock(
        kept=stream + tables + mask, backward=again + stream, gradients=gradient + norms * plan.numbers.gradients
    )


def _final(sizes: TensorSizes) -> LayerBlock:
    block = norm(sizes)
    return replace(block, kept=block.kept + sizes.tokens * sizes.shape.hidden * sizes.compute / sizes.spread)


def _last(sizes: TensorSizes, weights: _BlockWeights) -> LayerBlock:
    if not sizes.plan.fused_loss:
        return weights.attach(_loss(sizes), HEAD)
    block = weights.attach(fused_loss(sizes, trains_head=not sizes.plan.lora_rank), HEAD)
    return replace(block, casts=0.0, cached=0.0)  # tiles of the head are cast, not the head


def _loss(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of logits and cross-entropy.

    transformers converts logits to 32 bits, and the loss keeps their log-softmax.  In the backward pass, the gradients
    of the log-softmax and of its input are beside it.
    """
    logits = sizes.tokens * sizes.shape.vocab / sizes.plan.tp
    if sizes.is_fused:  # the softmax in 32 bits, made in place, and its gradient in the precision of the logits
        return LayerBlock(kept=logits * FULL, forward=logits * sizes.compute, backward=logits * sizes.compute)
    converted = 0 if sizes.compute == FULL else sizes.compute
    capped = logits * sizes.compute if sizes.shape.logit_cap else 0.0
    return LayerBlock(kept=logits * FULL + capped, forward=logits * (FULL + converted), backward=logits * 2 * FULL)


def fused_loss(sizes: TensorSizes, *, trains_head: bool) -> LayerBlock:
    """Return the bytes of head and loss without whole logits, as in TRL's SFTTrainer since version 1.16.

    The formulas follow ``trl/kernels/chunked_logprob.py``: one buffer of a whole tile, also for a small vocabulary, and
    gradients that are summed in 32 bits and converted at the end.  Liger and Cut Cross-Entropy were not counted.
    """
    hidden, width = sizes.tokens * sizes.shape.hidden, sizes.shape.vocab / sizes.plan.tp
    tile = min(sizes.tokens, TILE_TOKENS) * TILE_WORDS * sizes.compute
    words = min(width, TILE_WORDS) * sizes.shape.hidden
    cast = words * sizes.compute if sizes.plan.numbers.autocast else 0.0
    short = sizes.plan.numbers.gradients != FULL
    of_head = width * sizes.shape.hidden * (FULL + (sizes.plan.numbers.gradients if short else 0)) if trains_head else 0
    return LayerBlock(
        kept=hidden * sizes.compute + LOSS_STATISTICS * sizes.tokens * FULL,
        forward=tile + cast,
        backward=tile + cast + hidden * FULL + of_head,
    )


def torch_tiles(sizes: TensorSizes) -> float:
    """Return the bytes of temporary tiles without Triton."""
    words = min(sizes.shape.vocab / sizes.plan.tp, TILE_WORDS)
    return TORCH_TILES * min(sizes.tokens, TILE_TOKENS) * words * FULL


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step at one moment, or the peaks of its parts."""

    activations: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.gradients


@dataclass(frozen=True)
class StepCourse:
    """All that a step needs beside weights and optimizer states."""

    peak: StepMemory  # at the moment of the largest sum
    activations: float  # largest sum without gradients


@dataclass(frozen=True)
class StepBlocks:
    """The parts of a step in the order of the forward pass."""

    first: LayerBlock  # the embedding, and what lives during the whole step
    layers: Sequence[Sequence[LayerBlock]]  # of one micro-batch
    final: LayerBlock | None  # the last norm with the input of the head; without the head in the last stage
    last: LayerBlock | None  # logits and loss
    input_bytes: float  # what a checkpointed layer keeps
    is_checkpointed: bool
    gradients: float  # of all trained weights of the rank
    resident: bool  # whether gradients exist during the whole step
    in_flight: int = 1  # micro-batches of a pipeline stage that wait for their backward pass


@dataclass
class _Walk:
    """Tracks live bytes and their peaks."""

    gradients: float
    live: float = 0.0
    peak: StepMemory = StepMemory()
    most: float = 0.0

    def at(self, extra: float, logits: float = 0.0, gradient: float = 0.0) -> None:
        found = StepMemory(self.live + extra, logits, self.gradients + gradient)
        if found.total > self.peak.total:
            self.peak = found
        self.most = max(self.most, found.activations + logits)


def course_of(blocks: StepBlocks) -> StepCourse:
    """Return the peak of a step, of the last micro-batch in flight, by a walk through forward and backward.

    Kept tensors add up during the forward pass, and are freed in the backward pass while gradients appear.  The peak is
    where their sum is largest: at the loss, or at the end of the backward pass.
    """
    walk = _Walk(blocks.gradients if blocks.resident else 0.0)
    kept_by_layer = [_kept(layer) for layer in blocks.layers]
    once = sum(block.casts for layer in blocks.layers for block in layer)
    stored = sum(blocks.input_bytes for _ in blocks.layers) if blocks.is_checkpointed else sum(kept_by_layer) - once
    walk.live = stored * (blocks.in_flight - 1) + blocks.first.kept
    _forward(walk, blocks)
    _loss_moment(walk, blocks)
    _backward(walk, blocks)
    if not blocks.resident:
        walk.gradients += blocks.first.gradients
    walk.at(blocks.first.backward)
    return StepCourse(walk.peak, walk.most)


def _kept(layer: Sequence[LayerBlock]) -> float:
    return sum(block.kept + block.casts for block in layer)


def _forward(walk: _Walk, blocks: StepBlocks) -> None:
    for layer in blocks.layers:
        before = walk.live
        for block in layer:
            walk.at(block.kept + block.casts + block.forward)
            walk.live += block.kept + block.casts
        if blocks.is_checkpointed:
            # The cache of autocast keeps the casts until the end of the forward pass.
            walk.live = before + blocks.input_bytes + sum(block.cached for block in layer)


def _loss_moment(walk: _Walk, blocks: StepBlocks) -> None:
    last = blocks.last
    if last is None or blocks.final is None:
        return
    walk.at(blocks.final.kept + blocks.final.forward)
    walk.live += blocks.final.kept
    walk.at(0.0, last.kept + last.casts + last.forward)
    if blocks.is_checkpointed:
        walk.live -= sum(block.cached for layer in blocks.layers for block in layer)
    walk.at(0.0, last.kept + last.casts + last.backward)
    walk.gradients += 0.0 if blocks.resident else last.gradients
    walk.at(last.largest if blocks.resident else 0.0, last.kept / 2)
    walk.at(blocks.final.backward)
    walk.live -= blocks.final.kept


def _backward(walk: _Walk, blocks: StepBlocks) -> None:
    for layer in reversed(blocks.layers):
        if blocks.is_checkpointed:
            walk.live += _kept(layer) - blocks.input_bytes
        for block in reversed(layer):
            walk.at(block.backward + (block.largest if blocks.resident else 0.0))
            walk.gradients += 0.0 if blocks.resident else block.gradients
            walk.live -= block.kept + block.casts
