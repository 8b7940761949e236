"""Bytes that a rank holds during the whole training: weights, gradients and optimizer states.

ZeRO (arXiv 1910.02054, section 5) divides the states from stage 1 on, the gradients from stage 2 on, the weights at 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from effllm.memory.plan import LORA_TARGETS, OPTIMIZERS, Experts, Group, MemoryPlan, ModelShape, ParameterTensor

#: Of an element of an adapter: PEFT makes adapters in 32 bits, also of a base in 16 bits.
ADAPTER_BYTES = 4
#: bitsandbytes quantizes states in blocks of 256 elements with a scale of 32 bits; smaller tensors stay in 32 bits.
STATE_BLOCK, SMALLEST_8BIT = 256, 4096
#: NF4 with blocks of 64 elements: a scale of 32 bits, the default of bitsandbytes, or of 8 bits with a second scale
#: for each 256 (double quantization, arXiv 2305.14314, section 3).  8 bits: a scale for a row, of about 4096 elements.
NF4_BYTES, NF4_DOUBLE_BYTES, INT8_BYTES = 0.5 + 4 / 64, 0.5 + 1 / 64 + 4 / (64 * 256), 1 + 4 / 4096


def parameter_tensors(shape: ModelShape) -> list[ParameterTensor]:
    """Return the matrices and vectors of a model; equal ones have one row."""
    if shape.tensors:
        return list(shape.tensors)
    hidden, layers, experts = shape.hidden, shape.layers, shape.experts
    norms = shape.norms_per_layer * layers + shape.final_norm
    tensors = [
        ParameterTensor(Group.EMBEDDING, "", shape.vocab, hidden, 1),
        ParameterTensor(Group.EMBEDDING, "", shape.positions, hidden, 1),
        ParameterTensor(Group.HEAD, "", shape.vocab, hidden, 1 - shape.tied),
        ParameterTensor(Group.HEAD, "", shape.vocab, 0, int(shape.head_bias)),
        *_attention_tensors(shape),
        *_mlp_tensors(Group.MLP, shape, shape.intermediate, shape.mlp_bias, shape.dense_layers),
        *(_expert_tensors(shape, experts) if experts else ()),
        ParameterTensor(Group.NORM, "", hidden, 0, norms * shape.norm_weight),
        ParameterTensor(Group.NORM, "", hidden, 0, norms * shape.norm_bias),
        ParameterTensor(Group.NORM, "", shape.qk_norm_per_layer // 2, 0, 2 * layers),
        ParameterTensor(Group.ATTENTION, "", shape.other_per_layer, 0, layers),
    ]
    return [tensor for tensor in tensors if tensor.rows and tensor.count]


def _attention_tensors(shape: ModelShape) -> Iterator[ParameterTensor]:
    hidden, latent, bias = shape.hidden, shape.latent, shape.qkv_bias
    keys = shape.kv_heads * shape.head_dim
    if latent:
        values = shape.heads * (latent.nope_head_dim + latent.value_head_dim)
        matrices = [
            ("q", latent.q_rank, hidden, bias),
            ("", latent.q_rank, 0, False),
            ("q", shape.q_size, latent.q_rank or hidden, False),
            ("k", latent.kv_rank + latent.rope_head_dim, hidden, bias),
            ("", latent.kv_rank, 0, False),
            ("v", values, latent.kv_rank, False),
        ]
    elif shape.fused_qkv:
        matrices = [("q", shape.q_size + 2 * keys, hidden, bias)]
    else:
        matrices = [(name, size, hidden, bias) for name, size in (("q", shape.q_size), ("k", keys), ("v", keys))]
    for name, rows, columns, has_bias in (*matrices, ("o", hidden, shape.value_size, shape.out_bias)):
        yield ParameterTensor(Group.ATTENTION, name, rows, columns, shape.layers)
        yield ParameterTensor(Group.ATTENTION, "bias", rows, 0, shape.layers * has_bias)


def _mlp_tensors(group: str, shape: ModelShape, width: int, bias: bool, count: int) -> Iterator[ParameterTensor]:
    has_fused_gate = group == Group.EXPERT or shape.fused_gate
    first_matrices = 2 if shape.gated_mlp and not has_fused_gate else 1
    first_rows = 2 * width if shape.gated_mlp and has_fused_gate else width
    yield ParameterTensor(group, "mlp", first_rows, shape.hidden, count * first_matrices)
    yield ParameterTensor(group, "mlp", shape.hidden, width, count)
    yield ParameterTensor(group, "bias", first_rows, 0, count * first_matrices * bias)
    yield ParameterTensor(group, "bias", shape.hidden, 0, count * bias)


def _expert_tensors(shape: ModelShape, experts: Experts) -> Iterator[ParameterTensor]:
    yield ParameterTensor(Group.ROUTER, "", experts.total, shape.hidden, experts.layers)
    yield ParameterTensor(Group.ROUTER, "", experts.total, 0, experts.layers * experts.router_bias)
    width, count = experts.intermediate, experts.layers * experts.total
    yield from _mlp_tensors(Group.EXPERT, shape, width, experts.expert_bias, count)
    shared = experts.shared_intermediate
    yield from _mlp_tensors(Group.SHARED, shape, shared, shape.mlp_bias, experts.layers if shared else 0)
    yield ParameterTensor(Group.SHARED, "", 1, shape.hidden, experts.layers * experts.shared_gate)


class ParameterCounts(NamedTuple):
    """The exact number of parameters of a model."""

    total: int
    active: int | None  # that compute one token; the embedding counts whole, as in the published figures


def count_parameters(shape: ModelShape) -> ParameterCounts:
    """Return the parameters of the modules that transformers builds for a config."""
    tensors, experts = parameter_tensors(shape), shape.experts
    total = int(elements(tensors))
    routed = int(elements([tensor for tensor in tensors if tensor.group == Group.EXPERT]))
    if shape.active_parameters is not None or (routed and experts is None):
        return ParameterCounts(total, shape.active_parameters)
    idle = routed * (experts.total - experts.active) // experts.total if experts else 0
    return ParameterCounts(total, total - idle)


class Stage(NamedTuple):
    """The first or the last stage of a pipeline."""

    is_first: bool
    is_last: bool
    layers: int


def stages(shape: ModelShape, plan: MemoryPlan) -> list[Stage]:
    layers = -(-shape.layers // plan.pp)  # rounded up
    return [Stage(True, True, layers)] if plan.pp == 1 else [Stage(True, False, layers), Stage(False, True, layers)]


def rank_tensors(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> list[ParameterTensor]:
    """Return the tensors of a rank of a stage; their counts are what it holds before ZeRO divides them."""
    tensors = []
    for tensor in parameter_tensors(shape):
        count = tensor.count * (stage.layers / shape.layers)
        if tensor.group == Group.EMBEDDING:
            count = tensor.count if stage.is_first or (stage.is_last and shape.tied) else 0
        elif tensor.group == Group.HEAD:
            count = tensor.count if stage.is_last else 0
        elif tensor.group == Group.EXPERT:
            count /= plan.ep
        if tensor.group not in (Group.NORM, Group.ROUTER) and tensor.columns:
            count /= plan.tp
        if count:
            tensors.append(replace(tensor, count=count))
    return tensors


def trained_tensors(plan: MemoryPlan, held: list[ParameterTensor]) -> list[ParameterTensor]:
    """Return the tensors that the optimizer changes: all, or the adapters of LoRA.

    An adapter of a matrix of m rows and n columns has r (m + n) elements (arXiv 2106.09685).  PEFT adapts modules, and
    the experts of transformers are parameters of one module.
    """
    if not plan.lora_rank:
        return held
    rank, adapters = plan.lora_rank, []
    left_out = [Group.EMBEDDING, Group.HEAD, *([] if plan.implementation == "megatron" else [Group.EXPERT])]
    for tensor in held:
        if tensor.name in LORA_TARGETS[plan.lora_targets] and tensor.group not in left_out:
            adapters += [replace(tensor, rows=rank), replace(tensor, columns=rank)]
    return adapters


def divided(plan: MemoryPlan, tensors: list[ParameterTensor], from_stage: int) -> list[ParameterTensor]:
    """Return tensors with the counts of a rank if ZeRO divides them from a stage on; EP has divided experts before."""
    if plan.zero < from_stage or plan.shards == 1:
        return tensors
    shards = {Group.EXPERT: max(plan.shards / plan.ep, 1)}
    return [replace(tensor, count=tensor.count / shards.get(tensor.group, plan.shards)) for tensor in tensors]


def elements(tensors: Iterable[ParameterTensor]) -> float:
    return sum(tensor.all_elements for tensor in tensors)


def weight_bytes(plan: MemoryPlan, held: list[ParameterTensor], trained: list[ParameterTensor]) -> float:
    """Return the bytes of the weights of a rank, adapters included, before ZeRO."""
    base_bytes = elements(held) * plan.numbers.bytes_per_weight
    if plan.base_bits:  # the biases of quantized matrices have the precision of the products
        quantized, biases = quantized_elements(held), elements([tensor for tensor in held if tensor.name == "bias"])
        base_bytes = (elements(held) - quantized - biases) * plan.numbers.bytes_per_weight
        base_bytes += biases * plan.numbers.bytes_per_activation
        base_bytes += quantized * (NF4_BYTES if plan.base_bits == 4 else INT8_BYTES)
    return base_bytes + (elements(trained) * ADAPTER_BYTES if plan.lora_rank else 0.0)


def quantized_elements(held: list[ParameterTensor]) -> float:
    """Return the elements of the matrices that transformers quantizes: those of the layers, not the head."""
    return sum(tensor.all_elements for tensor in held if tensor.name and tensor.columns)


def largest_matrix(held: list[ParameterTensor]) -> int:
    """Return the elements of the largest matrix of a module; experts have one tensor together."""
    return max((tensor.elements for tensor in held if tensor.columns and tensor.group != Group.EXPERT), default=0)


def gradient_bytes(plan: MemoryPlan, trained: list[ParameterTensor]) -> float:
    return elements(trained) * (ADAPTER_BYTES if plan.lora_rank else plan.numbers.bytes_per_gradient)


def state_bytes(plan: MemoryPlan, trained: list[ParameterTensor]) -> float:
    """Return the bytes of optimizer states without step counters, and of the optimizer's copy of the weights."""
    size = ADAPTER_BYTES if plan.lora_rank else plan.numbers.bytes_per_state
    master = 0 if plan.lora_rank else plan.numbers.bytes_per_master
    return sum(each.count * (_state_bytes_of(plan.optimizer, each, size) + master * each.elements) for each in trained)


def _state_bytes_of(optimizer: str, tensor: ParameterTensor, element_bytes: int) -> float:
    """Return the bytes of the states of a tensor that occurs once.

    Adafactor has the sums of the rows and columns of a matrix, and all squares of a vector (arXiv 1804.04235).  Muon is
    for the matrices of the layers, and AdamW for all others, stacked experts too: Muon of torch takes matrices alone.
    """
    if optimizer == "adafactor":
        return (tensor.rows + tensor.columns) * element_bytes
    if optimizer == "adamw-8bit":
        is_small = tensor.elements < SMALLEST_8BIT
        return 2 * (4 * tensor.elements if is_small else tensor.elements + -(-tensor.elements // STATE_BLOCK) * 4)
    is_matrix = tensor.columns and tensor.group not in (Group.EMBEDDING, Group.HEAD, Group.EXPERT)
    return OPTIMIZERS["adamw" if optimizer == "muon" and not is_matrix else optimizer] * tensor.elements * element_bytes
