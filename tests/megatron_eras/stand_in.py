"""Common part of the fakes of Megatron's training loop: a run with few tokens, which can be counted by hand.

The code of an era (`eras.py`) has the functions of ``megatron.training.training`` with the arguments and results of its
versions; its loop calls them in the same way as Megatron's loop. The model, gradients and process groups are real.
"""

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator as batches
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator

VOCABULARY, HIDDEN = 16, 4

_args = SimpleNamespace(
    iteration=0,
    train_iters=12,
    micro_batch_size=2,
    global_batch_size=8,
    rampup_batch_size=None,
    seq_length=32,
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=1,
    padded_vocab_size=VOCABULARY,
    tensor_model_parallel_size=1,
    pipeline_model_parallel_size=1,
    context_parallel_size=1,
    expert_model_parallel_size=1,
    num_experts=None,
    moe_router_topk=2,
    data_parallel_size=1,
    bf16=True,
    fp16=False,
    fp8=None,
    tensorboard_dir=None,
    eval_interval=0,
    save_interval=0,
    consumed_train_samples=0,
    skip_train=False,
    # These values are set by tests:
    compute_s=0.0,
    data_s=0.0,
    between_s=0.0,
    evaluation_s=0.0,
    checkpoint_s=0.0,
    skipped=[],
    fails_at=None,
    exits_at=None,
    real_tokens=None,
)


def get_args():
    return _args


def initialize():
    """Read the arguments from the command line (a JSON object), and make the process groups."""
    vars(_args).update(json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if "RANK" not in os.environ else {}
    dist.init_process_group("gloo", **alone)
    parallel_state.initialize_model_parallel()
    _args.data_parallel_size = dist.get_world_size()
    if _args.tensorboard_dir:
        Path(_args.tensorboard_dir).mkdir(parents=True, exist_ok=True)
    batches.init_num_microbatches_calculator(
        dist.get_rank(),
        _args.rampup_batch_size,
        _args.global_batch_size,
        _args.micro_batch_size,
        _args.data_parallel_size,
    )


class Model(torch.nn.Module):
    """A model of 144 parameters: 16 x 4 in the embedding, 4 x 16 + 16 in the output layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.config = SimpleNamespace(hidden_size=HIDDEN, moe_router_topk=2, num_moe_experts=None)
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.output = torch.nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        return self.output(self.embedding(tokens))


def build_model():
    """Return the model's chunks, its optimizer and its schedule."""
    model = Model()
    return [model], torch.optim.SGD(model.parameters(), lr=0.1), None


def data():
    """Yield micro-batches, each after a wait of ``data_s``."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    while True:
        time.sleep(_args.data_s)
        yield torch.randint(VOCABULARY, (_args.micro_batch_size, _args.seq_length), generator=generator)


def rerun_data():
    return RerunDataIterator(data())


def step(data_iterator, model, optimizer, number):
    """Run one step; return its losses and 1 if the step was skipped."""
    if number == _args.fails_at:
        raise RuntimeError("the loss is not finite")
    optimizer.zero_grad()
    losses = []
    for _ in range(batches.get_num_microbatches()):
        rows = next(data_iterator)
        loss = torch.nn.functional.cross_entropy(model[0](rows).flatten(0, 1), rows.flatten())
        loss.backward()
        losses.append(loss.detach())
    time.sleep(_args.compute_s)
    skipped = number in _args.skipped
    if not skipped:
        optimizer.step()
    return {"lm loss": torch.stack(losses).mean()}, int(skipped)


def log(loss_dict, iteration):
    """Print the loss of a step with all bits."""
    print(f"loss {iteration} {loss_dict['lm loss'].item().hex()}", flush=True)
    time.sleep(_args.between_s)


def is_due(interval, iteration):
    return bool(interval) and iteration % interval == 0


def leave_if_asked(iteration):
    """End the program by SystemExit inside of ``train``, as Megatron does."""
    if iteration == _args.exits_at:
        sys.exit()


def count_batch():
    """Return the number of samples in the step and add it to the consumed samples, which a batch size ramp-up reads."""
    batch_size = _args.data_parallel_size * _args.micro_batch_size * batches.get_num_microbatches()
    _args.consumed_train_samples += batch_size
    return batch_size


def set_batch():
    batches.update_num_microbatches(_args.consumed_train_samples, consistency_check=False)


def operations(args, batch_size):
    """Return six operations per parameter and token."""
    return 6 * 144 * batch_size * args.seq_length


def evaluation():
    time.sleep(_args.evaluation_s)


def checkpoint():
    time.sleep(_args.checkpoint_s)
