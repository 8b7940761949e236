"""The counts of the running iteration, from `effllm.count`."""

from __future__ import annotations

from typing import Any

from effllm.trainer.counts import whole_number


class Counted:
    """Sums of the counts, and the newest loss, since the end of the last iteration."""

    def __init__(self) -> None:
        self._counts = [0, 0, 0, 0]  # positions, samples, tokens, tokens with a label
        self._loss: Any = None
        self.has_any = False  #: whether a count is more than 0

    def add(self, tokens: Any, samples: Any, tokens_processed: Any, tokens_loss: Any, loss: Any) -> str:
        """Add the arguments of `effllm.count`; return an error text; the text is empty for valid arguments."""
        tokens, tokens_processed = (
            tokens_processed if tokens is None else tokens,
            tokens if tokens_processed is None else tokens_processed,
        )
        try:
            given = [whole_number(value or 0) for value in (tokens_processed, samples, tokens, tokens_loss)]
            is_right = min(given) >= 0
        except Exception:  # noqa: BLE001 - whatever the objects of the caller raise must not end the loop
            is_right = False
        if not is_right:
            return "effllm.count takes counts of at least 0 that are numbers, not tensors on a GPU; call ignored"
        self._counts = [before + now for before, now in zip(self._counts, given, strict=True)]
        self.has_any = any(self._counts)
        if getattr(loss, "is_cuda", False):
            return "effllm.count was given a loss on the GPU, which is not read: pass loss.item()"
        if loss is not None:
            self._loss = loss
        return ""

    def take(self) -> tuple[list[int], Any]:
        """Return and reset the counts and the loss."""
        counts, loss = self._counts, self._loss
        self._counts, self._loss, self.has_any = [0, 0, 0, 0], None, False
        return counts, loss
