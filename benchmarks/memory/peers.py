"""The numbers of other estimators for a model and a plan, in bytes for a GPU: their own functions are called.

None of them has an argument for every setting of a plan; without it, it gives its number all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from effllm.memory.plan import MemoryPlan, ModelShape
from effllm.memory.states import count_parameters, parameter_tensors

THEORY = "megatron/training/theoretical_memory_usage.py"


class Peer(NamedTuple):
    """Another estimator; without its package, it raises ImportError."""

    name: str
    get: str  # command that gets it
    estimate: Callable[[ModelShape, MemoryPlan], float]
    is_made_for: Callable[[MemoryPlan], bool]


def accelerate(shape: ModelShape, plan: MemoryPlan) -> float:
    """Return the largest figure of accelerate's ``estimate_training_usage``: Adam, no activations."""
    from accelerate.commands.estimate import estimate_training_usage

    precision = "bfloat16" if plan.numbers.bytes_per_activation == 2 else "float32"
    return float(max(estimate_training_usage(count_parameters(shape).total * 4, precision).values()))


def deepspeed(zero: int, shape: ModelShape, plan: MemoryPlan) -> float:
    """Return DeepSpeed's estimate of the states with ZeRO 2 or 3 without offload: no activations.

    The largest layer is the largest module with parameters of its own: the embedding or a matrix of the MLP.
    """
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as needs_3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as needs_2

    total, where = count_parameters(shape).total, {"num_gpus_per_node": plan.gpus, "cpu_offload": False}
    if zero == 2:
        return float(needs_2(total, **where)[1])
    routed = shape.experts.total * shape.experts.intermediate * 2 if shape.experts else 0
    width = max(shape.vocab, 2 * shape.intermediate if shape.fused_gate else shape.intermediate, routed)
    return float(needs_3(total, shape.hidden * width, cpu_offload_params=False, **where)[1])


def hf_mem(shape: ModelShape, _plan: MemoryPlan) -> float:
    """Return what hf-mem counts in the header of weights of 16 bits: inference, here without the KV cache."""
    from hf_mem.safetensors.metadata import parse_safetensors_metadata

    sizes = ([one.count, one.rows, one.columns or 1] for one in parameter_tensors(shape))
    header = {str(at): {"dtype": "BF16", "shape": of} for at, of in enumerate(sizes)}
    return float(parse_safetensors_metadata({"Transformer": header}).bytes_count)


def megatron(checkout: Path, shape: ModelShape, plan: MemoryPlan) -> float:
    """Return the total of ``report_theoretical_memory`` of a checkout of Megatron-LM."""
    return float(_theory(checkout).report_theoretical_memory(_arguments(shape, plan), plan.accumulation)[2] * 2**20)


@cache
def _theory(checkout: Path) -> Any:
    """Return Megatron's module, without the rest of Megatron, which needs a GPU."""
    path = checkout / THEORY
    spec = spec_from_file_location("megatron_theory.usage", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"no {path.name}")
    utils, module = ModuleType("utils"), module_from_spec(spec)
    utils.__dict__.update(is_hybrid_model=lambda _: False, print_rank_0=lambda _: None)
    sys.modules |= {"megatron_theory": ModuleType("megatron_theory"), "megatron_theory.utils": utils}
    spec.loader.exec_module(module)
    module.__dict__["print"] = lambda *_: None
    return module


def _arguments(shape: ModelShape, plan: MemoryPlan) -> SimpleNamespace:
    """Return the arguments of Megatron's command line that the function reads."""
    experts, latent = shape.experts, shape.latent
    return SimpleNamespace(
        hidden_size=shape.hidden, num_layers=shape.layers, num_attention_heads=shape.heads, kv_channels=shape.head_dim,
        group_query_attention=shape.kv_heads != shape.heads and not latent, num_query_groups=shape.kv_heads,
        ffn_hidden_size=shape.intermediate, swiglu=shape.gated_mlp, padded_vocab_size=shape.vocab,
        untie_embeddings_and_output_weights=not shape.tied, add_bias_linear=shape.mlp_bias,
        normalization="LayerNorm" if shape.layer_norm else "RMSNorm", mtp_num_layers=None, moe_latent_size=None,
        num_experts=experts and experts.total, moe_ffn_hidden_size=experts and experts.intermediate,
        moe_shared_expert_intermediate_size=experts and experts.shared_intermediate,
        moe_router_topk=experts and experts.active,
        moe_layer_freq=[0] * shape.dense_layers + [1] * (shape.layers - shape.dense_layers),
        multi_latent_attention=latent is not None, q_lora_rank=latent and (latent.q_rank or None),
        kv_lora_rank=latent and latent.kv_rank, qk_head_dim=latent and latent.nope_head_dim,
        qk_pos_emb_head_dim=latent and latent.rope_head_dim, v_head_dim=latent and latent.value_head_dim,
        seq_length=plan.seq_length, micro_batch_size=plan.micro_batch, sequence_parallel=plan.sequence_parallel,
        recompute_granularity=None if plan.checkpointing == "none" else plan.checkpointing,
        tensor_model_parallel_size=plan.tp, pipeline_model_parallel_size=plan.pp, expert_model_parallel_size=plan.ep,
        expert_tensor_parallel_size=plan.tp, virtual_pipeline_model_parallel_size=None, world_size=plan.gpus,
        data_parallel_size=plan.dp, use_distributed_optimizer=plan.zero > 0,
    )  # fmt: skip


def peers(checkout: Path) -> list[Peer]:
    """Return the other estimators; that of Megatron needs a checkout of Megatron-LM."""

    def whole(plan: MemoryPlan, zero: int) -> bool:
        shared = plan.lora_rank or plan.tp * plan.pp * plan.cp > 1 or plan.optimizer != "adamw"
        return plan.is_training and not shared and plan.zero == zero

    get = "git clone https://github.com/NVIDIA/Megatron-LM"
    two, three = partial(deepspeed, 2), partial(deepspeed, 3)
    theory = partial(megatron, checkout)
    return [
        Peer("accelerate estimate-memory", "pip install accelerate", accelerate, lambda plan: whole(plan, 0)),
        Peer("DeepSpeed estimate_zero2", "pip install deepspeed", two, lambda plan: whole(plan, 2)),
        Peer("DeepSpeed estimate_zero3", "pip install deepspeed", three, lambda plan: whole(plan, 3)),
        Peer("Megatron report_theoretical_memory", get, theory, lambda plan: plan.precision == "bf16-master"),
        Peer("hf-mem", "pip install hf-mem", hf_mem, lambda plan: not plan.is_training),
    ]
