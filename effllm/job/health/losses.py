"""Detects losses that are NaN or infinite in the windows of all ranks. No I/O."""

from __future__ import annotations

from effllm.job.ledger import Ledger
from effllm.job.rows import Rows
from effllm.records.rank import Event


def judge(rows: Rows, ledger: Ledger, time_s: float) -> Event | None:
    """Record in the ledger whether a window's loss is finite; return an event after a change."""
    count, first = rows.counts["losses_not_finite"], rows.first_not_finite
    if count:
        if ledger.first_not_finite is None:
            ledger.first_not_finite = first
        if ledger.is_loss_finite:
            ledger.is_loss_finite = False
            return Event(time_s, "loss_not_finite", f"the loss is NaN or infinite at iteration {first}")
    elif rows.loss is not None and not ledger.is_loss_finite:
        ledger.is_loss_finite = True
        shown = max(row.iteration_shown for row in rows)
        total = ledger.whole.counts.get("losses_not_finite", 0)
        after = f"after {total} losses of the run that were NaN or infinite"
        return Event(time_s, "loss_finite", f"the loss is finite again at iteration {shown}, {after}")
    return None
