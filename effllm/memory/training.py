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
    """Return what a step of a rank needs beside weights and optimizer states."""
    sizes = TensorSizes(shape, plan)
    weights = _BlockWeights(sizes, held, stage)
    dense = [
        norm(sizes),
        weights.attach(_attention(sizes), Group.ATTENTION),
        *[norm(sizes)] * (shape.norms_per_layer - 1),
    ]
    layers = [[*dense, weights.attach(mlp(sizes, shape.intermediate), Group.MLP)]]
    routed = shape.experts
    if routed:
        share = routed.layers / shape.layers
        blocks = [*dense, weights.attach(experts(sizes, routed), Group.EXPERT, Group.ROUTER)]
        if routed.shared_intermediate:
            blocks.append(weights.attach(mlp(sizes, routed.shared_intermediate), Group.SHARED))
        count = round(stage.layers * share)
        layers = layers * (stage.layers - count) + [blocks] * count
    else:
        layers = layers * stage.layers
    stream = sizes.tokens * shape.hidden * sizes.stream / sizes.spread
    is_resident = plan.accumulation > 1 or plan.numbers.master == 4 or plan.dp > 1 or plan.pp > 1
    return StepCourse(
        first=_first(sizes, weights, stream),
        layers=layers,
        final=_final(sizes) if stage.is_last else None,
        last=_last(sizes, weights) if stage.is_last else None,
        input_bytes=stream + held_by_products(sizes) + _kept_products(sizes),
        is_checkpointed=plan.checkpointing == "full" or plan.keeps_products,
        is_resident=is_resident,
        gradients=gradient_bytes(plan, weights.trained) if is_resident else 0.0,
        in_flight=min(plan.pp, plan.accumulation) if stage.is_first else 1,
    ).walk()


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
        plan, numbers = self.sizes.plan, self.sizes.plan.numbers
        layers = self._layers(groups[0])
        held = [tensor for tensor in self.held if tensor.group in groups]
        trained = [tensor for tensor in self.trained if tensor.group in groups]
        if Group.HEAD in groups and self.sizes.shape.tied and not held:
            held = [tensor for tensor in self.held if tensor.group == Group.EMBEDDING][:1]
            trained = held if not plan.lora_rank else []
        size = 4 if plan.lora_rank else numbers.gradients
        cast = [tensor for tensor in held if tensor.columns and tensor.group != Group.EXPERT]
        matrices = elements(cast) - (quantized_elements(cast) if plan.base_bits else 0.0)
        adapters = elements(trained) if plan.lora_rank else 0.0
        scale = numbers.compute / layers if plan.casts_weights else 0.0
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

    def _layers(self, group: str) -> float:
        if group in (Group.HEAD, Group.EMBEDDING):
            return 1.0
        if group in (Group.EXPERT, Group.SHARED):
            return max(self.sparse_layers, 1.0)
        return max(self.stage.layers - (self.sparse_layers if group == Group.MLP else 0.0), 1.0)


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


def _final(sizes: TensorSizes) -> LayerBlock:
    block = norm(sizes)
    return replace(block, kept=block.kept + sizes.tokens * sizes.shape.hidden * sizes.compute / sizes.spread)


def _last(sizes: TensorSizes, weights: _BlockWeights) -> LayerBlock:
    if not sizes.plan.fused_loss:
        return weights.attach(_loss(sizes), Group.HEAD)
    block = weights.attach(fused_loss(sizes, trains_head=not sizes.plan.lora_rank), Group.HEAD)
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
    cast = words * sizes.compute if sizes.plan.casts_weights else 0.0
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
    """A walk through the forward and the backward pass of the last micro-batch in flight.

    Kept tensors add up during the forward pass, and are freed in the backward pass while gradients appear.  The peak is
    where their sum is largest: at the loss, or at the end of the backward pass.
    """

    first: LayerBlock  # the embedding, and what lives during the whole step
    layers: Sequence[Sequence[LayerBlock]]  # of one micro-batch
    final: LayerBlock | None  # the last norm with the input of the head; without the head in the last stage
    last: LayerBlock | None  # logits and loss
    input_bytes: float  # what a checkpointed layer keeps
    is_checkpointed: bool
    is_resident: bool  # whether gradients exist during the whole step
    gradients: float  # of all trained weights of the rank, if they are resident; then those so far
    in_flight: int  # micro-batches of a pipeline stage that wait for their backward pass
    live: float = 0.0
    peak: StepMemory = field(default_factory=StepMemory)  # at the moment of the largest sum
    activations: float = 0.0  # largest sum without gradients

    def walk(self) -> StepCourse:
        once = sum(block.casts for layer in self.layers for block in layer)
        stored = sum(self.input_bytes if self.is_checkpointed else _kept(layer) for layer in self.layers)
        stored -= 0.0 if self.is_checkpointed else once
        self.live = stored * (self.in_flight - 1) + self.first.kept
        for layer in self.layers:
            self._forward(layer)
        if self.last is not None and self.final is not None:
            self._loss(self.final, self.last)
        for layer in reversed(self.layers):
            self._backward(layer)
        self._add_gradients(self.first.gradients)
        self._record_peak(self.first.backward)
        return self

    def _record_peak(self, extra: float, logits: float = 0.0) -> None:
        memory = StepMemory(self.live + extra, logits, self.gradients)
        if memory.total > self.peak.total:
            self.peak = memory
        self.activations = max(self.activations, memory.activations + logits)

    def _add_gradients(self, size: float) -> None:
        self.gradients += 0.0 if self.is_resident else size

    def _forward(self, layer: Sequence[LayerBlock]) -> None:
        before = self.live
        for block in layer:
            self._record_peak(block.kept + block.casts + block.forward)
            self.live += block.kept + block.casts
        if self.is_checkpointed:
            # The cache of autocast keeps the casts until the end of the forward pass.
            self.live = before + self.input_bytes + sum(block.cached for block in layer)

    def _loss(self, final: LayerBlock, last: LayerBlock) -> None:
        self._record_peak(final.kept + final.forward)
        self.live += final.kept
        self._record_peak(0.0, last.kept + last.casts + last.forward)
        if self.is_checkpointed:
            self.live -= sum(block.cached for layer in self.layers for block in layer)
        self._record_peak(0.0, last.kept + last.casts + last.backward)
        self._add_gradients(last.gradients)
        self._record_peak(last.largest if self.is_resident else 0.0, last.kept / 2)
        self._record_peak(final.backward)
        self.live -= final.kept

    def _backward(self, layer: Sequence[LayerBlock]) -> None:
        if self.is_checkpointed:
            self.live += _kept(layer) - self.input_bytes
        for block in reversed(layer):
            self._record_peak(block.backward + (block.largest if self.is_resident else 0.0))
            self._add_gradients(block.gradients)
            self.live -= block.kept + block.casts


def _kept(layer: Sequence[LayerBlock]) -> float:
    return sum(block.kept + block.casts for block in layer)
