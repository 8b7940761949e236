"""What the parts of a transformer layer keep for the backward pass, and the course of a training step with its peak.

The numbers follow the operations of the modules of transformers in PyTorch: which tensors autograd saves is documented
with each function.  The idea is that of Korthikanti et al., arXiv 2205.05198, section 4, whose layer of GPT with fused
kernels is the implementation "megatron" here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from effllm.memory.plan import LORA_TARGETS, Experts, Group, MemoryPlan, ModelShape, ParameterTensor
from effllm.memory.states import (
    Stage,
    elements,
    gradient_bytes,
    largest_matrix,
    quantized_elements,
    trained_tensors,
)

FULL = 4  # bytes of an element in 32 bits
#: A tile of TRL's head and loss without whole logits has at most this many tokens, and words of the vocabulary.
TILE_TOKENS, TILE_WORDS = 4096, 32768
#: Vectors in 32 bits of all tokens that the forward pass keeps: the loss and its statistics.
LOSS_STATISTICS = 6
#: Tiles in 32 bits that operations of torch need besides, as counted on the CPU; the kernels of Triton need no tile.
TORCH_TILES = 7.25


@dataclass(frozen=True)
class LayerBlock:
    """A part of a layer, such as its attention or a norm: its bytes during forward and backward."""

    kept: float  # saved for the backward pass
    forward: float = 0.0  # further bytes at the peak of its forward pass
    backward: float = 0.0  # further bytes at the peak of its backward pass
    gradients: float = 0.0  # of the trained weights
    casts: float = 0.0  # copies of weights that autocast makes, kept until the backward pass
    cached: float = 0.0  # part of `casts` that the cache of autocast keeps until the end of the forward pass
    largest: float = 0.0  # the largest gradient: a second micro-batch computes it beside the sum


class TensorSizes:
    """Bytes of one element of the tensors that all parts of a layer use, and the tokens of one rank."""

    def __init__(self, shape: ModelShape, plan: MemoryPlan) -> None:
        self.shape, self.plan, self.tokens = shape, plan, plan.tokens
        self.is_megatron, self.is_lora = plan.implementation == "megatron", plan.lora_rank > 0
        self.compute_bytes = plan.numbers.bytes_per_activation  # of the input of a product
        self.stream_bytes = FULL if plan.casts_weights else self.compute_bytes  # residual stream: autocast adds in FULL
        # Of a product's output: those with 4 bits convert it to the precision of the input.
        self.product_bytes = self.stream_bytes if plan.base_bits == 4 else self.compute_bytes
        self.adapter_bytes = self.compute_bytes if plan.numbers.autocast else FULL  # PEFT: FULL, also of a 16-bit base
        self.spread = plan.tp if plan.sequence_parallel else 1  # divides what tensor parallelism does not divide
        has_mask = 0 < shape.sliding_window < plan.seq_length and plan.attention != "flash" and not self.is_megatron
        self.windowed = shape.sliding_layers / shape.layers if has_mask else 0.0  # share of layers with a window mask

    def kept_inputs(self, width: float, names: tuple[str, ...]) -> float:
        """Return what matrix products with one input keep of it.

        A product keeps its input if its matrix is trained.  Autocast casts the input once for each product, and an
        adapter has a copy in its own precision.  Some kernels for quantized matrices keep the input of a frozen one.
        """
        copies = sum(not self.is_lora or name in LORA_TARGETS[self.plan.lora_targets] for name in names)
        if not self.is_lora:
            return self.tokens * width * self.compute_bytes * (copies if self.plan.casts_weights else 1)
        frozen = width * self.compute_bytes if self.plan.keeps_frozen_inputs else 0.0
        if not copies:
            return self.tokens * frozen
        low_rank = copies * self.plan.lora_rank * self.adapter_bytes
        if self.adapter_bytes == self.stream_bytes and not self.plan.numbers.autocast:  # nothing is cast: one input
            return self.tokens * (width * self.adapter_bytes + low_rank)
        return self.tokens * (width * self.adapter_bytes * copies + low_rank + frozen)


def norm(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of a norm.

    RMSNorm of transformers keeps its input in 32 bits and, for the gradient of its weight, the normalised values in the
    precision of the stream.  LayerNorm is one kernel, which keeps its input, as fused norms do.
    """
    shape, elements = sizes.shape, sizes.tokens * sizes.shape.hidden / sizes.spread
    if shape.layer_norm or sizes.is_megatron:
        size = elements * sizes.stream_bytes
        return LayerBlock(size + 2 * FULL * sizes.tokens, size, 2 * elements * FULL)
    normalised = 0 if sizes.is_lora else FULL if shape.architecture.startswith("gemma") else sizes.stream_bytes
    return LayerBlock(elements * (FULL + normalised) + FULL * sizes.tokens, elements * FULL, 3 * elements * FULL)


def attention(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of the attention without its norm.

    Queries, keys and values are kept, and the output, which is the input of the last product.  A fused kernel keeps one
    number for each query and head.  Eager attention keeps the probabilities in 32 bits and in the precision of the
    products, and keys and values are repeated for the heads of a group.
    """
    shape, plan, tp = sizes.shape, sizes.plan, sizes.plan.tp
    tokens, compute = sizes.tokens, sizes.compute_bytes
    keys = shape.q_size if shape.latent else shape.kv_heads * shape.head_dim
    values = shape.value_size if shape.latent else keys
    heads = tokens * (shape.q_size + keys + values) * compute / tp
    output = tokens * shape.value_size * compute / tp
    kept = sizes.kept_inputs(shape.hidden / sizes.spread, ("q", "k", "v")) + heads
    if shape.qk_norm_per_layer:
        normalised = 0 if sizes.is_lora else FULL if shape.architecture.startswith("gemma") else compute
        kept += tokens * (shape.q_size + keys) / tp * (FULL + normalised)
    kept += output + (sizes.kept_inputs(shape.value_size / tp, ("o",)) if sizes.is_lora else 0.0)
    forward, backward = heads, heads + output
    if plan.attention == "eager":
        scores = tokens * shape.heads * plan.seq_length / tp
        # The softmax of GPT-2 stays in the precision of the products; that of others is in 32 bits, and converted.
        inner = sizes.stream_bytes if shape.architecture == "gpt2" else FULL
        converted = compute if compute < inner else 0
        kept += scores * (inner + converted + (compute if shape.attention_cap else 0))
        if shape.kv_heads != shape.heads and not shape.latent:
            kept += 2 * output
        forward = max(forward, scores * compute)
        backward = max(backward, scores * (2 * inner - converted))
    else:
        kept += tokens * shape.heads * FULL / tp
        # With a mask, keys and values are repeated, and each call converts the mask.
        repeated = 2 * output - tokens * (keys + values) * compute / tp
        kept += sizes.windowed * (repeated + tokens * plan.seq_length * compute)
    if shape.latent:
        latent = shape.latent
        ranks = 2 * (latent.q_rank + latent.kv_rank) + latent.kv_rank + latent.rope_head_dim
        kept += tokens * ranks * (FULL + compute)
    return LayerBlock(kept, forward, backward + tokens * shape.hidden * sizes.stream_bytes)


def mlp(sizes: TensorSizes, width: float) -> LayerBlock:
    """Return the bytes of an MLP without its norm.

    A gated MLP keeps both products, the activated one and the input of the last product; a fused one recomputes the
    activation.  Without a gate, the input and the output of the activation are kept; of ReLU only the output.
    """
    shape, tp = sizes.shape, sizes.plan.tp
    inner = sizes.tokens * width * sizes.product_bytes / tp
    names = ("mlp", "mlp") if shape.gated_mlp else ("mlp",)
    inputs = sizes.kept_inputs(shape.hidden / sizes.spread, names) + sizes.kept_inputs(width / tp, ("mlp",))
    kept = inputs + (_num_kept_tensors(shape, sizes.is_megatron) - 1) * inner  # the last product's input is in inputs
    return LayerBlock(kept, inner, 2 * inner + sizes.tokens * shape.hidden * sizes.stream_bytes)


def _num_kept_tensors(shape: ModelShape, is_megatron: bool) -> int:
    of_activation = 2 if is_megatron else {"relu": 1, "gelu_new": 5}.get(shape.activation, 2)
    return (3 if is_megatron else 4) if shape.gated_mlp else of_activation


def experts(sizes: TensorSizes, routed: Experts) -> LayerBlock:
    """Return the bytes of a layer's routed experts: each token passes `active` ones.

    The grouped products of transformers keep the gathered tokens, the products of an MLP, and the outputs before they
    are weighted.  Autocast does not change them: they stay in the precision of the weights.
    """
    plan, hidden = sizes.plan, sizes.shape.hidden
    # Expert parallelism moves tokens between ranks; with an even load each rank has as many as before.
    tokens = float(sizes.tokens * routed.active)
    inner = tokens * routed.intermediate * sizes.stream_bytes / plan.tp
    gathered = tokens * hidden * sizes.stream_bytes
    kept = _num_kept_tensors(sizes.shape, sizes.is_megatron) * inner + 2 * gathered
    kept += sizes.tokens * (hidden * sizes.stream_bytes / sizes.spread + routed.total * 2 * FULL)
    return LayerBlock(kept, 2 * gathered, 2 * inner + 2 * gathered)


def training_course(shape: ModelShape, plan: MemoryPlan, stage: Stage, held: list[ParameterTensor]) -> StepCourse:
    """Walk through the forward and the backward pass of the last micro-batch in flight.

    Kept tensors add up during the forward pass, and are freed in the backward pass while gradients appear.  The peak is
    where their sum is largest: at the loss, or at the end of the backward pass.
    """
    sizes = TensorSizes(shape, plan)
    weights = _BlockWeights(sizes, held, stage)
    layers = _layer_blocks(sizes, weights, stage)
    residual = sizes.tokens * shape.hidden * sizes.stream_bytes / sizes.spread
    whole_step = _whole_step_block(sizes, weights, residual)
    is_checkpointed = plan.checkpointing == "full" or plan.keeps_products
    input_bytes = residual + held_by_products(sizes) + _kept_product_bytes(sizes)  # what a checkpointed layer keeps
    shared_casts = 0.0 if is_checkpointed else sum(block.casts for layer in layers for block in layer)
    micro_batch_bytes = sum(input_bytes if is_checkpointed else _kept_bytes(layer) for layer in layers) - shared_casts
    in_flight = min(plan.pp, plan.accumulation) if stage.is_first else 1
    is_resident = plan.accumulation > 1 or plan.numbers.bytes_per_master == 4 or plan.dp > 1 or plan.pp > 1
    gradients = gradient_bytes(plan, weights.trained) if is_resident else 0.0
    course = StepCourse(is_resident, micro_batch_bytes * (in_flight - 1) + whole_step.kept, gradients)
    for layer in layers:
        before = course.live
        for block in layer:
            course.record(block.kept + block.casts + block.forward)
            course.live += block.kept + block.casts
        if is_checkpointed:  # the cache of autocast keeps the casts until the end of the forward pass
            course.live = before + input_bytes + sum(block.cached for block in layer)
    if stage.is_last:
        final = norm(sizes)
        final = replace(final, kept=final.kept + sizes.tokens * shape.hidden * sizes.compute_bytes / sizes.spread)
        cached = sum(block.cached for layer in layers for block in layer) if is_checkpointed else 0.0
        course.pass_loss(final, weights.added_to(_loss(sizes), Group.HEAD), cached)
    for layer in reversed(layers):
        if is_checkpointed:
            course.live += _kept_bytes(layer) - input_bytes
        for block in reversed(layer):
            course.record(block.backward + (block.largest if is_resident else 0.0))
            course.add_gradients(block.gradients)
            course.live -= block.kept + block.casts
    course.add_gradients(whole_step.gradients)
    course.record(whole_step.backward)
    return course


def _layer_blocks(sizes: TensorSizes, weights: _BlockWeights, stage: Stage) -> list[list[LayerBlock]]:
    """Return the blocks of each layer of a stage, dense layers first."""
    shape, routed = sizes.shape, sizes.shape.experts
    block = attention(sizes)
    if sizes.plan.checkpointing == "selective":  # recomputes the probabilities (Korthikanti et al., section 5)
        fused = attention(TensorSizes(shape, replace(sizes.plan, attention="sdpa")))
        block = replace(block, kept=fused.kept, backward=block.backward + block.kept - fused.kept)
    before_mlp = [norm(sizes), weights.added_to(block, Group.ATTENTION), *[norm(sizes)] * (shape.norms_per_layer - 1)]
    dense_layer = [*before_mlp, weights.added_to(mlp(sizes, shape.intermediate), Group.MLP)]
    if not routed:
        return [dense_layer] * stage.layers
    expert_layer = [*before_mlp, weights.added_to(experts(sizes, routed), Group.EXPERT, Group.ROUTER)]
    if routed.shared_intermediate:
        expert_layer.append(weights.added_to(mlp(sizes, routed.shared_intermediate), Group.SHARED))
    num_expert_layers = round(stage.layers * (routed.layers / shape.layers))
    return [dense_layer] * (stage.layers - num_expert_layers) + [expert_layer] * num_expert_layers


def _kept_bytes(layer: Sequence[LayerBlock]) -> float:
    return sum(block.kept + block.casts for block in layer)


def held_by_products(sizes: TensorSizes) -> float:
    """Return the inputs of a layer's products of 8 bits that checkpointing does not free, as transformers 5 uses it.

    MatMul8bitLt of bitsandbytes 0.50 holds them as attributes of a node, which ``use_reentrant=True`` does not make.
    """
    shape, plan = sizes.shape, sizes.plan
    if plan.base_bits != 8 or plan.checkpointing != "full":
        return 0.0
    of_mlp = (shape.hidden / sizes.spread + shape.intermediate / plan.tp) * shape.dense_layers / shape.layers
    of_attention = shape.hidden / sizes.spread + shape.value_size / plan.tp
    return sizes.tokens * sizes.compute_bytes * (of_attention + of_mlp)


def _kept_product_bytes(sizes: TensorSizes) -> float:
    """Return what selective checkpointing of operations keeps: attention, and every second product, as in torchtitan.

    Those of q, v, the gate and the projection to the stream (``torchtitan/distributed/activation_checkpoint.py``).
    """
    shape, tp, routed = sizes.shape, sizes.plan.tp, sizes.shape.experts
    if not sizes.plan.keeps_products:
        return 0.0
    width = routed.intermediate * routed.active + routed.shared_intermediate if routed else shape.intermediate
    inner = shape.q_size + shape.kv_heads * shape.head_dim + shape.value_size + width
    return sizes.tokens * sizes.compute_bytes * (inner / tp + shape.hidden / sizes.spread)


class _BlockWeights:
    """The gradients, and the casts of autocast, of the weights of a block."""

    def __init__(self, sizes: TensorSizes, held: list[ParameterTensor], stage: Stage) -> None:
        self.sizes, self.stage, self.held = sizes, stage, held
        self.trained = trained_tensors(sizes.plan, held)
        shape = sizes.shape
        self.expert_layers = stage.layers * (shape.experts.layers / shape.layers if shape.experts else 0.0)

    def added_to(self, block: LayerBlock, *groups: str) -> LayerBlock:
        """Return a block with the gradients and casts of its weights: of these groups, in the layers of the first."""
        plan, compute_bytes = self.sizes.plan, self.sizes.compute_bytes
        layers_by_group = {Group.HEAD: 1.0, Group.EMBEDDING: 1.0, Group.MLP: self.stage.layers - self.expert_layers}
        layers_by_group |= dict.fromkeys((Group.EXPERT, Group.SHARED), self.expert_layers)
        layers = max(layers_by_group.get(groups[0], self.stage.layers), 1.0)
        held = [tensor for tensor in self.held if tensor.group in groups]
        trained = [tensor for tensor in self.trained if tensor.group in groups]
        if Group.HEAD in groups and self.sizes.shape.tied and not held:
            held = [tensor for tensor in self.held if tensor.group == Group.EMBEDDING][:1]
            trained = held if not plan.lora_rank else []
        bytes_per_gradient = 4 if plan.lora_rank else plan.numbers.bytes_per_gradient
        cast_tensors = [tensor for tensor in held if tensor.columns and tensor.group != Group.EXPERT]
        matrices = elements(cast_tensors) - (quantized_elements(cast_tensors) if plan.base_bits else 0.0)
        adapters = elements(trained) if plan.lora_rank else 0.0
        # Of a fused loss, tiles of the head are cast, not the head.
        layer_bytes = compute_bytes / layers if plan.casts_weights else 0.0  # of an element, over the layers
        layer_bytes = 0.0 if plan.fused_loss and Group.HEAD in groups else layer_bytes
        largest = max((tensor.elements for tensor in trained), default=0) / plan.tp
        # A product with a quantized matrix makes a copy of it in the precision of the product.
        copy = largest_matrix(held) / plan.tp * compute_bytes if plan.base_bits and Group.HEAD not in groups else 0.0
        return replace(
            block,
            forward=block.forward + copy,
            backward=block.backward + copy,
            gradients=elements(trained) / layers * bytes_per_gradient,
            casts=(matrices + adapters) * layer_bytes,
            cached=(adapters if plan.lora_rank else matrices) * layer_bytes,
            largest=largest * bytes_per_gradient,
        )


def _whole_step_block(sizes: TensorSizes, weights: _BlockWeights, residual: float) -> LayerBlock:
    """Return what lives during the whole step (residual stream, rotations, mask), and the embedding's gradient."""
    shape, plan = sizes.shape, sizes.plan
    rotations = 0 if shape.positions else 2 * plan.seq_length * shape.qk_head_dim * sizes.stream_bytes
    mask = float(plan.micro_batch * plan.seq_length**2 * sizes.stream_bytes) if plan.attention == "eager" else 0.0
    if sizes.windowed and plan.attention == "sdpa":
        mask = float(plan.micro_batch * plan.seq_length**2)
    elif 0 < sizes.windowed < 1:
        mask *= 2  # another one for the layers with a window
    embedding = weights.added_to(LayerBlock(0.0), Group.EMBEDDING)
    gradient = 0.0 if shape.tied else embedding.gradients
    # The gradient of the embedding is a tensor of its own before it is added to an existing one.
    separate_gradient = embedding.gradients if shape.tied or plan.accumulation > 1 else 0.0
    norms = elements([tensor for tensor in weights.trained if tensor.group == Group.NORM])
    gradient += norms * plan.numbers.bytes_per_gradient
    return LayerBlock(residual + rotations + mask, backward=separate_gradient + residual, gradients=gradient)


def _loss(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of logits and cross-entropy.

    transformers converts logits to 32 bits, and the loss keeps their log-softmax.  In the backward pass, the gradients
    of the log-softmax and of its input are beside it.  Without whole logits, as in TRL's SFTTrainer since version 1.16
    (``trl/kernels/chunked_logprob.py``), there is a buffer of a whole tile, and gradients are summed in 32 bits.
    """
    plan, compute, width = sizes.plan, sizes.compute_bytes, sizes.shape.vocab / sizes.plan.tp
    if plan.fused_loss:
        hidden_elements = sizes.tokens * sizes.shape.hidden
        tile: float = min(sizes.tokens, TILE_TOKENS) * TILE_WORDS * compute
        tile += min(width, TILE_WORDS) * sizes.shape.hidden * compute if plan.casts_weights else 0.0
        converted = plan.numbers.bytes_per_gradient if plan.numbers.bytes_per_gradient != FULL else 0
        head_gradient = 0 if plan.lora_rank else width * sizes.shape.hidden * (FULL + converted)
        kept = hidden_elements * compute + LOSS_STATISTICS * sizes.tokens * FULL
        return LayerBlock(kept, forward=tile, backward=tile + hidden_elements * FULL + head_gradient)
    logits = sizes.tokens * sizes.shape.vocab / plan.tp
    if sizes.is_megatron:  # the softmax in 32 bits, made in place, and its gradient in the precision of the logits
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
    live: float  # bytes of activations now
    gradients: float  # of all trained weights of the rank, if they are resident; otherwise those so far
    peak: StepMemory = field(default_factory=StepMemory)
    activations: float = 0.0  # largest sum without gradients

    def record(self, extra_bytes: float, logits: float = 0.0) -> None:
        memory = StepMemory(self.live + extra_bytes, logits, self.gradients)
        self.peak = max(self.peak, memory, key=lambda moment: moment.total)
        self.activations = max(self.activations, memory.activations + logits)

    def add_gradients(self, size: float) -> None:
        self.gradients += 0.0 if self.is_resident else size  # resident ones are in the sum from the start

    def pass_loss(self, final: LayerBlock, loss: LayerBlock, cached: float) -> None:
        """Pass the last norm and the loss; ``cached`` are the casts of checkpointed layers, which are freed between."""
        self.record(final.kept + final.forward)
        self.live += final.kept
        self.record(0.0, loss.kept + loss.casts + loss.forward)
        self.live -= cached
        self.record(0.0, loss.kept + loss.casts + loss.backward)
        self.add_gradients(loss.gradients)
        self.record(loss.largest if self.is_resident else 0.0, loss.kept / 2)  # gradients of the logits, in 16 bits
        self.record(final.backward)
        self.live -= final.kept
