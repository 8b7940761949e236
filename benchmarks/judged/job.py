"""A synchronous job in time: what each rank does in each iteration, when it does it, and what the job would save.

Plain data-parallel ranks wait for each other once in an iteration, at the end of backward: the wait for data, forward
and backward of one iteration follow the optimizer and the phases of the last one without any wait in between, so a rank
that is slow in its optimizer makes the others wait in the next iteration.  Sharded ranks (FSDP, ZeRO-3) wait for each
other also before forward.  No rule of the verdict is used here, and nothing of effllm is imported.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]
CHECKPOINT, EVALUATION, GENERATION = "checkpoint", "evaluation", "generation"
PHASES = (CHECKPOINT, EVALUATION, GENERATION)
MAX_ROUNDS = 40


@dataclass(frozen=True)
class Way:
    """A way of attaching effllm: the fact `framework`, the part of an iteration that is own time, and sharding."""

    name: str
    framework: str = ""  # empty: the loop calls effllm itself
    own: str = ""  # forward, or all (forward and backward); empty: no sync point
    is_sharded: bool = False

    @property
    def is_api(self) -> bool:
        return not self.framework


WAYS: dict[str, Way] = {
    one.name: one
    for one in (
        Way("api, sync point", "", "all"),
        Way("api, sync point before backward", "", "forward"),
        Way("api", ""),
        Way("torch, ddp", "torch"),
        Way("torch, sync point", "torch", "forward"),
        Way("torch, fsdp", "torch", is_sharded=True),
        Way("accelerate", "accelerate", "forward"),
        Way("transformers", "transformers", "forward"),
        Way("deepspeed", "deepspeed", "forward"),
        Way("deepspeed, ZeRO-3", "deepspeed", is_sharded=True),
        Way("fabric", "fabric", "forward"),
        Way("lightning", "lightning"),
        Way("torchtitan", "torchtitan", is_sharded=True),
        Way("torchtune", "torchtune"),
        Way("megatron.core", "megatron.core", "all"),
        Way("megatron-lm", "megatron-lm", "all"),
    )
}


@dataclass
class Attempt:
    """One attempt: iterations ``start`` to ``stop`` of the job (from 0), and what happens around them."""

    start: int
    stop: int
    gap_s: float = 0.0
    startup_s: float = 1.0
    shutdown_s: float = 0.1
    status: str = "completed"  # or killed, failed, stalled
    stuck_s: float = 0.0  # a hang in an iteration that never ends


@dataclass
class Job:
    """A job; arrays have a row for each iteration and a column for each rank, except ``communication``."""

    kind: str
    seed: int
    way: Way
    ranks: int
    per_host: int
    interval: int  # iterations of a report
    min_window_s: float  # 1: short reports are joined; 0: they are not
    step_s: float
    profile_every: int
    mfu: float
    wait: Seconds
    forward: Seconds
    backward: Seconds
    optimizer: Seconds
    idle: Seconds  # time in forward without a kernel
    communication: Seconds  # exposed
    clock: Seconds  # SM clock as a share of the maximum
    attempts: list[Attempt]
    late_s: Seconds  # of each rank: how much later than the job it begins
    stay_s: Seconds  # of each rank: how much longer than the others it stays
    limit: Seconds  # of each rank: its power limit as a share of the default
    phases: dict[str, Seconds] = field(default_factory=dict)  # marked, after an iteration
    reasons: dict[str, Seconds] = field(default_factory=dict)  # clocks event reason -> share of an iteration
    retries: NDArray[np.bool_] | None = None  # iterations with a retry of the allocator
    padding: float = 0.0  # share of the processed positions
    unused: int = 0

    @property
    def count(self) -> int:
        return len(self.communication)

    @property
    def work(self) -> Seconds:
        return self.forward + self.backward + self.optimizer

    def phase(self, name: str) -> Seconds:
        return self.phases.setdefault(name, np.zeros(self.wait.shape))


@dataclass
class Course:
    """The times of one attempt, for each of its iterations and ranks."""

    attempt: Attempt
    number: int
    begin_s: float
    end_s: float  # without the stay of single ranks
    starts: Seconds
    ends: Seconds

    @property
    def steps(self) -> Seconds:
        return self.ends - self.starts


def courses(job: Job) -> list[Course]:
    """Return the attempts of a job in time, from 0."""
    found, now_s = [], 0.0
    all_phases = sum(job.phases.values(), np.zeros(job.wait.shape))
    for number, one in enumerate(job.attempts, 1):
        at = slice(one.start, one.stop)
        phases, optimizer = all_phases[at], job.optimizer[at]
        ready = job.wait[at].copy()  # from the common moment after the last all-reduce to the start of an iteration
        ready[1:] += optimizer[:-1] + phases[:-1]
        computing = job.forward[at] + job.backward[at]
        if job.way.is_sharded:
            period = ready.max(axis=1) + computing.max(axis=1) + job.communication[at]
        else:
            period = (ready + computing).max(axis=1) + job.communication[at]
        begin_s = now_s + one.gap_s
        common = begin_s + one.startup_s + np.cumsum(period)
        ends = common[:, None] + optimizer
        starts = (common - period)[:, None] + ready
        end_s = float((ends[-1] + phases[-1]).max()) + one.stuck_s + one.shutdown_s
        found.append(Course(one, number, begin_s, end_s, starts, ends))
        now_s = end_s
    return found


def device_seconds(job: Job) -> float:
    """Return the elapsed time of the job, for all its devices."""
    return (courses(job)[-1].end_s + float(job.stay_s.max())) * (job.ranks + job.unused)


# --- what is planted ---


@dataclass
class Planted:
    """A planted loss: what is added to arrays of the job for a size of 1; ``other`` changes anything else."""

    adds: dict[str, Seconds] = field(default_factory=dict)
    other: Callable[[Job, float], None] | None = None
    slow: frozenset[int] = frozenset()  # ranks that are truly slower than their peers
    least: float = 0.0  # smallest share of the loss
    most: float = 1.0
    is_fixed: bool = False  # whether the size is 1, and nothing is lost
    #: Device time that the fix saves, if it is not the difference of the job with and without the loss.
    saved_s: Callable[[Job], float] | None = None

    def plant(self, job: Job, size: float) -> Job:
        """Return the job with the loss; 0 is the job without it."""
        made = copy.copy(job)
        made.phases, made.reasons = dict(job.phases), dict(job.reasons)
        made.attempts = [replace(one) for one in job.attempts]
        if size > 0:
            for name, array in self.adds.items():
                if name in PHASES:
                    made.phases[name] = made.phase(name) + size * array
                else:
                    setattr(made, name, getattr(made, name) + size * array)
            if self.other is not None:
                self.other(made, size)
        return made

    def gain(self, job: Job, made: Job) -> float:
        """Return the gain in kept tokens per device time if the loss alone ends."""
        whole_s = device_seconds(made)
        saved_s = whole_s - device_seconds(self.plant(job, 0.0)) if self.saved_s is None else self.saved_s(made)
        return whole_s / (whole_s - saved_s) - 1


def calibrated(planted: Planted, job: Job, share: float) -> tuple[Job, float]:
    """Return the job in which the loss is about this share of the device time, and the true gain without the loss."""
    if planted.is_fixed:
        return planted.plant(job, 1.0), 0.0
    share = min(max(share, planted.least), planted.most)
    low, high, size = 0.0, 0.0, 0.1
    for _ in range(MAX_ROUNDS):
        made = planted.plant(job, size)
        gain = planted.gain(job, made)
        found = gain / (1 + gain)
        if abs(found - share) <= 0.01 * share:
            break
        low, high = (size, high) if found < share else (low, size)
        size = 2 * size if not high else (low + high) / 2
    return made, gain


def chance_of(kind: str, seed: int, part: str = "") -> np.random.Generator:
    """Return the random numbers of a part of a job; other parts have other numbers."""
    return np.random.default_rng([zlib.crc32(f"judged {kind} {part}".encode()), seed])
