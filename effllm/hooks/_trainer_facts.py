"""Facts of a Hugging Face Trainer: the layout of its ranks, its largest micro-batch, and the figures in its logs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from effllm.hooks._layout import DDP, FSDP, SINGLE, precision_of, zero_facts
from effllm.hooks._parameters import unwrapped
from effllm.records.framework_figures import TOKENS_PER_ITERATION, TOKENS_PER_S, TOKENS_PER_S_PER_GPU

_DEPTH = 5  # maximal depth of samplers inside samplers
#: TRL's trainers that cut or leave out longer sequences while they prepare the dataset, and its collators that cut
#: sequences; each with the number of sequences of a sample.  Older versions of the collators have no ``max_length``.
_TRAINERS = {"SFTTrainer": 1, "RewardTrainer": 2}
_COLLATORS = {"DataCollatorForPreference": 2, "DataCollatorForUnpairedPreference": 1}
_WITH_KL = 2  # sequences of a sample of the KTOTrainer, if its loss has a KL term

#: The total of tokens in a Trainer's logs: transformers' count, or else that of TRL's SFTTrainer.
TOTALS = ("num_input_tokens_seen", "num_tokens")
#: The figure of axolotl in a Trainer's logs.
AXOLOTL = "tokens/train_per_sec_per_gpu"


def counts_positions_and_samples(trainer: Any) -> tuple[bool, bool]:
    """Return whether this rank counts the positions of its batch, and whether it counts the samples.

    Tensor, context and pipeline parallel peers get the same batch, so only the first rank of each group counts it.
    Sequence parallel peers of DeepSpeed get parts of the same sequences, so only the first rank counts the samples.
    """
    sizes = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    counts, dimensions = True, set()
    for mesh in meshes(trainer):
        for name in mesh.mesh_dim_names:
            dimensions.add(name)
            counts = counts and (name not in ("tp", "cp", "pp") or mesh.get_local_rank(name) == 0)
    tensor_size = tensor_parallel_size(trainer)
    if "tp" not in dimensions and tensor_size > 1:
        counts = counts and _torch_rank() % tensor_size == 0  # the ranks of a tensor parallel group are consecutive
    sequence_size = getattr(sizes, "sp_size", 1) or 1
    return counts, counts and (sequence_size <= 1 or _torch_rank() % sequence_size == 0)


def meshes(trainer: Any) -> list[Any]:
    """Return the device meshes of accelerate, and of transformers if it sharded the model while loading it."""
    candidates = (
        getattr(getattr(trainer, "accelerator", None), "torch_device_mesh", None),
        getattr(unwrapped(getattr(trainer, "model", None)), "_device_mesh", None),
    )
    return [mesh for mesh in candidates if getattr(mesh, "mesh_dim_names", None)]


def layout_facts(trainer: Any, args: Any) -> dict[str, Any]:
    """Return what each rank of data parallelism has; with another kind of accelerate, the name of this kind."""
    accelerator: Any = getattr(trainer, "accelerator", None)
    kind = getattr(getattr(accelerator, "distributed_type", None), "name", "")
    engine: Any = getattr(trainer, "model_wrapped", None)
    if kind == "DEEPSPEED" and hasattr(engine, "zero_optimization_stage"):
        return zero_facts(engine)
    if kind == "FSDP" or any(_dimension_size(mesh, "fsdp") > 1 for mesh in meshes(trainer)):
        return {"parallel_layout": FSDP}
    if kind == "NO":
        return {"parallel_layout": "DataParallel" if getattr(args, "n_gpu", 1) > 1 else SINGLE}
    if kind.startswith("MULTI_"):
        return {"parallel_layout": DDP if accelerator.num_processes > tensor_parallel_size(trainer) else SINGLE}
    return {"parallel_layout": kind} if kind else {}


def _dimension_size(mesh: Any, name: str) -> int:
    return int(mesh.size(mesh.mesh_dim_names.index(name))) if name in mesh.mesh_dim_names else 1


def mesh_text(trainer: Any) -> str | None:
    """Return the dimensions of the first device mesh, as names with sizes; ``None`` without a mesh."""
    sizes = (f"{name}={mesh.size(i)}" for mesh in meshes(trainer)[:1] for i, name in enumerate(mesh.mesh_dim_names))
    return " ".join(sizes) or None


def tensor_parallel_size(trainer: Any) -> int:
    get_size = getattr(trainer, "get_tp_size", None)
    return int(get_size()) if get_size is not None else 1


def _torch_rank() -> int:
    distributed: Any = getattr(sys.modules.get("torch"), "distributed", None)
    is_initialized = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_rank()) if is_initialized else 0


class TrainerFigures:
    """Converts the totals and means of a Trainer's logs to means since its last log."""

    def __init__(self) -> None:
        self._last_total: tuple[float, int] | None = None  # tokens and steps at the last log with more tokens
        self._to_date = (0.0, 0.0)  # at the last log: tokens and seconds since the start of the training

    def take_figures(self, logs: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the figures of a log after this step, by names in `records.framework_figures`."""
        figures: dict[str, Any] = {TOKENS_PER_S_PER_GPU: logs.get(AXOLOTL)}
        total = next(filter(None, (_logged_number(logs, name) for name in TOTALS)), None)
        last_total, last_step = self._last_total or (0.0, step)
        if total is not None and (self._last_total is None or (step > last_step and total > last_total)):
            self._last_total = (total, step)
            if step > last_step:
                figures[TOKENS_PER_ITERATION] = (total - last_total) / (step - last_step)
        # transformers logs the mean rate since the start of the training, and the seconds since then.
        rate, seconds = _logged_number(logs, "train_tokens_per_second"), _logged_number(logs, "train_runtime")
        if rate is not None and seconds is not None:
            (last_tokens, last_seconds), self._to_date = self._to_date, (rate * seconds, seconds)
            if 0 < last_seconds < seconds:
                figures[TOKENS_PER_S] = (self._to_date[0] - last_tokens) / (seconds - last_seconds)
        return figures


def _logged_number(logs: Mapping[str, Any], name: str) -> float | None:
    value: Any = logs.get(name)
    return float(value) if type(value) in (int, float) else None


def max_positions(trainer: Any, args: Any) -> int | None:
    """Return the largest number of positions of a micro-batch, with padding; ``None`` if nothing limits it.

    TRL's trainers cut sequences at ``max_length``.  The sampler of ``group_by_length`` has the lengths of all
    sequences.  A limit of the tokenizer is no limit of the batches, because the dataset may be made otherwise.
    """
    collator = getattr(trainer, "data_collator", None)
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    limits = [limit for limit in _length_limits(trainer, args, collator) if type(limit[0]) is int and limit[0] > 0]
    samples = args.per_device_train_batch_size
    # Lengths are rounded up to the multiple.
    return min((num * samples * -(-length // multiple) * multiple for length, num in limits), default=None)


def _length_limits(trainer: Any, args: Any, collator: Any) -> Iterator[tuple[Any, int]]:
    """Yield limits: a maximal length (also ``None`` or invalid), and the number of sequences of a sample."""
    is_prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    for kind in type(trainer).__mro__:
        if is_prepared and kind.__name__ in _TRAINERS:
            yield getattr(args, "max_length", None), _TRAINERS[kind.__name__]
    for kind in type(collator).__mro__:
        if kind.__name__ in _COLLATORS:
            sequences = _WITH_KL if getattr(trainer, "calculate_KL", False) else _COLLATORS[kind.__name__]
            yield getattr(collator, "max_length", None), sequences
    yield _max_sequence_length(trainer), 1


def _max_sequence_length(trainer: Any) -> int | None:
    """Return the length of the longest sequence that the sampler lists."""
    sampler: Any = getattr(getattr(trainer, "callback_handler", None), "train_dataloader", None)
    for _ in range(_DEPTH):
        lengths = getattr(sampler, "lengths", None)
        if isinstance(lengths, list) and lengths and all(type(length) is int for length in lengths):
            return int(max(lengths))
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None


def precision(args: Any, model: Any) -> str | None:
    """Return the precision of a Trainer's autocast; without autocast, the type of the model's weights."""
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    types = (weight.dtype for weight in model.parameters() if weight.is_floating_point()) if model is not None else ()
    return next(map(precision_of, types), None)
