"""The exact number of parameters of a model, by the places that layouts and adapters divide."""

from __future__ import annotations

from dataclasses import dataclass

from effllm.memory.model import LatentAttention, ModelShape


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters; those of a layer are of one layer."""

    embedding: int  # with learned positions
    head: int  # 0 if the head is the embedding
    attention: int  # matrices and biases of a layer's attention
    dense_mlp: int
    router: int
    expert: int  # one routed expert
    shared_experts: int  # the shared experts of a layer, with their gate
    norms: int  # of a layer, with the norms of queries and keys
    final_norm: int
    layers: int
    expert_layers: int
    experts: int
    active_experts: int

    @property
    def dense_layer(self) -> int:
        return self.attention + self.dense_mlp + self.norms

    @property
    def expert_layer_without_experts(self) -> int:
        return self.attention + self.router + self.shared_experts + self.norms

    @property
    def routed_experts(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.expert * self.experts * self.expert_layers

    @property
    def total(self) -> int:
        return (
            self.embedding
            + self.head
            + self.final_norm
            + self.dense_layer * (self.layers - self.expert_layers)
            + self.expert_layer_without_experts * self.expert_layers
            + self.routed_experts
        )

    @property
    def active(self) -> int:
        """Parameters that compute one token; the embedding counts whole, as in the published figures."""
        return self.total - self.expert * (self.experts - self.active_experts) * self.expert_layers


def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Return the parameters of the modules that transformers builds for a config."""
    experts = shape.experts
    norm = shape.hidden * ((1 if shape.norm_weight else 0) + (1 if shape.norm_bias else 0))
    return ParameterCounts(
        embedding=(shape.vocab + shape.positions) * shape.hidden,
        head=(0 if shape.tied else shape.vocab * shape.hidden) + (shape.vocab if shape.head_bias else 0),
        attention=_latent(shape, shape.latent) if shape.latent else _attention(shape),
        dense_mlp=_mlp(shape.hidden, shape.intermediate, shape.gated_mlp, shape.mlp_bias),
        router=shape.hidden * experts.total + (experts.total if experts.router_bias else 0) if experts else 0,
        expert=_mlp(shape.hidden, experts.intermediate, shape.gated_mlp, experts.expert_bias) if experts else 0,
        shared_experts=(
            _mlp(shape.hidden, experts.shared_intermediate, shape.gated_mlp, shape.mlp_bias)
            + (shape.hidden if experts.shared_gate else 0)
            if experts and experts.shared_intermediate
            else 0
        ),
        norms=norm * shape.norms_per_layer + shape.qk_norm_per_layer + shape.other_per_layer,
        final_norm=norm if shape.final_norm else 0,
        layers=shape.layers,
        expert_layers=experts.layers if experts else 0,
        experts=experts.total if experts else 0,
        active_experts=experts.active if experts else 0,
    )


def _attention(shape: ModelShape) -> int:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    biases = (q + 2 * kv if shape.qkv_bias else 0) + (shape.hidden if shape.out_bias else 0)
    return shape.hidden * (q + 2 * kv) + q * shape.hidden + biases


def _latent(shape: ModelShape, latent: LatentAttention) -> int:
    """Return the parameters of DeepSeek's attention, with the norms of its ranks."""
    q_size = shape.heads * (latent.nope_head_dim + latent.rope_head_dim)
    queries = (
        shape.hidden * latent.q_rank + latent.q_rank + latent.q_rank * q_size
        if latent.q_rank
        else shape.hidden * q_size
    )
    keys = shape.hidden * (latent.kv_rank + latent.rope_head_dim) + latent.kv_rank
    keys += latent.kv_rank * shape.heads * (latent.nope_head_dim + latent.value_head_dim)
    biases = (latent.q_rank + latent.kv_rank + latent.rope_head_dim if shape.qkv_bias else 0) + (
        shape.hidden if shape.out_bias else 0
    )
    return queries + keys + shape.heads * latent.value_head_dim * shape.hidden + biases


def _mlp(hidden: int, intermediate: int, gated: bool, bias: bool) -> int:
    matrices = 3 if gated else 2
    return matrices * hidden * intermediate + ((matrices - 1) * intermediate + hidden if bias else 0)
