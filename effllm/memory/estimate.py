"""The memory of a rank of a plan: its parts as intervals, and their peak."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from effllm.memory import states
from effllm.memory.plan import Group, MemoryPlan, ModelShape, ParameterTensor, check_plan
from effllm.memory.states import ADAPTER_BYTES, Stage, divided, elements
from effllm.memory.training import FULL, TensorSizes, held_by_products, torch_tiles, training_course


class ByteRange(NamedTuple):
    """The expected number of bytes, and the interval that contains the number in nine of ten cases."""

    low: float
    expected: float
    high: float

    @staticmethod
    def exact(size: float) -> ByteRange:
        return ByteRange(size, size, size)

    def scaled(self, low: float, high: float) -> ByteRange:
        """Return the range with relative limits around the expected number."""
        return ByteRange(self.expected * low, self.expected, self.expected * high)


class MeasuredStep(NamedTuple):
    """The bytes of a training step of one rank that was measured with fake tensors."""

    weights: int  # with the scales of quantized ones
    optimizer_states: int
    gradients: int  # of all trained weights
    gradients_at_peak: int  # of forward and backward
    activations: int  # at this peak: all that is neither a weight, a state, a gradient nor a buffer
    peak: int  # of the whole step, with the optimizer's
    has_other_kernels: bool = False  # on a GPU, which need less
    notes: tuple[str, ...] = ()


UNKNOWN = ByteRange(0.0, math.inf, math.inf)  # of a part that cannot be estimated


def total_of(parts: Iterable[ByteRange]) -> ByteRange:
    """Return the sum of independent parts: the distances of their limits add as squares."""
    ranges = list(parts)
    if UNKNOWN in ranges:
        return ByteRange(math.fsum(part.low for part in ranges), math.inf, math.inf)
    expected = math.fsum(part.expected for part in ranges)
    below = math.sqrt(math.fsum((part.expected - part.low) ** 2 for part in ranges))
    above = math.sqrt(math.fsum((part.high - part.expected) ** 2 for part in ranges))
    return ByteRange(max(expected - below, 0.0), expected, expected + above)


#: These ranges follow from settings and from published peaks; they were not measured on a GPU here.
#: A CUDA context with the kernels of torch and cuBLAS, or of Megatron and Transformer Engine (megatron-tutorials).
CUDA_CONTEXT = {"transformers": ByteRange(0.3e9, 0.7e9, 1.5e9), "megatron": ByteRange(0.5e9, 1.5e9, 3e9)}
#: NCCL for each group of ranks: channels of 4 MiB buffers (NCCL_BUFFSIZE) to each neighbour, up to 2 GB with 8 ranks.
NCCL_GROUP = ByteRange(0.1e9, 0.7e9, 2.0e9)
#: Unused parts of blocks of the caching allocator, relative to the allocated bytes of one GPU and of several, whose
#: collectives free tensors late: 20 published pairs of allocated and reserved bytes of several GPUs have 1 to 80 %, in
#: the median 20 %; totals and reserved bytes of one GPU have less.
FRAGMENTATION = (0.0, 0.1, 0.3), (0.0, 0.15, 0.5)
BUCKET_BYTES = 1e9  # DeepSpeed's default reduce_bucket_size of 5e8 elements, in 16 bits
#: cuBLAS workspaces: 32 MiB for each handle on Hopper, 8 MiB on other GPUs.
CUBLAS_WORKSPACE = ByteRange(8 * 2**20, 32 * 2**20, 64 * 2**20)
#: Relative limits of activations and logits: the 5th and the 95th percentile of counted over estimated bytes, of 360
#: configurations counted on a CPU (make bench-memory); and assumed limits for kernels that were not counted.
ACTIVATION_LIMITS = (0.93, 1.03)
NOT_COUNTED_LIMITS = (0.8, 1.2)
COUNTED_ARCHITECTURES = frozenset(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt")
).union(("mixtral", "qwen3_moe", "deepseek_v3"))

#: Relative limits of a sum, beside the errors of its parts, from what a plan does not state: published peaks are -22 to
#: +31 % from the estimate (5th and 90th percentile of 156; benchmarks/results/published-peaks.md).
REST = (-0.2, 0.3)
_PUBLISHED = "published peaks and settings; not measured on a GPU"
_NOT_KNOWN = "unknown: there are no formulas for these layers; --measure counts a step"
_MEASURED = "measured with fake tensors, as counted on CPU; limits: those of the formulas"
FORWARD_BACKWARD, OPTIMIZER_STEP, SERVING = "forward and backward", "optimizer step", "serving"


class MemoryPart(NamedTuple):
    """A part of the memory at the peak of the rank, with the basis of its interval."""

    name: str
    bytes: ByteRange
    basis: str
    largest: float | None = None  # at its own moment; the part can be smaller at the peak


#: The name of a moment of a step, and the parts of the memory at this moment.
Moment = tuple[str, list[MemoryPart]]


class MemoryEstimate(NamedTuple):
    """The memory of the rank that needs most."""

    shape: ModelShape
    plan: MemoryPlan
    parameters: states.ParameterCounts
    trained: float  # parameters that the optimizer changes, of all ranks together
    parts: tuple[MemoryPart, ...]
    moment: str  # of the peak
    total: ByteRange
    allocated: ByteRange  # by torch's allocator: without CUDA context, NCCL's buffers and fragmentation
    reserved: ByteRange  # by torch's allocator: with fragmentation

    def part(self, name: str) -> MemoryPart:
        return next(part for part in self.parts if part.name == name)


def estimate(shape: ModelShape, plan: MemoryPlan, measured: MeasuredStep | None = None) -> MemoryEstimate:
    """Return the memory of the rank of a plan that needs most; layers without formulas need a measured step."""
    check_plan(plan, shape)
    plan, measured = as_computed(shape, plan), None if shape.has_known_layers else measured
    parts_of = partial(_training_parts, measured=measured) if plan.is_training else _serving_parts
    moments = [moment for stage in states.stages(shape, plan) for moment in parts_of(shape, plan, stage)]
    trained = states.trained_tensors(plan, states.parameter_tensors(shape)) if plan.is_training else []
    totals = [total_of(part.bytes for part in parts) for _, parts in moments]
    moment, parts = max(zip(totals, moments, strict=True), key=lambda pair: pair[0].expected)[1]
    total, counts = _largest(totals), states.count_parameters(shape)
    allocated, reserved = (_largest([_in_allocator(plan, parts, out) for _, parts in moments]) for out in _OUTSIDE)
    count = float(elements(trained))
    return MemoryEstimate(shape, plan, counts, count, tuple(parts), moment, total, allocated, reserved)


def as_computed(shape: ModelShape, plan: MemoryPlan) -> MemoryPlan:
    """Return the plan with the attention that transformers has for a model: eager, if scores pass a tanh."""
    is_eager = shape.attention_cap and plan.attention == "sdpa" and plan.implementation == "transformers"
    return replace(plan, attention="eager") if is_eager else plan


def _largest(totals: list[ByteRange]) -> ByteRange:
    return ByteRange(*map(max, zip(*totals, strict=True)))


#: Parts that are not allocated by torch's allocator, and those that it does not reserve.
_OUTSIDE = (("CUDA context", "fragmentation"), ("CUDA context",))


def _in_allocator(plan: MemoryPlan, parts: list[MemoryPart], outside: tuple[str, ...]) -> ByteRange:
    """Return the sum of the parts in torch's allocator, at one moment."""
    nccl, inside = nccl_buffers(plan), {part.name: part.bytes for part in parts if part.name not in outside}
    of_torch = ByteRange(*(size - other for size, other in zip(inside["communication buffers"], nccl, strict=True)))
    return total_of({**inside, "communication buffers": of_torch}.values())


def _with_last_parts(plan: MemoryPlan, parts: list[MemoryPart]) -> list[MemoryPart]:
    """Return the parts of a moment, with fragmentation, and the error from what a plan does not state, as parts."""
    if UNKNOWN in (part.bytes for part in parts):
        return parts
    parts = [*parts, _fragmentation_part(plan, _in_allocator(plan, parts, ("CUDA context",)).expected)]
    low, high = (share * total_of(part.bytes for part in parts).expected for share in REST)
    basis = f"{100 * REST[0]:+.0f} to {100 * REST[1]:+.0f} % of the sum: kernels, versions, loops of published peaks"
    return [*parts, MemoryPart("not stated", ByteRange(low, 0.0, high), basis)]


def _training_parts(shape: ModelShape, plan: MemoryPlan, stage: Stage, measured: MeasuredStep | None) -> list[Moment]:
    """Return the parts at the two moments of a training step that can have its peak."""
    held = states.rank_tensors(shape, plan, stage)
    trained = states.trained_tensors(plan, held)
    all_gradients = states.gradient_bytes(plan, trained)  # bytes, as in all of these names
    held_gradients = states.gradient_bytes(plan, divided(plan, trained, 2))
    undivided_at_peak, activations = _activation_parts(shape, plan, stage, held, measured)
    gradients_at_peak = undivided_at_peak * (held_gradients / all_gradients if all_gradients else 1.0)
    all_weights = states.weight_bytes(plan, held, trained)
    of_optimizer = ByteRange.exact(states.state_bytes(plan, divided(plan, trained, 1)))
    master = " and a copy of the weights in 32 bits" if plan.numbers.bytes_per_master and not plan.lora_rank else ""
    fixed = [
        _weight_part(plan, held, trained, measured),
        MemoryPart("optimizer states", of_optimizer, plan.optimizer + master),
        *_fixed_parts(plan, held, communication_buffers(plan, all_gradients, all_weights, all_weights / stage.layers)),
    ]
    basis = f"{ADAPTER_BYTES if plan.lora_rank else plan.numbers.bytes_per_gradient} bytes for each trained parameter"
    largest = max(held_gradients, gradients_at_peak)
    # A loop that calls zero_grad() after the forward pass has all gradients at the loss, too; FSDP1 has gradients of a
    # flat parameter with adapters as a whole.
    has_flat = plan.lora_rank and plan.zero == 3 and not plan.base_bits
    flat = elements(divided(plan, held, 2)) * plan.numbers.bytes_per_gradient if has_flat else 0.0
    of_gradients = ByteRange(gradients_at_peak, gradients_at_peak, largest + flat)
    state_bytes = ADAPTER_BYTES if plan.lora_rank else plan.numbers.bytes_per_state
    # A published peak of foreach AdamW is 0.02 % above five times the weights: the batch and small buffers (fms, C15).
    foreach_copy = ByteRange(0.0, 0.0, 1.01 * elements(divided(plan, trained, 1)) * state_bytes)
    optimizer_step = [
        MemoryPart("gradients", ByteRange.exact(held_gradients), basis),
        MemoryPart("optimizer workspace", foreach_copy, "fused: none; foreach: a copy of the weights"),
    ]
    forward_backward = [MemoryPart("gradients", of_gradients, basis, largest), *activations]
    moments = (FORWARD_BACKWARD, forward_backward), (OPTIMIZER_STEP, optimizer_step)
    return [(name, _with_last_parts(plan, [*fixed, *parts])) for name, parts in moments]


def _activation_parts(
    shape: ModelShape, plan: MemoryPlan, stage: Stage, held: list[ParameterTensor], measured: MeasuredStep | None
) -> tuple[float, list[MemoryPart]]:
    """Return the bytes of gradients at the peak without ZeRO, and the parts of the activations."""
    if not shape.has_known_layers:
        if measured is None:
            gradients = states.gradient_bytes(plan, states.trained_tensors(plan, held))
            return gradients, [MemoryPart("activations", UNKNOWN, _NOT_KNOWN)]
        low = 0.0 if measured.has_other_kernels else ACTIVATION_LIMITS[0]
        basis = f"{_MEASURED}{'; low: its kernels need less' if measured.has_other_kernels else ''}"
        size = ByteRange.exact(measured.activations).scaled(low, ACTIVATION_LIMITS[1])
        return measured.gradients_at_peak, [MemoryPart("activations", size, basis)]
    peak = training_course(shape, plan, stage, held).peak
    # Counted were configurations of one rank, with the kernels of transformers and of bitsandbytes.
    is_counted = plan.gpus == plan.ep == 1 and plan.implementation == "transformers" and not plan.keeps_frozen_inputs
    is_counted = is_counted and (plan.checkpointing != "selective" or plan.attention == "eager")
    is_counted = is_counted and shape.architecture in COUNTED_ARCHITECTURES
    limits = ACTIVATION_LIMITS if is_counted else NOT_COUNTED_LIMITS
    source = "errors of configurations counted on CPU" if is_counted else "assumed, no such plan was counted"
    basis = f"tensors kept for the backward pass; limits: {source}"
    size = ByteRange.exact(peak.activations).scaled(*limits)
    if held_inputs := stage.layers * held_by_products(TensorSizes(shape, plan)):
        size = size._replace(low=(peak.activations - held_inputs) * limits[0])
        basis += "; low: use_reentrant=True frees the inputs of products of 8 bits"
    return peak.gradients, [MemoryPart("activations", size, basis), _logit_part(shape, plan, peak.logits, limits)]


def _logit_part(shape: ModelShape, plan: MemoryPlan, at_peak: float, limits: tuple[float, float]) -> MemoryPart:
    """Return the bytes of the logits, or of the tiles of a fused loss, around the expected bytes at the peak."""
    if not plan.fused_loss:
        # Low: torch's cross-entropy of logits in 16 bits, 8 bytes in place of 12 (LitGPT).  High: the loop holds the
        # output of the model during the backward pass, and the copy in 32 bits, 18 bytes (prime-rl).
        compute, is_torch = plan.numbers.bytes_per_activation, plan.implementation == "transformers"
        low = limits[0] * 2 / 3 if is_torch and compute < FULL else limits[0]
        bytes_per_logit = compute + (FULL if is_torch and compute < FULL else 0)
        high = at_peak * limits[1] + (plan.tokens * shape.vocab * bytes_per_logit / plan.tp if at_peak else 0.0)
        basis = "log-softmax and gradients in 32 bits; low: in 16 bits; high: the loop holds them, too"
        return MemoryPart("logits", ByteRange(at_peak * low, at_peak, high), basis)
    tiles = ByteRange(0.0, at_peak, at_peak + torch_tiles(TensorSizes(shape, plan)))
    return MemoryPart("logits", tiles, "a fused loss: tiles of TRL 1.16 with Triton; high: without Triton")


def _serving_parts(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> list[Moment]:
    """Return the parts of a server; the plan has the length of prompt and answer, and the number of sequences."""
    held = states.rank_tensors(shape, plan, stage)
    weights = states.weight_bytes(plan, held, [])
    buffers = communication_buffers(plan, 0.0, weights, weights / stage.layers)
    if shape.has_known_layers:
        cache, working = _kv_cache(shape, plan, stage), _working_tensors(shape, plan, stage)
        dynamic = [
            MemoryPart("KV cache", cache, "keys and values of all tokens; high: no window and no latent vectors"),
            MemoryPart("activations", working, "one layer; low: a token at a time; high: logits of all tokens"),
            _fragmentation_part(plan, working.expected + cache.expected),
        ]
    else:
        dynamic = [MemoryPart("KV cache, activations", UNKNOWN, _NOT_KNOWN)]
    return [(SERVING, [_weight_part(plan, held, []), *dynamic, *_fixed_parts(plan, held, buffers)])]


def _fixed_parts(plan: MemoryPlan, held: list[ParameterTensor], buffers: ByteRange) -> list[MemoryPart]:
    """Return the parts beside weights, states and tensors of a step; torch allocates the workspaces of cuBLAS.

    A product copies its quantized matrix to its precision.  High: the head is quantized too, and the copy is made in
    one type of 16 bits and cast to another, as in LitGPT.
    """
    parts = [MemoryPart("communication buffers", buffers, _PUBLISHED)]
    if plan.base_bits:
        size = plan.numbers.bytes_per_activation / plan.tp
        expected = 0.0 if plan.is_training else states.largest_matrix([tensor for tensor in held if tensor.name]) * size
        copies = ByteRange(0.0, expected, max(2 * states.largest_matrix(held) * size, expected))
        basis = "copies of matrices for their products; high: also of the head, in two types of 16 bits"
        parts.append(MemoryPart("beside a quantized base", copies, basis))
    context = MemoryPart("CUDA context", CUDA_CONTEXT[plan.implementation], _PUBLISHED)
    return [*parts, context, MemoryPart("cuBLAS workspace", CUBLAS_WORKSPACE, _PUBLISHED)]


def _fragmentation_part(plan: MemoryPlan, allocated: float) -> MemoryPart:
    shares = FRAGMENTATION[plan.gpus > 1]
    size = ByteRange(*(allocated * share for share in shares))
    return MemoryPart("fragmentation", size, f"0 to {100 * shares[2]:.0f} %: published pairs of allocated and reserved")


def _weight_part(
    plan: MemoryPlan, held: list[ParameterTensor], trained: list[ParameterTensor], measured: MeasuredStep | None = None
) -> MemoryPart:
    """Return the weights of a rank; low: quantized scales of a base of 4 bits, high: experts that are not quantized.

    bitsandbytes quantizes linear modules; in transformers 5 all experts of a layer are parameters of one module.
    """
    tensors = divided(plan, held, 3)
    size = states.weight_bytes(plan, tensors, divided(plan, trained, 3))
    if not plan.base_bits:
        return MemoryPart("weights", ByteRange.exact(size), f"{plan.numbers.bytes_per_weight} bytes for each parameter")
    basis = f"{plan.base_bits} bits for each weight of a matrix, with its scales"
    saving = states.NF4_BYTES - states.NF4_DOUBLE_BYTES if plan.base_bits == 4 else 0.0
    saving *= states.quantized_elements(tensors)
    experts = [tensor for tensor in tensors if tensor.group == Group.EXPERT]
    extra = states.weight_bytes(replace(plan, base_bits=0), experts, []) - states.weight_bytes(plan, experts, [])
    if measured:  # which matrices are quantized is then known
        size, extra = measured.weights / (plan.shards if plan.zero == 3 else 1), 0.0
    elif extra:
        basis += "; high: experts are not quantized (transformers 5)"
    return MemoryPart("weights", ByteRange(max(size - saving, 0.0), size, size + extra), basis)


def nccl_buffers(plan: MemoryPlan) -> ByteRange:
    """Return the buffers that NCCL allocates beside torch's allocator."""
    groups = sum(size > 1 for size in (plan.tp, plan.pp, plan.cp, plan.ep, plan.dp))
    return ByteRange(*(size * groups for size in NCCL_GROUP))


def communication_buffers(plan: MemoryPlan, gradients: float, weights: float, layer_weights: float) -> ByteRange:
    """Return the buffers of collectives, from the bytes of gradients, of all weights, and of the weights of a layer.

    DDP copies gradients to buckets of their total size, unless gradients are views of the buckets.  FSDP and ZeRO-3
    gather the weights of the layer in use and of the next one, and reduce the gradients of a layer: three layers; high:
    twice as many.  ZeRO-1 and 2 have `BUCKET_BYTES`; high: twice the gradients, in up to four buckets.
    """
    low, expected, high = nccl = nccl_buffers(plan)
    if not nccl.expected:
        return nccl
    if plan.is_training and plan.shards > 1:
        if plan.zero == 0 and plan.implementation == "transformers":
            expected, high = expected + gradients, high + gradients
        elif plan.zero in (1, 2):
            expected, high = expected + min(gradients, BUCKET_BYTES), high + min(2 * gradients, 4 * BUCKET_BYTES)
    if plan.zero == 3:
        low, expected, high = low + layer_weights, expected + 3 * layer_weights, high + min(weights, 6 * layer_weights)
    return ByteRange(low, expected, high)


def _kv_cache(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> ByteRange:
    """Return the bytes of keys and values.

    Layers with a sliding window need the window alone; transformers' DynamicCache and older servers keep all tokens.
    With latent attention, vLLM and SGLang keep the latent vector of a token; transformers keeps keys and values.
    """
    share, tokens = stage.layers / shape.layers, plan.tokens
    window_tokens = plan.micro_batch * min(shape.sliding_window or plan.seq_length, plan.seq_length)
    element_bytes = plan.numbers.bytes_per_activation
    if shape.latent:
        whole = shape.layers * tokens * (shape.q_size + shape.value_size) / plan.tp * element_bytes * share
        latent = shape.layers * tokens * (shape.latent.kv_rank + shape.latent.rope_head_dim) * element_bytes * share
        return ByteRange(latent, latent, max(whole, latent))
    token_bytes = 2 * max(shape.kv_heads / plan.tp, 1) * shape.head_dim * element_bytes * share
    full_layers = shape.layers - shape.sliding_layers
    least = (full_layers * tokens + shape.sliding_layers * min(window_tokens, tokens)) * token_bytes
    return ByteRange(least, least, shape.layers * tokens * token_bytes)


def _working_tensors(shape: ModelShape, plan: MemoryPlan, stage: Stage) -> ByteRange:
    """Return the tensors of the widest layer during the prefill of all sequences, and the logits."""
    tokens, size, width = float(plan.tokens), plan.numbers.bytes_per_activation, float(shape.intermediate)
    if shape.experts:
        width = max(width if shape.dense_layers else 0, shape.experts.intermediate * shape.experts.active)
    layer: float = tokens * (2 * shape.hidden + max(3 * width, 2 * shape.q_size + shape.value_size) / plan.tp) * size
    if plan.attention == "eager":
        layer += tokens * plan.seq_length * shape.heads / plan.tp * (FULL + size)
    logits = shape.vocab / plan.tp * (size + FULL) if stage.is_last else 0.0
    sampled = plan.micro_batch * logits
    return ByteRange(plan.micro_batch * 2 * shape.hidden * size + sampled, layer + sampled, layer + tokens * logits)
