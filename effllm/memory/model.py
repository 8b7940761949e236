"""The shape of a language model: the sizes from which its parameters and its memory follow."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SIZE = 10**8  # of a single dimension; the largest vocabularies have below 10^6 entries
MAX_LAYERS = 10_000


class Group:
    """The kinds of layers."""

    EMBEDDING, HEAD, ATTENTION, MLP, EXPERT = "embedding", "head", "attention", "mlp", "expert"
    SHARED, ROUTER, NORM = "shared", "router", "norm"


class WrongModel(ValueError):
    """A model description that is not possible, or that cannot be read."""


@dataclass(frozen=True)
class ParameterTensor:
    """A matrix or a vector of parameters, whose shape optimizers and adapters depend on; and how often it occurs."""

    group: str
    name: str  # of a matrix: q, k, v, o or mlp, as in the targets of adapters; "bias" of its bias
    rows: int
    columns: int  # 0: a vector
    count: float  # on a rank: also a part

    @property
    def elements(self) -> int:
        """Elements of one of these tensors."""
        return self.rows * (self.columns or 1)

    @property
    def all_elements(self) -> float:
        return self.elements * self.count


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA) of DeepSeek-V2, arXiv 2405.04434: keys and values of a low rank."""

    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    q_rank: int = 0  # 0: queries have the full rank


@dataclass(frozen=True)
class Experts:
    """The mixture of experts of a layer, and the layers that have one."""

    total: int
    active: int
    intermediate: int
    layers: int  # number of layers with experts; the other layers have a dense MLP
    shared_intermediate: int = 0  # width of all shared experts together
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0  # rows of a learned embedding of positions
    norms_per_layer: int = 2
    final_norm: bool = True
    norm_weight: bool = True
    norm_bias: bool = False
    layer_norm: bool = False  # LayerNorm; otherwise RMSNorm
    qk_norm_per_layer: int = 0  # parameters of the norms of queries and keys
    other_per_layer: int = 0
    experts: Experts | None = None
    latent: LatentAttention | None = None
    sliding_window: int = 0  # 0: full attention
    sliding_layers: int = 0  # number of layers with the sliding window
    activation: str = "silu"
    attention_cap: bool = False  # scores of the attention pass a tanh (Gemma 2)
    logit_cap: bool = False  # logits pass a tanh
    fused_qkv: bool = False  # queries, keys and values are one matrix
    fused_gate: bool = False  # gate and up of the MLP are one matrix; those of experts always are
    notes: tuple[str, ...] = ()
    tensors: tuple[ParameterTensor, ...] = ()  # counted in the model that transformers builds; (): by formulas
    active_parameters: int | None = None  # as stated by the user
    has_known_layers: bool = True  # otherwise what a layer keeps for the backward pass is unknown

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise WrongModel(
                f"{self.heads} attention heads (num_attention_heads, --num-attention-heads) are not a multiple of "
                f"{self.kv_heads} key-value heads (num_key_value_heads, --num-query-groups)"
            )
        experts = self.experts
        if experts is not None and not 1 <= experts.active <= experts.total:
            active = "experts are active (num_experts_per_tok, --moe-router-topk)"
            raise WrongModel(f"{experts.active} of {experts.total} {active}")
        if experts is not None and experts.layers > self.layers:
            raise WrongModel(f"{experts.layers:,} layers with experts in {self.layers:,} layers")

    @property
    def q_size(self) -> int:
        """Elements of the queries of a token."""
        return self.heads * self.qk_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.latent.nope_head_dim + self.latent.rope_head_dim if self.latent else self.head_dim

    @property
    def value_size(self) -> int:
        """Elements of the attention's output of a token, before its projection."""
        return self.heads * (self.latent.value_head_dim if self.latent else self.head_dim)

    @property
    def dense_layers(self) -> int:
        return self.layers - (self.experts.layers if self.experts else 0)
