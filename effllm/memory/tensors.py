"""The parameters of a model, tensor by tensor: optimizers and adapters depend on the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from effllm.memory.model import ModelShape

EMBEDDING, HEAD, ATTENTION, MLP, EXPERT, SHARED, ROUTER, NORM = (
    *("embedding", "head", "attention", "mlp", "expert", "shared", "router"),
    "norm",
)


@dataclass(frozen=True)
class ParameterTensor:
    """A matrix or a vector of parameters, and how often the model has it."""

    group: str
    name: str  # of a matrix: q, k, v, o or mlp, as in the targets of adapters; "bias" of its bias
    rows: int
    columns: int  # 0: a vector
    count: int

    @property
    def elements(self) -> int:
        """Elements of one of these tensors."""
        return self.rows * (self.columns or 1)


def parameter_tensors(shape: ModelShape) -> Iterator[ParameterTensor]:
    """Yield the matrices and vectors of a model; equal ones have one row."""
    hidden, layers = shape.hidden, shape.layers
    yield ParameterTensor(EMBEDDING, "", shape.vocab, hidden, 1)
    if shape.positions:
        yield ParameterTensor(EMBEDDING, "", shape.positions, hidden, 1)
    if not shape.tied:
        yield ParameterTensor(HEAD, "", shape.vocab, hidden, 1)
    if shape.head_bias:
        yield ParameterTensor(HEAD, "", shape.vocab, 0, 1)
    for name, rows, columns, has_bias in _attention(shape):
        yield ParameterTensor(ATTENTION, name, rows, columns, layers)
        if has_bias:
            yield ParameterTensor(ATTENTION, "bias", rows, 0, layers)
    experts = shape.experts
    yield from _mlp(MLP, shape, shape.intermediate, shape.mlp_bias, shape.dense_layers)
    if experts:
        yield ParameterTensor(ROUTER, "", experts.total, hidden, experts.layers)
        if experts.router_bias:
            yield ParameterTensor(ROUTER, "", experts.total, 0, experts.layers)
        yield from _mlp(EXPERT, shape, experts.intermediate, experts.expert_bias, experts.layers * experts.total)
        if experts.shared_intermediate:
            yield from _mlp(SHARED, shape, experts.shared_intermediate, shape.mlp_bias, experts.layers)
        if experts.shared_gate:
            yield ParameterTensor(SHARED, "", 1, hidden, experts.layers)
    norms = shape.norms_per_layer * layers + (1 if shape.final_norm else 0)
    for wanted in (shape.norm_weight, shape.norm_bias):
        if wanted:
            yield ParameterTensor(NORM, "", hidden, 0, norms)
    if shape.qk_norm_per_layer:
        yield ParameterTensor(NORM, "", shape.qk_norm_per_layer // 2, 0, 2 * layers)
    if shape.other_per_layer:
        yield ParameterTensor(ATTENTION, "", shape.other_per_layer, 0, layers)


def _attention(shape: ModelShape) -> Iterator[tuple[str, int, int, bool]]:
    hidden, latent = shape.hidden, shape.latent
    if latent is None:
        keys = shape.kv_heads * shape.head_dim
        if shape.fused_qkv:
            yield "q", shape.q_size + 2 * keys, hidden, shape.qkv_bias
        else:
            yield "q", shape.q_size, hidden, shape.qkv_bias
            yield "k", keys, hidden, shape.qkv_bias
            yield "v", keys, hidden, shape.qkv_bias
    else:
        if latent.q_rank:
            yield "q", latent.q_rank, hidden, shape.qkv_bias
            yield "", latent.q_rank, 0, False
            yield "q", shape.q_size, latent.q_rank, False
        else:
            yield "q", shape.q_size, hidden, False
        yield "k", latent.kv_rank + latent.rope_head_dim, hidden, shape.qkv_bias
        yield "", latent.kv_rank, 0, False
        yield "v", shape.heads * (latent.nope_head_dim + latent.value_head_dim), latent.kv_rank, False
    yield "o", hidden, shape.value_size, shape.out_bias


def _mlp(group: str, shape: ModelShape, width: int, bias: bool, count: int) -> Iterator[ParameterTensor]:
    if not count:
        return
    is_fused = group == EXPERT or shape.fused_gate
    products = 2 if shape.gated_mlp and not is_fused else 1
    first = 2 * width if shape.gated_mlp and is_fused else width
    yield ParameterTensor(group, "mlp", first, shape.hidden, count * products)
    yield ParameterTensor(group, "mlp", shape.hidden, width, count)
    if bias:
        yield ParameterTensor(group, "bias", first, 0, count * products)
        yield ParameterTensor(group, "bias", shape.hidden, 0, count)
