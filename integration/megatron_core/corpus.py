"""A text that is part of Python: the language reference of ``help()``, as bytes."""

from __future__ import annotations

import torch

VOCABULARY = 256
HELD_OUT = 0.05


class Corpus:
    """Cuts batches from the text; the batches are the same in every layout of the processes."""

    def __init__(self, sequence_length: int, global_batch_size: int, seed: int) -> None:
        self._sequence_length = sequence_length
        self._global_batch_size = global_batch_size
        self._seed = seed
        text = _read_text()
        held_out = int(len(text) * HELD_OUT)
        self._training, self._held_out = text[held_out:], text[:held_out]

    def training_batch(self, iteration: int, replica: int, replicas: int) -> torch.Tensor:
        """Return one replica's rows of an iteration's global batch; a row is one byte longer than a sequence."""
        return self._rows(self._training, self._seed + iteration, replica, replicas)

    def held_out_batch(self, number: int, replica: int, replicas: int) -> torch.Tensor:
        """Return one replica's rows of a batch that is not used for training."""
        return self._rows(self._held_out, number, replica, replicas)

    def _rows(self, text: torch.Tensor, seed: int, replica: int, replicas: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        last = len(text) - self._sequence_length
        starts = torch.randint(last, (self._global_batch_size,), generator=generator)
        mine = starts.chunk(replicas)[replica]
        return torch.stack([text[start : start + self._sequence_length + 1] for start in mine.tolist()]).long()


def _read_text() -> torch.Tensor:
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8)
