"""Tokens of a collator's batches, counted in the training process, each batch once with any number of workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from effllm.instruments._number import UserWarnings
from effllm.instruments._statistics import NAN
from effllm.trainer.batch import Batch, read_batch
from effllm.trainer.collector import get_metrics_collector


class CountingCollator:
    """A collator with the counts of its batches.

    A collator may run in a worker process, and a worker may make batches that are never used.  Therefore a batch is
    counted when it arrives: by `over` in a plain loop, or by the hook of the Trainer, which has this collator as
    ``data_collator``.  Padding that a mask shows is not counted, and packed rows have no padding.

        collator = CountingCollator(collator)
        loader = DataLoader(rows, collate_fn=collator, num_workers=4)
        for batch in collator.over(loader): ...

    Args:
        collator: the collator, a function of the rows of a batch.

    Raises:
        TypeError: ``collator`` is not callable.
    """

    def __init__(self, collator: Callable[[Any], Any]) -> None:
        if not callable(collator):
            raise TypeError(f"collator={collator!r} is not callable")
        self.collator = collator
        self.batches = 0  #: number of batches that arrived
        self._sums: list[Any] = [0, 0, 0, 0]  # samples, positions, tokens, tokens with a label; tensors on a GPU
        self._has_text = self._has_unknown = False  # whether a batch had text, or could not be counted
        self._warn_once = UserWarnings()

    def __call__(self, features: Any) -> Any:
        """Return the batch of the collator."""
        return self.collator(features)

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, and count each batch; counts on a CPU are also given to `effllm.count`.

        A framework's hook that counts tokens itself does not use the counts of `effllm.count`.
        """
        for batch in loader:
            counts = self._counts_of(batch)
            self.count_batch(counts)
            if counts is not None and counts.source and not hasattr(counts.tokens, "is_cuda"):
                get_metrics_collector().count(
                    counts.tokens, counts.samples, counts.tokens_processed, counts.tokens_loss
                )
            yield batch

    def count_batch(self, counts: Batch | None) -> None:
        """Add the counts of a batch that is trained now; ``None`` for a batch of an unknown kind."""
        self.batches += 1
        if counts is None:
            self._warn_once("a batch without named tensors: its tokens cannot be counted", stacklevel=4)
            self._has_unknown = True
            return
        self._has_text = self._has_text or bool(counts.source)
        of_batch = (counts.samples, counts.tokens_processed, counts.tokens, counts.tokens_loss)
        self._sums = [total + value for total, value in zip(self._sums, of_batch, strict=True)]

    @property
    def samples(self) -> float:
        """Number of sequences; NaN if a batch could not be counted, or no batch arrived."""
        return NAN if self._has_unknown or not self.batches else int(self._sums[0])

    @property
    def tokens_processed(self) -> float:
        """Number of positions, including padding; NaN if a batch could not be counted, or no batch had text."""
        return self._sum_or_nan(1)

    @property
    def tokens(self) -> float:
        """Positions without padding; NaN if `tokens_processed` is NaN.  On a GPU, a read waits for the GPU."""
        return self._sum_or_nan(2)

    @property
    def tokens_loss(self) -> float:
        """Positions with a label; NaN if `tokens_processed` is NaN.  On a GPU, a read waits for the GPU."""
        return self._sum_or_nan(3)

    def _sum_or_nan(self, index: int) -> float:
        return NAN if self._has_unknown or not self._has_text else int(self._sums[index])

    def _counts_of(self, batch: Any) -> Batch | None:
        """Return the counts, as numbers if they are in the host's memory; on a GPU, a read would wait."""
        try:
            counts = read_batch(batch)
        except Exception:  # noqa: BLE001 - the loop must not end because of a batch of an unknown kind
            return None
        for name in ("samples", "tokens", "tokens_loss") if counts is not None else ():
            value = getattr(counts, name)
            if getattr(getattr(value, "device", None), "type", "") == "cpu":
                setattr(counts, name, int(value))
        return counts
