"""The verdict on a job: the largest avoidable loss, its evidence, and the next action."""

from __future__ import annotations

from msgspec import Struct

HEALTHY, NO_VERDICT = "healthy", "unknown"

#: Cause -> meaning: the values of `Verdict.cause`.  Thresholds: effllm/job/losses.py; explanations: docs/verdict.md.
CAUSES: dict[str, str] = {
    HEALTHY: "no loss is above its threshold, and the steps are split by a profile",
    NO_VERDICT: "too little is measured for a statement",
    "data_loading": "all ranks wait for data between steps",
    "straggler": "ranks wait for a rank that is slower in most windows",
    "throttled": "GPUs run at a low clock: heat, hardware slowdown, power brake, or a locked clock",
    "power_limit": "GPUs run at a low clock, and their power limit is below their default limit or the limit of peers",
    "exposed_communication": "communication that does not overlap with computation",
    "device_idle": "devices without work inside the steps",
    "padding": "steps compute positions that are padding",
    "memory_pressure": "memory pressure with allocator retries: torch frees all cached memory, and allocates again",
    "checkpoint": "time of checkpoints",
    "evaluation": "time of evaluation",
    "restarts": "gaps between attempts, start-ups of later attempts, and repeated steps",
    "startup": "time before the first iteration, in a job of at least half an hour",
    "idle": "ranks that joined late or left early, in a job of at least half an hour",
    "hang": "no rank made progress",
    "unused_gpus": "allocated GPUs that no rank used",
}

#: Values of `Verdict.confidence`: whether a larger loss can be hidden in device time that is not split.
HIGH, MEDIUM, NO_CONFIDENCE = "high", "medium", "none"


#: Values of `Evidence.place`: the loss is in its windows, before each of its windows, or after its window; or no window
#: can be named.
IN, BEFORE, AFTER, NO_WINDOW = "in", "before", "after", "none"


class LossWindows(Struct, frozen=True):
    """The windows of a loss.  Iterations are the numbers shown at the end of a window."""

    count: int
    first_iteration: int
    last_iteration: int
    worst_iteration: int | None = None  # of the window with the largest loss; None if the windows are not compared
    worst_share: float | None = None  # of the wall time, the positions or the GPUs of this window
    measured: int | None = None  # windows in which the loss can be seen; None if they are not counted

    def with_later(self, other: LossWindows) -> LossWindows:
        """Return these windows and later windows together."""
        worst = other if (other.worst_share or 0.0) > (self.worst_share or 0.0) else self
        return LossWindows(
            self.count + other.count,
            self.first_iteration,
            other.last_iteration,
            worst.worst_iteration,
            worst.worst_share,
        )


class Evidence(Struct, frozen=True, omit_defaults=True):
    """One statement that supports a verdict, with the place of its numbers."""

    claim: str
    source: str  # a file of the run folder and the path of the value in it
    place: str  # IN, BEFORE, AFTER or NO_WINDOW
    share: float | None = None  # of all device time
    windows: LossWindows | None = None  # in windows-*.jsonl; None if no window can be named


class Verdict(Struct, frozen=True):
    """The verdict on a job, from its waterfall."""

    cause: str  # one of CAUSES
    text: str  # at most 62 letters, for the console
    why: str
    next: str  # the next action, in the words of the user's framework
    bound: float | None  # upper bound of the gain in tokens per device time if the loss is removed; 0.14 is 14 %
    confidence: str  # HIGH, MEDIUM or NO_CONFIDENCE
    evidence: tuple[Evidence, ...] = ()  # the largest losses, also below their thresholds
