"""One rank of a job that runs several parallel layouts and writes effllm's results for each layout.

torchrun starts the rank; its arguments are FOLDER and layouts of the form NAME:TENSOR:PIPELINE:EXPERT:EXPERT_TENSOR.
PYTHONPATH must contain the folder of the integration.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import train
from cpu import train_on_cpu
from gpt import build
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from settings import Data, Model, Parallelism, Settings, Training, data_parallel_size

from effllm.hooks.megatron import parameter_share, reports_data

MODEL = Model(num_layers=2, hidden_size=32, num_attention_heads=4, tie_embeddings=True)
DATA = Data(sequence_length=16, micro_batch_size=2, global_batch_size=8)


def dense(tensor, pipeline):
    """Train for three steps with the functions of the integration."""
    settings = Settings(MODEL, DATA, Training(iterations=3, warmup_iterations=0), Parallelism(tensor, pipeline))
    replicas = data_parallel_size(settings, dist.get_world_size())
    trainee = build(settings, torch.device("cpu"))
    corpus = train.Corpus(DATA.sequence_length, DATA.global_batch_size, seed=1)
    job = train.Job(settings, trainee, corpus, parallel_state.get_data_parallel_rank(), replicas)
    losses, samples = [], 0
    for iteration in range(1, 4):
        batch = corpus.training_batch(iteration, job.replica, replicas)
        loss = train.train_step(job, batch)
        losses.append(None if loss is None else loss.item())
        samples += len(batch) if reports_data() else 0
    return trainee.chunks, {"losses": losses, "samples": samples}


def experts(tensor, pipeline, expert, expert_tensor):
    """Build a mixture of two experts without training, because the training needs a GPU."""
    config = TransformerConfig(
        num_layers=MODEL.num_layers,
        hidden_size=MODEL.hidden_size,
        num_attention_heads=MODEL.num_attention_heads,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        num_moe_experts=2,
        moe_router_topk=1,
        moe_router_pre_softmax=True,  # Megatron requires this setting with one expert per token
        add_bias_linear=False,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=2, moe_grouped_gemm=False),
        vocab_size=256,
        max_sequence_length=DATA.sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    model.embedding.word_embeddings.requires_grad_(False)
    return [model], {}


def main():
    folder, *layouts = sys.argv[1:]
    train_on_cpu()
    dist.init_process_group("gloo")
    for layout in layouts:
        name, *sizes = layout.split(":")
        tensor, pipeline, expert, expert_tensor = map(int, sizes)
        parallel_state.initialize_model_parallel(
            tensor,
            pipeline,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        if name == "dense":
            chunks, said = dense(tensor, pipeline)
        else:
            chunks, said = experts(tensor, pipeline, expert, expert_tensor)
        said |= {"share": parameter_share(chunks), "reports_data": reports_data()}
        said |= {"held": sum(p.numel() for chunk in chunks for p in chunk.parameters())}
        (Path(folder) / f"{layout}-{dist.get_rank()}.json").write_text(json.dumps(said))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


main()
