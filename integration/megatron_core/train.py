"""Pre-train a small GPT on real text with megatron-core, measured by effllm.

    torchrun --nproc_per_node 2 integration/megatron_core/train.py --config configs/demo.yaml

The lines between dashes are the lines for your training script.  Without a GPU, this command trains on the CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not sys.warnoptions:  # megatron-core warns repeatedly about missing packages
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")

import torch
import torch.distributed as dist
from corpus import Corpus
from cpu import train_on_cpu
from gpt import FLOPS_CONVENTION, Trainee, build, flops_per_token
from megatron.core import __version__ as megatron_core_version
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from settings import Settings, SettingsError, data_parallel_size, parse_arguments

import effllm
from effllm.hooks.megatron import parameter_share, reports_data


@dataclass(frozen=True)
class Job:
    """One rank's view of the training job."""

    settings: Settings
    trainee: Trainee
    corpus: Corpus
    replica: int
    replicas: int


def main() -> None:
    settings = parse_arguments()
    try:
        replicas = data_parallel_size(settings, int(os.environ.get("WORLD_SIZE", "1")))
    except SettingsError as error:
        raise SystemExit(f"train.py: {error}") from error
    device = join_processes(settings)
    job = prepare(settings, device, replicas)

    # ---- effllm: each rank passes its share of the parameters; the sum over all ranks is the model ---
    effllm.initialize_efficientllm_metrics(
        parameter_share=parameter_share(job.trainee.chunks),
        total_iterations=settings.training.iterations,
        flops_per_token=flops_per_token(settings.model, settings.data),
        facts=facts(job),
    )
    # -------------------------------------------------------------------------------------------------

    train(job)

    # ---- effllm -------------------------------------------------------------------------------------
    effllm.finalize_efficientllm_metrics()
    # -------------------------------------------------------------------------------------------------

    dist.destroy_process_group()


def train(job: Job) -> None:
    training = job.settings.training
    collector = effllm.get_metrics_collector()  # effllm

    for iteration in range(1, training.iterations + 1):
        batch = job.corpus.training_batch(iteration, job.replica, job.replicas)

        # ---- effllm: an iteration, and the tokens and samples that this rank reports ----------------
        collector.record_iteration_start()
        loss = train_step(job, batch)
        samples = len(batch) if reports_data() else 0
        collector.record_iteration_end(samples * job.settings.data.sequence_length, samples)
        if effllm.should_log_metrics(iteration):
            collector.log_metrics(iteration, None if loss is None else loss.item())
        # ---- effllm: work other than training is marked, and is not counted as training time --------
        if is_due(training.evaluation_interval, iteration):
            with effllm.phase("evaluation"):
                evaluate(job, iteration)
        if is_due(training.checkpoint_interval, iteration):
            with effllm.phase("checkpoint"):
                save_checkpoint(job, iteration)
        # ---------------------------------------------------------------------------------------------


def join_processes(settings: Settings) -> torch.device:
    """Make this process a rank of the job, on its GPU, or on the CPU without a GPU."""
    if "RANK" not in os.environ:
        raise SystemExit("train.py: start it with torchrun, as its first lines show")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise SystemExit(f"train.py: a GPU per process is needed, and there are {torch.cuda.device_count()}")
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        train_on_cpu()
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.parallelism.tensor,
        pipeline_model_parallel_size=settings.parallelism.pipeline,
    )
    return device


def prepare(settings: Settings, device: torch.device, replicas: int) -> Job:
    trainee = build(settings, device)
    corpus = Corpus(settings.data.sequence_length, settings.data.global_batch_size, settings.training.seed)
    if dist.get_rank() == 0:
        parallelism = settings.parallelism
        print(
            f"Training on {dist.get_world_size()} x {device.type}: {replicas} data parallel, "
            f"{parallelism.tensor} tensor parallel, {parallelism.pipeline} pipeline stages; "
            f"{settings.training.iterations} iterations of {settings.data.global_batch_size} samples",
            flush=True,
        )
    return Job(settings, trainee, corpus, parallel_state.get_data_parallel_rank(), replicas)


def train_step(job: Job, batch: torch.Tensor) -> torch.Tensor | None:
    """Run one optimizer step; return the job's loss on the rank that reports the loss, else ``None``."""
    for chunk in job.trainee.chunks:
        chunk.zero_grad_buffer()
    job.trainee.optimizer.zero_grad()
    loss = pass_through(job, batch, forward_only=False)
    job.trainee.optimizer.step()
    job.trainee.schedule.step(increment=1)
    # The mean is computed in every iteration, because a collective must not depend on whether one rank logs.
    return mean_over_replicas(loss)


def evaluate(job: Job, iteration: int) -> None:
    for chunk in job.trainee.chunks:
        chunk.eval()
    batches = range(job.settings.training.evaluation_batches)
    with torch.no_grad():
        losses = [
            mean_over_replicas(
                pass_through(job, job.corpus.held_out_batch(number, job.replica, job.replicas), forward_only=True)
            )
            for number in batches
        ]
    for chunk in job.trainee.chunks:
        chunk.train()
    known = [loss for loss in losses if loss is not None]
    if known:
        print(f"Evaluation after iteration {iteration}: loss {torch.stack(known).mean():.4f}", flush=True)


def save_checkpoint(job: Job, iteration: int) -> None:
    """Save the first replica: each rank saves its part. The demo then removes the checkpoint."""
    if job.replica != 0:
        return
    state = {
        "iteration": iteration,
        "model": [chunk.state_dict() for chunk in job.trainee.chunks],
        "optimizer": job.trainee.optimizer.state_dict(),
    }
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / f"rank-{dist.get_rank()}.pt")


def pass_through(job: Job, batch: torch.Tensor, *, forward_only: bool) -> torch.Tensor | None:
    """Run a batch through the pipeline; return the mean loss of the batch on the last stage, else ``None``."""
    data = job.settings.data
    microbatches = batch.split(data.micro_batch_size)
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(microbatch.to(job.trainee.device) for microbatch in microbatches),
        model=job.trainee.chunks,
        num_microbatches=len(microbatches),
        seq_length=data.sequence_length,
        micro_batch_size=data.micro_batch_size,
        forward_only=forward_only,
    )
    return torch.stack([loss["loss"] for loss in losses]).mean() if losses else None


def forward_step(microbatches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    rows = next(microbatches)
    tokens, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(tokens, positions, hidden_from, labels=labels), mean_loss


def mean_loss(loss_of_tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of_tokens.float().mean()
    # A copy, because the schedule divides the returned loss in place by the number of micro-batches.
    return loss, {"loss": loss.detach().clone()}


def mean_over_replicas(loss: torch.Tensor | None) -> torch.Tensor | None:
    """Return the job's loss on the rank that reports the loss, and ``None`` on all other ranks."""
    if loss is None:
        return None
    dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
    is_reporter = reports_data() and parallel_state.get_data_parallel_rank() == 0
    return loss / parallel_state.get_data_parallel_world_size() if is_reporter else None


def facts(job: Job) -> dict[str, Any]:
    """Return the facts of this job for the run folder."""
    settings = job.settings
    return {
        **settings.metrics.facts,
        "framework": f"megatron-core {megatron_core_version}",
        "tensor_parallel": settings.parallelism.tensor,
        "pipeline_parallel": settings.parallelism.pipeline,
        "data_parallel": job.replicas,
        "num_layers": settings.model.num_layers,
        "hidden_size": settings.model.hidden_size,
        "sequence_length": settings.data.sequence_length,
        "micro_batch_size": settings.data.micro_batch_size,
        "global_batch_size": settings.data.global_batch_size,
        "precision": "bf16" if job.trainee.device.type == "cuda" else "fp32",
        "seed": settings.training.seed,
        "flops_convention": FLOPS_CONVENTION,
    }


def is_due(interval: int, iteration: int) -> bool:
    return interval > 0 and iteration % interval == 0


if __name__ == "__main__":
    main()
