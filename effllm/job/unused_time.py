"""The time of GPUs that are allocated to the job and used by no rank; a part of the state of a job. No I/O."""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Struct

from effllm.records.job import UNUSED_GPUS, GoodputSummary
from effllm.records.waterfall import OF_GPUS

UNUSED = "allocated GPUs that no rank used"
NOT_STATED = (
    f"{UNUSED}: no allocation is stated; Slurm states it in SLURM_JOB_GPUS, a Kubernetes device plugin in "
    "NVIDIA_VISIBLE_DEVICES"
)


MAX_BUSY = 2**17  # maximum number of GPUs in `UnusedTime.busy`
MAX_PERIODS = 1_000  # maximum number of periods in `UnusedTime.periods`


class UnusedTime(Struct):
    """The time of unused GPUs over all attempts; times are positions on the axis of `Goodput`."""

    seconds: float = 0.0  # GPU-seconds of earlier attempts
    # Start (as in `since_s`) and end of the ended periods of this attempt: the attempt may end before a period ends.
    periods: list[tuple[float | None, float]] = []
    # Unused GPU -> start of its period; None: the start of the attempt, which a late HELLO may still move.
    since_s: dict[str, float | None] = {}
    busy: set[str] = set()  # GPUs that a process or a rank used in this attempt, without or with the host
    evidence: str = ""
    unknown: str = NOT_STATED  # of this attempt
    attempts_unknown: int = 0  # number of earlier attempts with unknown unused GPUs
    unknown_s: float = 0.0  # time of these attempts

    @property
    def why_unknown(self) -> str:
        """The reason why GPUs of any attempt are unknown; empty if the unused GPUs of all attempts are known."""
        if self.unknown or not self.attempts_unknown:
            return self.unknown
        noun = "attempt" if self.attempts_unknown == 1 else "attempts"
        return f"{UNUSED}: unknown in {self.attempts_unknown:,} earlier {noun}"

    @property
    def num_unused(self) -> int | None:
        """Number of GPUs that are known to be unused now; ``None`` if nothing is known."""
        return None if self.unknown and not self.since_s else len(self.since_s)

    def gpu_seconds(self, goodput: GoodputSummary, begin_s: float, end_s: float) -> dict[str, float]:
        """Return the GPU-seconds of the run by class, with the unused GPUs; arguments as of `total`."""
        unused_s = self.total(begin_s, end_s)
        seconds = goodput.device_seconds if goodput.unit == OF_GPUS else {}
        return {**seconds, **({UNUSED_GPUS: unused_s} if unused_s else {})}

    def note_busy(self, keys: Collection[str]) -> None:
        """Record that processes use these GPUs."""
        if len(self.busy) < MAX_BUSY:
            self.busy.update(keys)

    def update(self, unused: Collection[str], begin_s: float, now_s: float) -> None:
        """Begin and end the periods of GPUs.

        Args:
            unused: the GPUs that are unused now.
            begin_s: start of the attempt.
            now_s: current position.
        """
        for key in [key for key in self.since_s if key not in unused]:
            self.periods.append((self.since_s.pop(key), now_s))
            self.note_busy({key})  # its next period begins later
        if (more := len(self.periods) - MAX_PERIODS) > 0:
            self.seconds += sum(_span_s(since_s, begin_s, until_s) for since_s, until_s in self.periods[:more])
            del self.periods[:more]
        for key in unused:
            was_busy = not self.busy.isdisjoint({key, key.partition("/")[2]})
            self.since_s.setdefault(key, now_s if was_busy else None)

    def end_attempt(self, begin_s: float, end_s: float) -> None:
        """End all periods at the end of an attempt."""
        self.seconds = self.total(begin_s, end_s)
        self.since_s, self.periods, self.busy = {}, [], set()
        if self.unknown and end_s > begin_s:
            self.attempts_unknown += 1
            self.unknown_s += end_s - begin_s
        self.unknown = f"{UNUSED}: no rank of this attempt has joined"

    def total(self, begin_s: float, end_s: float) -> float:
        """Return the GPU-seconds until a position; ``begin_s`` is the start of the attempt."""
        ended_s = sum(_span_s(since_s, begin_s, min(until_s, end_s)) for since_s, until_s in self.periods)
        return self.seconds + ended_s + sum(_span_s(since_s, begin_s, end_s) for since_s in self.since_s.values())


def _span_s(since_s: float | None, begin_s: float, end_s: float) -> float:
    return max(end_s - (begin_s if since_s is None else since_s), 0.0)
