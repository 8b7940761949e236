"""A small GPT with its gradients and its optimizer, all of megatron-core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from corpus import VOCABULARY
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from settings import Data, Model, Settings

FLOPS_CONVENTION = (
    "6 per weight of a matrix, 12 per layer, channel and position of attention (not halved for causality)"
)


@dataclass(frozen=True)
class Trainee:
    """The objects for a training step."""

    chunks: list[Any]  # one chunk per virtual pipeline stage of this rank; here always one chunk
    optimizer: Any
    schedule: OptimizerParamScheduler
    device: torch.device


def build(settings: Settings, device: torch.device) -> Trainee:
    """Build this rank's part of the model; all runs of a layout have the same initial weights."""
    model_parallel_cuda_manual_seed(settings.training.seed)
    torch.manual_seed(settings.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank())
    bf16 = device.type == "cuda"
    config = _transformer_config(settings, bf16)
    model = _gpt(config, settings).to(device)
    replicated = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=bf16, overlap_grad_reduce=False),
        Float16Module(config, model) if bf16 else model,
    )
    replicated.broadcast_params()
    optimizer = _optimizer(settings, replicated, bf16)
    return Trainee([replicated], optimizer, _schedule(settings, optimizer), device)


def flops_per_token(model: Model, data: Data) -> float:
    """Return the model FLOPs of one trained token, forward and backward, by `FLOPS_CONVENTION`."""
    weights = 12 * model.num_layers * model.hidden_size**2 + VOCABULARY * model.hidden_size
    return 6.0 * weights + 12.0 * model.num_layers * model.hidden_size * data.sequence_length


def _transformer_config(settings: Settings, bf16: bool) -> TransformerConfig:
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=settings.model.num_layers,
        hidden_size=settings.model.hidden_size,
        num_attention_heads=settings.model.num_attention_heads,
        tensor_model_parallel_size=settings.parallelism.tensor,
        pipeline_model_parallel_size=settings.parallelism.pipeline,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        autocast_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,  # the same initial weights with and without a GPU
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )
    config.finalize_model_grads_func = finalize_model_grads
    return config


def _gpt(config: TransformerConfig, settings: Settings) -> GPTModel:
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=settings.data.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=settings.model.tie_embeddings,
    )


def _optimizer(settings: Settings, model: DistributedDataParallel, bf16: bool) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.training.learning_rate,
        min_lr=0.1 * settings.training.learning_rate,
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return get_megatron_optimizer(config, [model])


def _schedule(settings: Settings, optimizer: Any) -> OptimizerParamScheduler:
    iterations = settings.training.iterations
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.training.learning_rate,
        min_lr=0.1 * settings.training.learning_rate,
        lr_warmup_steps=min(settings.training.warmup_iterations, iterations - 1),
        lr_decay_steps=iterations,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
