"""The next action for each cause of a verdict, by the user's framework and layout, with sources. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Remedy(NamedTuple):
    """An action, and the document that describes its setting."""

    text: str  # at most 62 letters, for one line of the console
    source: str


_TRAINER = "https://huggingface.co/docs/transformers/main_classes/trainer"
_SFT = "https://huggingface.co/docs/trl/sft_trainer"
_MEGATRON = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py"
_DATALOADER = "https://docs.pytorch.org/docs/stable/data.html"
_LIGHTNING = "https://lightning.ai/docs/pytorch/stable/common/trainer.html"
_LIGHTNING_CHECKPOINT = "https://lightning.ai/docs/pytorch/stable/api/lightning.pytorch.callbacks.ModelCheckpoint.html"
_TITAN_CHECKPOINT = "https://github.com/pytorch/torchtitan/blob/main/docs/checkpoint.md"
_TORCHTUNE = "https://docs.pytorch.org/torchtune/stable/basics/packing.html"
_DEEPSPEED = "https://www.deepspeed.ai/docs/config-json/"
_CUDA_MEMORY = "https://docs.pytorch.org/docs/stable/notes/cuda.html"
_DDP = "https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html"
_FSDP = "https://docs.pytorch.org/docs/stable/fsdp.html"
_TP = "https://docs.pytorch.org/docs/stable/distributed.tensor.parallel.html"
_PP = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
_CP = "https://docs.pytorch.org/tutorials/unstable/context_parallel.html"
_DCP = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"
_NVIDIA_SMI = "https://docs.nvidia.com/deploy/nvidia-smi/index.html"
_ELASTIC = "https://docs.pytorch.org/docs/stable/elastic/run.html"
_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_GC = "https://docs.python.org/3/library/gc.html"
_COMPILE = "https://docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html"
_OWN = "docs/verdict.md"

#: Names of frameworks in run.json, without a version -> names in this table.
_SAME = {"megatron-core": "megatron.core", "megatron-lm": "megatron", "torch": "", "fabric": "lightning"}
#: Facts of run.json -> names of layouts in this table; the first one in use is the place of most communication.
_SIZES = {"tensor_parallel": "TP", "pipeline_parallel": "PP", "context_parallel": "CP", "expert_parallel": "EP"}
#: Cause -> framework (as in run.json; "" for all others), or framework and layout -> the next action.
REMEDIES: dict[str, dict[str, Remedy]] = {
    "data_loading": {
        "transformers": Remedy("raise dataloader_num_workers in TrainingArguments", _TRAINER),
        "megatron": Remedy("raise --num-workers, or put the data on faster storage", _MEGATRON),
        "": Remedy("raise num_workers and prefetch_factor of the DataLoader", _DATALOADER),
    },
    "between_iterations": {"": Remedy("mark checkpoints and evaluations with effllm.phase; else data", _OWN)},
    "slow_iterations": {"": Remedy("TORCH_LOGS=recompiles; gc.freeze(); save and log less often", _GC)},
    "warmup": {"": Remedy("TORCHINDUCTOR_CACHE_DIR on a disk that stays; fewer shapes", _COMPILE)},
    "uneven_ranks": {"": Remedy("batches of equal length on all ranks; larger batches per step", _OWN)},
    "straggler": {"": Remedy("run `effllm check` on its host, or exclude the host", _OWN)},
    "throttled": {"": Remedy("`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` on the slow hosts", _NVIDIA_SMI)},
    "power_limit": {"": Remedy("`nvidia-smi -q -d POWER`: compare current and default limit", _NVIDIA_SMI)},
    "exposed_communication": {
        "megatron": Remedy("--overlap-grad-reduce and --overlap-param-gather", _MEGATRON),
        "megatron TP": Remedy("--tp-comm-overlap, --sequence-parallel; keep TP inside a node", _MEGATRON),
        "megatron PP": Remedy("more micro-batches, --num-layers-per-virtual-pipeline-stage", _MEGATRON),
        "megatron.core": Remedy("overlap_grad_reduce, overlap_param_gather of the DDP config", _MEGATRON),
        "megatron.core TP": Remedy("tp_comm_overlap of the model's config; keep TP inside a node", _MEGATRON),
        "megatron.core PP": Remedy("more micro-batches, virtual_pipeline_model_parallel_size", _MEGATRON),
        "deepspeed": Remedy("overlap_comm: true in zero_optimization", _DEEPSPEED),
        "deepspeed ZeRO-3": Remedy("raise stage3_prefetch_bucket_size; stage 2 if it fits", _DEEPSPEED),
        "transformers": Remedy("raise gradient_accumulation_steps or ddp_bucket_cap_mb", _TRAINER),
        "transformers FSDP": Remedy("raise gradient_accumulation_steps; forward_prefetch of fsdp", _TRAINER),
        "transformers ZeRO": Remedy("overlap_comm: true in zero_optimization of its config", _DEEPSPEED),
        "transformers ZeRO-3": Remedy("stage3_prefetch_bucket_size of its config; stage 2 if it fits", _DEEPSPEED),
        " TP": Remedy("smaller tensor parallelism, inside a node; larger batches", _TP),
        " PP": Remedy("more micro-batches per step", _PP),
        " CP": Remedy("smaller context parallelism, inside a node", _CP),
        " EP": Remedy("smaller expert parallelism, inside a node", _MEGATRON),
        " FSDP": Remedy("larger batches; forward_prefetch; shard inside nodes only", _FSDP),
        " ZeRO": Remedy("larger batches, or more accumulation per synchronization", _DEEPSPEED),
        "": Remedy("larger batches per synchronization; bucket_cap_mb of DDP", _DDP),
    },
    "device_idle": {
        "": Remedy(
            "fewer .item(), .cpu() and prints in the step; torch.compile",
            "https://docs.pytorch.org/docs/stable/profiler.html",
        )
    },
    "padding": {
        "transformers": Remedy("batches of similar lengths (group by length)", _TRAINER),
        "transformers SFTTrainer": Remedy("packing=True in SFTConfig, or batches of similar lengths", _SFT),
        "torchtune": Remedy("dataset.packed=True", _TORCHTUNE),
        "": Remedy("pack sequences, or make batches of similar lengths", _SFT),
    },
    "memory_pressure": {
        "transformers": Remedy("smaller per_device_train_batch_size, or gradient_checkpointing", _TRAINER),
        "megatron": Remedy("--recompute-activations, or a smaller --micro-batch-size", _MEGATRON),
        "": Remedy("smaller batch; PYTORCH_ALLOC_CONF=expandable_segments:True", _CUDA_MEMORY),
    },
    "checkpoint": {
        "transformers": Remedy("raise save_steps, or save_only_model=True", _TRAINER),
        "megatron": Remedy("--async-save, or raise --save-interval", _MEGATRON),
        "lightning": Remedy("raise every_n_train_steps of ModelCheckpoint", _LIGHTNING_CHECKPOINT),
        "torchtitan": Remedy('checkpoint.async_mode = "async", or raise checkpoint.interval', _TITAN_CHECKPOINT),
        "": Remedy("save less often, or with async_save of torch.distributed", _DCP),
    },
    "evaluation": {
        "transformers": Remedy("raise eval_steps, or evaluate fewer samples", _TRAINER),
        "megatron": Remedy("raise --eval-interval, or lower --eval-iters", _MEGATRON),
        "lightning": Remedy("raise val_check_interval, or lower limit_val_batches", _LIGHTNING),
        "": Remedy("evaluate less often, or fewer samples", _OWN),
    },
    "restarts": {"": Remedy("see the status of each attempt: summary.json, goodput.attempts", _ELASTIC)},
    "startup": {"": Remedy("cache compiled kernels and tokenized data on a local disk", _OWN)},
    "shutdown": {"": Remedy("a smaller or asynchronous last checkpoint; evaluate elsewhere", _DCP)},
    "idle": {"": Remedy("events.jsonl has the time at which each rank joined and left", _OWN)},
    "hang": {"": Remedy("events.jsonl, kind stalled: the position of each rank", _OWN)},
    "unused_gpus": {"": Remedy("request fewer GPUs, or raise --nproc-per-node", _SBATCH)},
}


#: The action for a straggler whose data is slow.
SLOW_DATA = Remedy("give the rank the storage and DataLoader workers of its peers", _DATALOADER)


def remedy(cause: str, facts: Mapping[str, Any]) -> Remedy:
    """Return the next action for a cause in a job.

    Args:
        cause: a cause that has an action.
        facts: facts of run.json: the framework, perhaps with its version, the layout, and the class of the Trainer.

    Raises:
        KeyError: the cause has no action.
    """
    rows, name = REMEDIES[cause], str(facts.get("framework", "")).lower().split(" ")[0]
    name = _SAME.get(name, name)
    kinds = list(_kinds(facts))
    split, whole = (
        [f" {kind}" for kind in kinds if (kind in _SIZES.values()) == is_split] for is_split in (True, False)
    )
    # A framework's action for its replicas of the model is wrong for the parts of one.
    keys = [*(f"{name} {kind}" for kind in kinds), *split, name, *whole]
    return next((rows[key] for key in keys if key in rows), rows[""])


def _kinds(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is special in a job: its kinds of parallelism, and its Trainer."""
    mesh = dict(one.partition("=")[::2] for one in str(facts.get("device_mesh", "")).split())
    for fact, kind in _SIZES.items():
        size = facts.get(fact) or mesh.get(kind.lower(), 1)
        if str(size).isdigit() and int(str(size)) > 1:
            yield kind
    layout, stage = facts.get("parallel_layout"), facts.get("zero_stage")
    if stage:
        yield f"ZeRO-{stage}"
    yield from (str(one) for one in (layout, facts.get("trainer")) if one)
