"""What the parts of a transformer layer keep for the backward pass, and need for a moment, in bytes.

The numbers follow the operations of the modules of transformers in PyTorch: which tensors autograd saves is documented
with each function below.  The idea is that of Korthikanti et al., arXiv 2205.05198, section 4, whose layer of GPT with
fused kernels is the implementation "megatron" here.
"""

from __future__ import annotations

from dataclasses import dataclass

from effllm.memory.model import Experts, ModelShape
from effllm.memory.plan import LORA_TARGETS, MemoryPlan

FULL = 4  # bytes of an element in 32 bits


@dataclass(frozen=True)
class LayerBlock:
    """A part of a layer: its bytes during forward and backward."""

    kept: float  # saved for the backward pass
    forward: float = 0.0  # further bytes at the peak of its forward pass
    backward: float = 0.0  # further bytes at the peak of its backward pass
    gradients: float = 0.0  # of the trained weights
    casts: float = 0.0  # copies of weights that autocast makes, kept until the backward pass
    cached: float = 0.0  # those of them that its cache keeps until the end of the forward pass
    largest: float = 0.0  # the largest gradient: a second micro-batch computes it beside the sum


@dataclass(frozen=True)
class TensorSizes:
    """Bytes that all parts of a layer use; tokens are those of one rank."""

    shape: ModelShape
    plan: MemoryPlan

    @property
    def compute(self) -> int:
        return self.plan.numbers.compute

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream: autocast adds in the precision of the weights."""
        return FULL if self.plan.casts_weights else self.compute

    @property
    def product(self) -> int:
        """Bytes of an element of a product's output: those with 4 bits convert it to the precision of the input."""
        return self.stream if self.plan.base_bits == 4 else self.compute

    @property
    def tokens(self) -> int:
        return self.plan.tokens

    @property
    def is_fused(self) -> bool:
        return self.plan.implementation == "megatron"

    @property
    def spread(self) -> int:
        """Number by which sequence parallelism divides what tensor parallelism does not."""
        return self.plan.tp if self.plan.sequence_parallel else 1

    @property
    def windowed(self) -> float:
        """Share of the layers whose attention has a mask for a window."""
        shape = self.shape
        is_narrow = 0 < shape.sliding_window < self.plan.seq_length
        has_mask = is_narrow and self.plan.attention != "flash" and not self.is_fused
        return shape.sliding_layers / shape.layers if has_mask else 0.0

    @property
    def is_lora(self) -> bool:
        return self.plan.lora_rank > 0

    def trains(self, name: str) -> bool:
        """Whether the matrices with a name have adapters, or are trained themselves."""
        return not self.is_lora or name in LORA_TARGETS[self.plan.lora_targets]

    @property
    def adapter(self) -> int:
        """Bytes of an element in an adapter: PEFT keeps adapters of a base in 16 bits in 32 bits."""
        return self.compute if self.plan.numbers.autocast else FULL

    def inputs(self, width: float, names: tuple[str, ...]) -> float:
        """Return what matrix products with one input keep of it.

        A product keeps its input if its matrix is trained.  Autocast casts the input once for each product, and an
        adapter has a copy in its own precision.  Some kernels for quantized matrices keep the input of a frozen one.
        """
        copies = sum(self.trains(name) for name in names)
        if not self.is_lora:
            return self.tokens * width * self.compute * (copies if self.plan.casts_weights else 1)
        frozen = width * self.compute if self.plan.keeps_frozen_inputs else 0.0
        if not copies:
            return self.tokens * frozen
        shared = self.adapter == self.stream and not self.plan.numbers.autocast
        low_rank = copies * self.plan.lora_rank * self.adapter
        return self.tokens * (width * self.adapter * (1 if shared else copies) + low_rank + (0.0 if shared else frozen))


def norm(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of a norm.

    RMSNorm of transformers keeps its input in 32 bits and, for the gradient of its weight, the normalised values in the
    precision of the stream.  LayerNorm is one kernel, which keeps its input, as fused norms do.
    """
    shape, elements = sizes.shape, sizes.tokens * sizes.shape.hidden / sizes.spread
    if shape.layer_norm or sizes.is_fused:
        return LayerBlock(
            elements * sizes.stream + 2 * FULL * sizes.tokens, elements * sizes.stream, 2 * elements * FULL
        )
    normalised = 0 if sizes.is_lora else FULL if shape.architecture.startswith("gemma") else sizes.stream
    return LayerBlock(elements * (FULL + normalised) + FULL * sizes.tokens, elements * FULL, 3 * elements * FULL)


def attention(sizes: TensorSizes) -> LayerBlock:
    """Return the bytes of the attention without its norm.

    Queries, keys and values are kept, and the output, which is the input of the last product.  A fused kernel keeps one
    number for each query and head.  Eager attention keeps the probabilities in 32 bits and in the precision of the
    products, and keys and values are repeated for the heads of a group.
    """
    shape, plan, tp = sizes.shape, sizes.plan, sizes.plan.tp
    tokens, compute = sizes.tokens, sizes.compute
    keys = shape.q_size if shape.latent else shape.kv_heads * shape.head_dim
    values = shape.value_size if shape.latent else keys
    heads = tokens * (shape.q_size + keys + values) * compute / tp
    output = tokens * shape.value_size * compute / tp
    kept = sizes.inputs(shape.hidden / sizes.spread, ("q", "k", "v")) + heads
    if shape.qk_norm_per_layer:
        normalised = 0 if sizes.is_lora else FULL if shape.architecture.startswith("gemma") else compute
        kept += tokens * (shape.q_size + keys) / tp * (FULL + normalised)
    kept += output + (sizes.inputs(shape.value_size / tp, ("o",)) if sizes.is_lora else 0.0)
    forward, backward = heads, heads + output
    if plan.attention == "eager":
        scores = tokens * shape.heads * plan.seq_length / tp
        # The softmax of GPT-2 stays in the precision of the products; that of others is in 32 bits, and converted.
        inner = sizes.stream if shape.architecture == "gpt2" else FULL
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
    return LayerBlock(kept, forward, backward + tokens * shape.hidden * sizes.stream)


def mlp(sizes: TensorSizes, width: float) -> LayerBlock:
    """Return the bytes of an MLP without its norm.

    A gated MLP keeps both products, the activated one and the input of the last product; a fused one recomputes the
    activation.  Without a gate, the input and the output of the activation are kept; of ReLU only the output.
    """
    shape, tp = sizes.shape, sizes.plan.tp
    inner = sizes.tokens * width * sizes.product / tp
    names = ("mlp", "mlp") if shape.gated_mlp else ("mlp",)
    inputs = sizes.inputs(shape.hidden / sizes.spread, names) + sizes.inputs(width / tp, ("mlp",))
    kept = inputs + (_products(shape, sizes.is_fused) - 1) * inner
    return LayerBlock(kept, inner, 2 * inner + sizes.tokens * shape.hidden * sizes.stream)


def _products(shape: ModelShape, is_fused: bool) -> int:
    if shape.gated_mlp:
        return 3 if is_fused else 4
    if is_fused:
        return 2
    return {"relu": 1, "gelu_new": 5}.get(shape.activation, 2)


def experts(sizes: TensorSizes, routed: Experts) -> LayerBlock:
    """Return the bytes of a layer's routed experts: each token passes `active` ones.

    The grouped products of transformers keep the gathered tokens, the products of an MLP, and the outputs before they
    are weighted.  Autocast does not change them: they stay in the precision of the weights.
    """
    plan, hidden = sizes.plan, sizes.shape.hidden
    # Expert parallelism moves tokens between ranks; with an even load each rank has as many as before.
    tokens = float(sizes.tokens * routed.active)
    inner = tokens * routed.intermediate * sizes.stream / plan.tp
    gathered = tokens * hidden * sizes.stream
    kept = _products(sizes.shape, sizes.is_fused) * inner + 2 * gathered
    kept += sizes.tokens * (hidden * sizes.stream / sizes.spread + routed.total * 2 * FULL)
    return LayerBlock(kept, 2 * gathered, 2 * inner + 2 * gathered)
