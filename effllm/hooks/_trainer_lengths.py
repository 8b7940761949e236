"""The largest micro-batch that a Hugging Face Trainer can make, where its arguments or its sampler limit it."""

from __future__ import annotations

from typing import Any

_DEPTH = 5  # of samplers inside samplers


def max_positions(trainer: Any, args: Any) -> int | None:
    """Return the largest number of positions of a micro-batch, with padding; ``None`` if nothing limits it.

    TRL's SFTTrainer cuts its sequences at ``max_length``.  The sampler of ``group_by_length`` has the lengths of all
    sequences.  A limit of the tokenizer is no limit of the batches, because the dataset may be made otherwise.
    """
    limits = [one for one in (_cut_at(trainer, args), _longest(trainer)) if one]
    if not limits:
        return None
    multiple = getattr(getattr(trainer, "data_collator", None), "pad_to_multiple_of", None) or 1
    return int(args.per_device_train_batch_size * -(-min(limits) // multiple) * multiple)


def _cut_at(trainer: Any, args: Any) -> int | None:
    """Return the length at which an SFTTrainer cuts sequences while it prepares its dataset."""
    is_sft = any(kind.__name__ == "SFTTrainer" for kind in type(trainer).__mro__)
    is_prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    length = getattr(args, "max_length", None)
    return length if is_sft and is_prepared and isinstance(length, int) and length > 0 else None


def _longest(trainer: Any) -> int | None:
    """Return the length of the longest sequence that the sampler lists."""
    sampler: Any = getattr(getattr(trainer, "callback_handler", None), "train_dataloader", None)
    for _ in range(_DEPTH):
        lengths = getattr(sampler, "lengths", None)
        if isinstance(lengths, list) and lengths and all(type(one) is int for one in lengths):
            return int(max(lengths))
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None
