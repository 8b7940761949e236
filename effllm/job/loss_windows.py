"""The windows to which a loss points, and where the loss is relative to them. No I/O."""

from __future__ import annotations

from effllm.job.losses import STRAGGLERS, Loss, cause_of
from effllm.job.prevalence import ALWAYS_COUNTED, Prevalence
from effllm.records.job import Summary
from effllm.records.verdict import AFTER, BEFORE, IN, NO_WINDOW, LossWindows

#: A loss in a smaller share of the windows is concentrated, and the worst window is named.
MAX_RARE_SHARE = 0.1


def windows_of(loss: Loss, summary: Summary, seen: Prevalence) -> tuple[LossWindows | None, str]:
    """Return the windows of a loss, and whether the loss is in, before or after them."""
    found, place = _found(loss, summary, seen), IN
    if loss.cause in ("restarts", "startup"):
        place = BEFORE
    # In an earlier attempt, a hang after the last window has no window of this attempt.
    elif loss.cause == "hang" and found is None and (summary.attempts == 1 or summary.status == "stalled"):
        found, place = seen.last(), AFTER
    return found, place if found is not None else NO_WINDOW


def windows_of_retries(summary: Summary) -> LossWindows | None:
    """Return the windows with retries of the allocator."""
    found = summary.memory_pressure
    if found is None:
        return None
    return LossWindows(found.windows, found.first_iteration, found.last_iteration, found.worst_iteration)


def windows_text(cause: str, seen: Prevalence) -> str:
    """Return the number of windows of a loss; a loss in few windows has the iteration of the worst window."""
    windows, total = seen.of(cause), seen.windows
    if windows is None or cause not in ALWAYS_COUNTED:
        return ""
    text = f", in {windows.count:,} of {total:,} windows"
    is_rare = windows.count < MAX_RARE_SHARE * total
    return f"{text}, most at iteration {windows.worst_iteration:,}" if is_rare else text


def _found(loss: Loss, summary: Summary, seen: Prevalence) -> LossWindows | None:
    if loss.cause == "memory_pressure":
        return windows_of_retries(summary)
    if not loss.source.startswith(STRAGGLERS):
        return seen.of(loss.cause)
    # The windows of all stragglers are counted together; stragglers with several causes have no windows of one cause.
    return seen.of("straggler") if len({cause_of(one) for one in summary.stragglers}) == 1 else None
