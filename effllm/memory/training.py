"""The course of a training step of a model: its blocks in the order of the forward pass, and its peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from effllm.memory.blocks import FULL, LayerBlock, TensorSizes, attention, experts, mlp, norm
from effllm.memory.model import Group, ModelShape, ParameterTensor
from effllm.memory.plan import MemoryPlan
from effllm.memory.states import (
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


def training_course(shape: ModelShape, plan: MemoryPlan, stage: Stage, held: list[ParameterTensor]) -> StepCourse:
    """Walk through the forward and the backward pass of the last micro-batch in flight.

    Kept tensors add up during the forward pass, and are freed in the backward pass while gradients appear.  The peak is
    where their sum is largest: at the loss, or at the end of the backward pass.
    """
    sizes = TensorSizes(shape, plan)
    weights = _BlockWeights(sizes, held, stage)
    layers = _layers(sizes, weights, stage)
    stream = sizes.tokens * shape.hidden * sizes.stream / sizes.spread
    first = _first(sizes, weights, stream)
    is_checkpointed = plan.checkpointing == "full" or plan.keeps_products
    input_bytes = stream + held_by_products(sizes) + _kept_products(sizes)  # what a checkpointed layer keeps
    once = 0.0 if is_checkpointed else sum(block.casts for layer in layers for block in layer)
    stored = sum(input_bytes if is_checkpointed else _kept(layer) for layer in layers) - once
    in_flight = min(plan.pp, plan.accumulation) if stage.is_first else 1
    is_resident = plan.accumulation > 1 or plan.numbers.master == 4 or plan.dp > 1 or plan.pp > 1
    gradients = gradient_bytes(plan, weights.trained) if is_resident else 0.0
    course = StepCourse(is_resident, stored * (in_flight - 1) + first.kept, gradients)
    for layer in layers:
        before = course.live
        for block in layer:
            course.record(block.kept + block.casts + block.forward)
            course.live += block.kept + block.casts
        if is_checkpointed:  # the cache of autocast keeps the casts until the end of the forward pass
            course.live = before + input_bytes + sum(block.cached for block in layer)
    if stage.is_last:
        final = norm(sizes)
        final = replace(final, kept=final.kept + sizes.tokens * shape.hidden * sizes.compute / sizes.spread)
        cached = sum(block.cached for layer in layers for block in layer) if is_checkpointed else 0.0
        course.pass_loss(final, weights.attach(_loss(sizes), Group.HEAD), cached)
    for layer in reversed(layers):
        if is_checkpointed:
            course.live += _kept(layer) - input_bytes
        for block in reversed(layer):
            course.record(block.backward + (block.largest if is_resident else 0.0))
            course.add_gradients(block.gradients)
            course.live -= block.kept + block.casts
    course.add_gradients(first.gradients)
    course.record(first.backward)
    return course


def _layers(sizes: TensorSizes, weights: _BlockWeights, stage: Stage) -> list[list[LayerBlock]]:
    shape, routed = sizes.shape, sizes.shape.experts
    inner = weights.attach(_attention(sizes), Group.ATTENTION)
    dense = [norm(sizes), inner, *[norm(sizes)] * (shape.norms_per_layer - 1)]
    layers = [[*dense, weights.attach(mlp(sizes, shape.intermediate), Group.MLP)]]
    if not routed:
        return layers * stage.layers
    blocks = [*dense, weights.attach(experts(sizes, routed), Group.EXPERT, Group.ROUTER)]
    if routed.shared_intermediate:
        blocks.append(weights.attach(mlp(sizes, routed.shared_intermediate), Group.SHARED))
    count = round(stage.layers * (routed.layers / shape.layers))
    return layers * (stage.layers - count) + [blocks] * count


def _kept(layer: Sequence[LayerBlock]) -> float:
    return sum(block.kept + block.casts for block in layer)


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


def _kept_products(sizes: TensorSizes) -> float:
    """Return the outputs of a layer's products and of its attention, which selective checkpointing of operations keeps.

    As in torchtitan, which recomputes every second product, too.
    """
    shape, tp, routed = sizes.shape, sizes.plan.tp, sizes.shape.experts
    if not sizes.plan.keeps_products:
        return 0.0
    width = routed.intermediate * routed.active + routed.shared_intermediate if routed else shape.intermediate
    inner = shape.q_size + 2 * shape.kv_heads * shape.head_dim + shape.value_size + width * (1 + shape.gated_mlp)
    return sizes.tokens * sizes.compute * (inner / tp + 2 * shape.hidden / sizes.spread)


class _BlockWeights:
    """The gradients, and the casts of autocast, of the weights of a block."""

    def __init__(self, sizes: TensorSizes, held: list[ParameterTensor], stage: Stage) -> None:
        self.sizes, self.stage, self.held = sizes, stage, held
        self.trained = trained_tensors(sizes.plan, held)
        shape = sizes.shape
        self.sparse_layers = stage.layers * (shape.experts.layers / shape.layers if shape.experts else 0.0)

    def attach(self, block: LayerBlock, *groups: str) -> LayerBlock:
        plan, numbers, sparse = self.sizes.plan, self.sizes.plan.numbers, self.sparse_layers
        of_group = {Group.HEAD: 1.0, Group.EMBEDDING: 1.0, Group.EXPERT: sparse, Group.SHARED: sparse}
        of_group[Group.MLP] = self.stage.layers - sparse
        layers = max(of_group.get(groups[0], self.stage.layers), 1.0)
        held = [tensor for tensor in self.held if tensor.group in groups]
        trained = [tensor for tensor in self.trained if tensor.group in groups]
        if Group.HEAD in groups and self.sizes.shape.tied and not held:
            held = [tensor for tensor in self.held if tensor.group == Group.EMBEDDING][:1]
            trained = held if not plan.lora_rank else []
        size = 4 if plan.lora_rank else numbers.gradients
        cast = [tensor for tensor in held if tensor.columns and tensor.group != Group.EXPERT]
        matrices = elements(cast) - (quantized_elements(cast) if plan.base_bits else 0.0)
        adapters = elements(trained) if plan.lora_rank else 0.0
        # Of a fused loss, tiles of the head are cast, not the head.
        scale = numbers.compute / layers if plan.casts_weights else 0.0
        scale = 0.0 if plan.fused_loss and Group.HEAD in groups else scale
        largest = max((tensor.elements for tensor in trained), default=0) / plan.tp
        # A product with a quantized matrix makes a copy of it in the precision of the product.
        copy = largest_matrix(held) / plan.tp * numbers.compute if plan.base_bits and Group.HEAD not in groups else 0.0
        return replace(
            block,
            forward=block.forward + copy,
            backward=block.backward + copy,
            gradients=elements(trained) / layers * size,
            casts=(matrices + adapters) * scale,
            cached=(adapters if plan.lora_rank else matrices) * scale,
            largest=largest * size,
        )


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
    embedding = weights.attach(LayerBlock(0.0), Group.EMBEDDING)
    gradient = 0.0 if shape.tied else embedding.gradients
    # The gradient of the embedding is a tensor of its own before it is added to an existing one.
    again = embedding.gradients if shape.tied or plan.accumulation > 1 else 0.0
    norms = elements([tensor for tensor in weights.trained if tensor.group == Group.NORM])
    return LayerBlock(
        kept=stream + tables + mask, backward=again + stream, gradients=gradient + norms * plan.numbers.gradients
    )


def _loss(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of logits and cross-entropy.

    transformers converts logits to 32 bits, and the loss keeps their log-softmax.  In the backward pass, the gradients
    of the log-softmax and of its input are beside it.  Without whole logits, as in TRL's SFTTrainer since version 1.16
    (``trl/kernels/chunked_logprob.py``), there is one buffer of a whole tile, also for a small vocabulary, and
    gradients are summed in 32 bits and converted at the end.  Liger and Cut Cross-Entropy were not counted.
    """
    plan, compute = sizes.plan, sizes.compute
    width = sizes.shape.vocab / plan.tp
    if plan.fused_loss:
        hidden = sizes.tokens * sizes.shape.hidden
        tile: float = min(sizes.tokens, TILE_TOKENS) * TILE_WORDS * compute
        tile += min(width, TILE_WORDS) * sizes.shape.hidden * compute if plan.casts_weights else 0.0
        converted = plan.numbers.gradients if plan.numbers.gradients != FULL else 0
        of_head = 0 if plan.lora_rank else width * sizes.shape.hidden * (FULL + converted)
        kept = hidden * compute + LOSS_STATISTICS * sizes.tokens * FULL
        return LayerBlock(kept, forward=tile, backward=tile + hidden * FULL + of_head)
    logits = sizes.tokens * sizes.shape.vocab / plan.tp
    if sizes.is_fused:  # the softmax in 32 bits, made in place, and its gradient in the precision of the logits
        return LayerBlock(kept=logits * FULL, forward=logits * compute, backward=logits * compute)
    converted = 0 if compute == FULL else compute
    capped = logits * compute if sizes.shape.logit_cap else 0.0
    return LayerBlock(kept=logits * FULL + capped, forward=logits * (FULL + converted), backward=logits * 2 * FULL)


def torch_tiles(sizes: TensorSizes) -> float:
    """Return the bytes of temporary tiles without Triton."""
    words = min(sizes.shape.vocab / sizes.plan.tp, TILE_WORDS)
    return TORCH_TILES * min(sizes.tokens, TILE_TOKENS) * words * FULL


class StepMemory(NamedTuple):
    """The bytes of a step at one moment."""

    activations: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.gradients


@dataclass
class StepCourse:
    """The memory during a step, and at the moment of its largest sum."""

    is_resident: bool  # whether gradients exist during the whole step
    live: float
    gradients: float  # of all trained weights of the rank, if they are resident; otherwise those so far
    peak: StepMemory = field(default_factory=StepMemory)
    activations: float = 0.0  # largest sum without gradients

    def record(self, extra: float, logits: float = 0.0) -> None:
        memory = StepMemory(self.live + extra, logits, self.gradients)
        self.peak = max(self.peak, memory, key=lambda moment: moment.total)
        self.activations = max(self.activations, memory.activations + logits)

    def add_gradients(self, size: float) -> None:
        self.gradients += 0.0 if self.is_resident else size

    def pass_loss(self, final: LayerBlock, last: LayerBlock, cached: float) -> None:
        """Pass the last norm and the loss; ``cached`` are the casts of checkpointed layers, which are freed between."""
        self.record(final.kept + final.forward)
        self.live += final.kept
        self.record(0.0, last.kept + last.casts + last.forward)
        self.live -= cached
        self.record(0.0, last.kept + last.casts + last.backward)
        self.add_gradients(last.gradients)
        self.record(last.largest if self.is_resident else 0.0, last.kept / 2)
        self.record(final.backward)
        self.live -= final.kept
