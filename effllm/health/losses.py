"""Losses that are NaN or infinite, of all ranks, window by window: pure."""

from __future__ import annotations

from typing import NamedTuple

from effllm.aggregation.account import Rows
from effllm.aggregation.ledger import Ledger


class LossNews(NamedTuple):
    """A change of state, as an event."""

    kind: str  # loss_not_finite or loss_finite
    text: str


def judge(rows: Rows, ledger: Ledger) -> LossNews | None:
    """Return whether the loss of a window ceased or began again to be finite; enter in the ledger what comes of it."""
    count, first = rows.counts["losses_not_finite"], rows.first_not_finite
    if count:
        if ledger.first_not_finite is None:
            ledger.first_not_finite = first
        if ledger.is_loss_finite:
            ledger.is_loss_finite = False
            return LossNews("loss_not_finite", f"the loss is NaN or infinite at iteration {first}")
    elif rows.loss is not None and not ledger.is_loss_finite:
        ledger.is_loss_finite = True
        shown = max(row.iteration_shown for row in rows)
        total = ledger.whole.losses_not_finite
        return LossNews(
            "loss_finite",
            f"the loss is finite again at iteration {shown}, after {total} losses of the run that were NaN or infinite",
        )
    return None
