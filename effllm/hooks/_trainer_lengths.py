"""The largest micro-batch that a Hugging Face Trainer can make, where its arguments or its sampler limit it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEPTH = 5  # of samplers inside samplers
#: TRL's trainers that cut or leave out longer sequences while they prepare the dataset, and its collators that cut
#: sequences; each with the number of sequences of a sample.  Older versions of the collators have no ``max_length``.
_TRAINERS = {"SFTTrainer": 1, "RewardTrainer": 2}
_COLLATORS = {"DataCollatorForPreference": 2, "DataCollatorForUnpairedPreference": 1}
_WITH_KL = 2  # sequences of a sample of the KTOTrainer, if its loss has a KL term


def max_positions(trainer: Any, args: Any) -> int | None:
    """Return the largest number of positions of a micro-batch, with padding; ``None`` if nothing limits it.

    TRL's trainers cut sequences at ``max_length``.  The sampler of ``group_by_length`` has the lengths of all
    sequences.  A limit of the tokenizer is no limit of the batches, because the dataset may be made otherwise.
    """
    collator = getattr(trainer, "data_collator", None)
    multiple = getattr(collator, "pad_to_multiple_of", None) or 1
    limits = [(one, sequences) for one, sequences in _limits(trainer, args, collator) if type(one) is int and one > 0]
    rows = args.per_device_train_batch_size
    return min((sequences * rows * -(-one // multiple) * multiple for one, sequences in limits), default=None)


def _limits(trainer: Any, args: Any, collator: Any) -> Iterator[tuple[Any, int]]:
    """Yield the lengths at which sequences end, each with the number of sequences of a sample."""
    is_prepared = not (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset")
    for kind in type(trainer).__mro__:
        if is_prepared and kind.__name__ in _TRAINERS:
            yield getattr(args, "max_length", None), _TRAINERS[kind.__name__]
    for kind in type(collator).__mro__:
        if kind.__name__ in _COLLATORS:
            sequences = _WITH_KL if getattr(trainer, "calculate_KL", False) else _COLLATORS[kind.__name__]
            yield getattr(collator, "max_length", None), sequences
    yield _longest(trainer), 1


def _longest(trainer: Any) -> int | None:
    """Return the length of the longest sequence that the sampler lists."""
    sampler: Any = getattr(getattr(trainer, "callback_handler", None), "train_dataloader", None)
    for _ in range(_DEPTH):
        lengths = getattr(sampler, "lengths", None)
        if isinstance(lengths, list) and lengths and all(type(one) is int for one in lengths):
            return int(max(lengths))
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return None
