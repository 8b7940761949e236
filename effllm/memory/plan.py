"""The sizes of a model, and how it is trained or served: precision, optimizer, batch and layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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
        return self.rows * (self.columns or 1)

    @property
    def all_elements(self) -> float:
        return self.elements * self.count


class LatentAttention(NamedTuple):
    """Multi-head latent attention (MLA) of DeepSeek-V2, arXiv 2405.04434: keys and values of a low rank."""

    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int
    q_rank: int = 0  # 0: queries have the full rank


class Experts(NamedTuple):
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
    tied: bool  # the matrix of the head is that of the embedding
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    positions: int = 0  # rows of a learned embedding of positions; 0: no such embedding
    norms_per_layer: int = 2
    final_norm: bool = True
    norm_weight: bool = True
    norm_bias: bool = False
    layer_norm: bool = False  # LayerNorm; otherwise RMSNorm
    qk_norm_per_layer: int = 0  # parameters of the norms of queries and keys
    other_per_layer: int = 0  # further parameters, such as attention sinks
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


TRAINING, INFERENCE = "training", "inference"


class ImpossiblePlan(ValueError):
    """A plan that is not possible, with the reason."""


class Precision(NamedTuple):
    """Bytes of one element of each part whose size a precision determines."""

    bytes_per_weight: int
    bytes_per_gradient: int
    bytes_per_state: int  # of the optimizer
    bytes_per_activation: int  # also of the inputs and copies of weights of matrix products
    bytes_per_master: int = 0  # of the optimizer's own copy of the weights
    autocast: bool = False  # torch.autocast casts the weights of each matrix product


PRECISIONS = {
    "fp32": Precision(4, 4, 4, 4),
    "bf16": Precision(2, 2, 2, 2),
    "fp16": Precision(2, 2, 2, 2),
    "bf16-mixed": Precision(4, 4, 4, 2, autocast=True),
    "fp16-mixed": Precision(4, 4, 4, 2, autocast=True),
    "bf16-master": Precision(2, 4, 4, 2, bytes_per_master=4),  # Megatron
    # Megatron: 20 bytes, 18 and a copy of the gradients in 32 bits (its table of its distributed optimizer)
    "fp16-master": Precision(2, 2, 4, 2, bytes_per_master=8),
    "bf16-zero": Precision(2, 2, 4, 2, bytes_per_master=4),  # DeepSpeed
}

#: Number of states of the size of the weights: of Muon those of matrices; Adafactor has sums of rows and columns.
OPTIMIZERS = {"adamw": 2, "adamw-8bit": 2, "lion": 1, "sgd-momentum": 1, "sgd": 0, "adafactor": 0, "muon": 1}

CHECKPOINTING = ("none", "selective", "full")
ATTENTION = ("sdpa", "flash", "eager")
IMPLEMENTATIONS = ("transformers", "megatron")
LORA_TARGETS = {"qv": ("q", "v"), "attention": ("q", "k", "v", "o"), "all": ("q", "k", "v", "o", "mlp")}
MAX_COUNT = 10**7


@dataclass(frozen=True)
class MemoryPlan:
    """A training or an inference of a model on a number of GPUs."""

    mode: str = TRAINING
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    checkpointing: str = "none"
    attention: str = "sdpa"
    implementation: str = "transformers"
    seq_length: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    lora_rank: int = 0  # 0: all weights are trained
    lora_targets: str = "all"
    base_bits: int = 0  # bits of a quantized frozen base (QLoRA); 0: the precision of the weights
    fused_loss: bool = False  # no whole logits: head and loss in tiles
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    zero: int = 0  # stage of ZeRO; FSDP is stage 3, or 2 with SHARD_GRAD_OP
    sequence_parallel: bool = False

    @property
    def numbers(self) -> Precision:
        return PRECISIONS[self.precision]

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights: FSDP gathers them in the precision of the products, and nothing is left."""
        return self.numbers.autocast and self.zero < 3

    @property
    def keeps_products(self) -> bool:
        """Whether selective checkpointing is that of operations, as in torchtitan: fused attention keeps no scores."""
        has_fused_attention = self.implementation == "transformers" and self.attention != "eager"
        return self.checkpointing == "selective" and has_fused_attention

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def is_training(self) -> bool:
        return self.mode == TRAINING

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank."""
        return self.micro_batch * -(-self.seq_length // self.cp)

    @property
    def keeps_frozen_inputs(self) -> bool:
        """Whether products with frozen weights keep their inputs, as those of 8 bits of bitsandbytes do."""
        return self.base_bits == 8

    @property
    def shards(self) -> int:
        """Ranks between which ZeRO divides: those of data and context parallelism."""
        return self.dp * self.cp


def check_plan(plan: MemoryPlan, shape: ModelShape) -> None:
    """Raise an error if a plan contradicts itself or the model."""
    allowed: dict[str, tuple[object, Iterable[object]]] = {
        "precision": (plan.precision, PRECISIONS),
        "optimizer": (plan.optimizer, OPTIMIZERS),
        "checkpointing": (plan.checkpointing, CHECKPOINTING),
        "attention": (plan.attention, ATTENTION),
        "implementation": (plan.implementation, IMPLEMENTATIONS),
        "LoRA targets": (plan.lora_targets, LORA_TARGETS),
        "bits of the base": (plan.base_bits, (0, 4, 8)),
        "ZeRO stage": (plan.zero, (0, 1, 2, 3)),
    }
    for name, (value, choices) in allowed.items():
        if value not in choices:
            raise ImpossiblePlan(f"{name} {value} is not one of: {', '.join(map(str, choices))}")
    parallel = {"tensor": plan.tp, "pipeline": plan.pp, "context": plan.cp, "expert": plan.ep, "data": plan.dp}
    counts = {"sequence length": plan.seq_length, "micro-batch": plan.micro_batch, "accumulation": plan.accumulation}
    counts |= {f"{name} parallelism": size for name, size in parallel.items()}
    for name, size in counts.items():
        if not 1 <= size <= MAX_COUNT:
            raise ImpossiblePlan(f"{name} is {size:,}: a number from 1 to {MAX_COUNT:,} is possible")
    experts = shape.experts.total if shape.experts else 0
    ep, ranks = plan.ep, plan.gpus // plan.pp
    split = [name for name, size in (("TP", plan.tp), ("PP", plan.pp), ("CP", plan.cp), ("EP", plan.ep)) if size > 1]
    wrong = {
        f"a micro-batch of {plan.tokens:,} tokens is not possible": plan.tokens > 10**10,
        f"LoRA rank {plan.lora_rank:,} is not between 0 and the hidden size {shape.hidden:,}": (
            not 0 <= plan.lora_rank <= shape.hidden
        ),
        f"a base of {plan.base_bits} bits cannot be trained: give --lora RANK, or --mode inference": (
            plan.base_bits and plan.is_training and not plan.lora_rank
        ),
        f"{', '.join(split)}: it is not known how {shape.architecture} is divided; give --dp, --zero": (
            split and not shape.has_known_layers
        ),
        f"tensor parallelism {plan.tp} does not divide {shape.heads} attention heads": shape.heads % plan.tp,
        f"pipeline parallelism {plan.pp} is above the {shape.layers} layers": plan.pp > shape.layers,
        f"context parallelism {plan.cp} is above the sequence length {plan.seq_length}": plan.cp > plan.seq_length,
        f"expert parallelism {ep}: the model has no experts": ep > 1 and not experts,
        f"expert parallelism {ep} does not divide {experts} experts": experts % ep,
        f"expert parallelism {ep} is above the {ranks} ranks of a pipeline stage: give more GPUs (--gpus or --dp)": (
            ep > ranks
        ),
        "sequence parallelism needs tensor parallelism": plan.sequence_parallel and plan.tp == 1,
    }
    for reason, is_wrong in wrong.items():
        if is_wrong:
            raise ImpossiblePlan(reason)
