"""A loop with megatron-core without effllm code; its arguments are FOLDER TENSOR:PIPELINE [PASSES PER STEP].

PYTHONPATH contains the folder of the integration, with the model and the text; every layout uses the same model and
text.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import Corpus
from cpu import train_on_cpu
from gpt import build
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from settings import Data, Model, Parallelism, Settings, Training, data_parallel_size

ITERATIONS = 12
MODEL = Model(num_layers=2, hidden_size=32, num_attention_heads=4, tie_embeddings=True)
DATA = Data(sequence_length=16, micro_batch_size=2, global_batch_size=8)


def main():
    folder, layout, *rest = sys.argv[1:]
    tensor, pipeline = map(int, layout.split(":"))
    passes = int(rest[0]) if rest else 1
    train_on_cpu()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, pipeline)
    settings = Settings(
        MODEL, DATA, Training(iterations=ITERATIONS, warmup_iterations=0), Parallelism(tensor, pipeline)
    )
    replicas = data_parallel_size(settings, dist.get_world_size())
    trainee = build(settings, torch.device("cpu"))
    corpus = Corpus(DATA.sequence_length, DATA.global_batch_size, seed=1)
    losses = []
    for iteration in range(1, ITERATIONS + 1):
        batch = corpus.training_batch(iteration, parallel_state.get_data_parallel_rank(), replicas)
        for chunk in trainee.chunks:
            chunk.zero_grad_buffer()
        trainee.optimizer.zero_grad()
        for part in batch.chunk(passes):  # a loop may run the schedule several times per step
            losses += [loss["loss"].item().hex() for loss in run(trainee, part, forward_only=False)]
        trainee.optimizer.step()
        trainee.schedule.step(increment=1)
        if iteration % 6 == 0:
            with torch.no_grad():
                run(trainee, batch, forward_only=True)
                time.sleep(0.01)
    (Path(folder) / f"losses-{dist.get_rank()}.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


def run(trainee, batch, *, forward_only):
    parts = batch.split(DATA.micro_batch_size)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=trainee.chunks,
        num_microbatches=len(parts),
        seq_length=DATA.sequence_length,
        micro_batch_size=DATA.micro_batch_size,
        forward_only=forward_only,
    )


def forward_step(parts, model):
    rows = next(parts)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(tokens, positions, hidden_from, labels=labels), mean_loss


def mean_loss(loss_of_tokens):
    loss = loss_of_tokens.float().mean()
    return loss, {"loss": loss.detach().clone()}


main()
