"""Draws jobs with a planted cause: the shape of the job, the cause and its size, and often a smaller second cause.

Every job follows from its cause and its seed.  This module and `timeline` import nothing from effllm.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np

#: Cause -> stated threshold: the smallest share of the device time of the job that is an accusation.
THRESHOLDS: dict[str, float] = {
    "data_loading": 0.05,
    "straggler": 0.05,
    "throttled": 0.05,
    "power_limit": 0.05,
    "exposed_communication": 0.15,
    "checkpoint": 0.05,
    "evaluation": 0.10,
    "restarts": 0.05,
    "padding": 0.05,  # and `MIN_PADDING` of the positions
    "hang": 0.02,
    "unused_gpus": 0.02,
    "device_idle": 0.15,
    "memory_pressure": 0.05,
}
HEALTHY = "healthy"
#: Smallest share of padding in the processed positions that is an accusation.
MIN_PADDING = 0.15
#: A planted share is between the threshold times the first number and the threshold times the second number.
SIZES = (1.15, 5.0)
MAX_SHARE = 0.45
#: Largest share of a second cause, as a share of the first.
MAX_SECOND = 0.6
#: Causes that cannot be planted together, because both change the same measurement.
SLOW_RANKS = frozenset({"straggler", "throttled", "power_limit"})
#: Sizes in jobs of seconds: a restart takes at least a second, and a stall is reported from a second on.
SHORT_SIZES = {"hang": (0.3, 0.42), "restarts": (0.2, 0.4)}
MIN_HANG_S = 45.0  # effllm reports a stall after 30 s
NUM_SEEDS, NUM_HEALTHY = 20, 100


@dataclass(frozen=True)
class Shape:
    """The job without planted causes.  Seconds are of one rank; shares are of a step, unless stated otherwise."""

    ranks: int
    ranks_per_host: int
    windows: int
    log_interval: int
    step_s: float
    jitter: float  # standard deviation of the computation time of a rank
    tail: float  # share of iterations in which one rank is delayed
    data: float  # data wait
    communication: float  # exposed communication
    idle: float  # time without kernels
    padding: float  # share of the processed positions
    evaluation: float  # share of the elapsed time
    checkpoint: float  # share of the elapsed time
    startup_s: float
    shutdown_s: float
    profile_every: int  # 0: no profile
    mfu: float  # of the computation
    hardware_flops: float  # hardware FLOPs over model FLOPs
    clock: float  # mean SM clock as a share of the maximum
    power_cap: float  # share of time at the power limit
    varies: float  # standard deviation of the computation time of an iteration, the same on all ranks
    late_start: float = 0.2  # slow ranks are slow from a random iteration in this part of the job on
    is_short: bool = False  # whether the job is run with real processes, in seconds

    @property
    def iterations(self) -> int:
        return self.windows * self.log_interval


@dataclass(frozen=True)
class Planted:
    """A planted cause.

    ``share`` is its share of the device time of the job; ``spread`` in 0..1 selects the kind, and ``count`` the number
    of restarts, of slow ranks or of unused GPUs.  A slow rank computes longer, or (``by_data``) waits longer for data.
    """

    cause: str
    share: float
    spread: float = 0.0
    count: int = 1
    by_data: bool = False


@dataclass(frozen=True)
class PlantedJob:
    """A job, with its causes in the order of their size."""

    kind: str  # a cause, or `HEALTHY`
    seed: int
    shape: Shape
    causes: tuple[Planted, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"

    def find(self, cause: str) -> Planted | None:
        return next((one for one in self.causes if one.cause == cause), None)


def chance_of(kind: str, seed: int, part: str = "") -> np.random.Generator:
    """Return the random numbers of a part of a job; other parts have other numbers."""
    return np.random.default_rng([zlib.crc32(kind.encode()), seed, zlib.crc32(part.encode())])


def draw(kind: str, seed: int, redraw: int = 0) -> PlantedJob:
    """Return a job of a cause and a seed; odd seeds have a second cause.  `timeline.planned` rejects some draws."""
    chance = chance_of(kind, seed, f"draw {redraw}")
    if kind == HEALTHY:
        return PlantedJob(kind, seed, _healthy_shape(chance, seed), _usual_restart(chance, seed))
    shape = _shape(chance, int(chance.choice([4, 8, 16, 32] if kind in SLOW_RANKS else [2, 4, 8, 16, 32])))
    first = _planted(kind, chance, shape, _size(kind, chance))
    causes = [first]
    if seed % 2:
        others = [one for one in THRESHOLDS if one != kind and not {one, kind} <= SLOW_RANKS]
        other = str(chance.choice(others))
        # A second cause may be below its own threshold.
        causes.append(_planted(other, chance, shape, first.share * float(chance.uniform(0.2, MAX_SECOND))))
    shape = _fitting(shape, causes, chance)
    return PlantedJob(kind, seed, shape, tuple(causes))


def shortened(job: PlantedJob) -> PlantedJob:
    """Return the job with few ranks and short iterations, so that real processes run it in some seconds.

    Some sizes change: a hang must last longer than the shortest timeout of stalls (a second), and GPUs of hosts with a
    few ranks are used.  The draw is rejected (no causes) if a second cause cannot be that small in a short job.
    """
    ranks = 4 if any(one.cause in SLOW_RANKS for one in job.causes) else 2
    chance = chance_of(job.kind, job.seed, "short")
    causes = []
    for number, one in enumerate(job.causes):
        if one.cause in SHORT_SIZES and number == 0:
            causes.append(replace(one, share=float(chance.uniform(*SHORT_SIZES[one.cause])), count=min(one.count, 2)))
        elif one.cause == "unused_gpus" and number == 0:
            causes.append(replace(one, count=1, share=1 / (ranks + 1)))
        elif one.cause in (*SHORT_SIZES, "unused_gpus"):
            return replace(job, causes=())
        else:
            causes.append(replace(one, count=min(one.count, ranks)))
    shape = replace(
        job.shape, ranks=ranks, ranks_per_host=4, windows=24, log_interval=10, step_s=0.0125 * ranks, startup_s=0.3,
        shutdown_s=0.02, late_start=0.0, is_short=True,
    )  # fmt: skip
    return replace(job, shape=shape, causes=tuple(causes))


def _size(kind: str, chance: np.random.Generator) -> float:
    low, high = (THRESHOLDS[kind] * times for times in SIZES)
    if kind == "padding":  # padding is in the computation only: this is 15 % of the positions
        low = max(low, 0.16)
    return float(np.exp(chance.uniform(np.log(low), np.log(min(high, MAX_SHARE)))))


def _planted(cause: str, chance: np.random.Generator, shape: Shape, share: float) -> Planted:
    spread, count = float(chance.uniform()), 1
    if cause == "restarts":
        count = int(chance.integers(1, 5))
    elif cause == "unused_gpus":
        # A whole number of GPUs, at least the wanted share.
        count = max(int(np.ceil(share / (1 - share) * shape.ranks)), 1)
        share = count / (shape.ranks + count)
    elif cause in ("throttled", "power_limit"):
        # One GPU, the GPUs of one host, or all GPUs.
        count = (1, min(shape.ranks_per_host, shape.ranks), shape.ranks)[int(spread * 3)]
    return Planted(cause, share, spread, count)


def _shape(chance: np.random.Generator, ranks: int) -> Shape:
    def between(low: float, high: float) -> float:
        return float(chance.uniform(low, high))

    return Shape(
        ranks=ranks,
        ranks_per_host=int(chance.choice([4, 8])),
        windows=int(chance.integers(24, 41)) if ranks <= 16 else int(chance.integers(20, 26)),
        log_interval=int(chance.choice([10, 20])),
        step_s=between(0.25, 1.2),
        jitter=between(0.002, 0.01),
        tail=between(0.0, 0.02),
        data=between(0.001, 0.015),
        communication=between(0.02, 0.08),
        idle=between(0.01, 0.06),
        padding=between(0.0, 0.06),
        evaluation=float(chance.choice([0.0, between(0.005, 0.04)])),
        checkpoint=float(chance.choice([0.0, between(0.002, 0.02)])),
        startup_s=between(2.0, 8.0),
        shutdown_s=between(0.1, 2.0),
        profile_every=5,
        mfu=between(0.35, 0.6),
        hardware_flops=float(chance.choice([1.0, between(1.0, 1.05)])),
        clock=between(0.94, 1.0),
        power_cap=between(0.0, 0.2),
        varies=between(0.0, 0.05),
    )


def _healthy_shape(chance: np.random.Generator, seed: int) -> Shape:
    ranks = int(chance.choice([1, 2, 3, 4, 8, 16, 32, 64]))
    shape = _shape(chance, ranks)
    is_at_cap = seed % 4 == 1
    return replace(
        shape,
        windows=int(chance.choice([12, 20, 40])) if ranks < 32 else 16,
        log_interval=int(chance.choice([5, 10, 20])),
        step_s=float(chance.uniform(0.4, 3.0)) if seed % 5 else float(chance.uniform(3.0, 15.0)),
        profile_every=5 if seed % 2 else 0,
        # At the default power limit, a busy GPU runs below its maximum clock.
        clock=float(chance.uniform(0.72, 0.9)) if is_at_cap else shape.clock,
        power_cap=float(chance.uniform(0.5, 1.0)) if is_at_cap else shape.power_cap,
        varies=float(chance.uniform(0.0, 0.25)) if seed % 3 == 0 else shape.varies,
        padding=float(chance.uniform(0.0, 0.1)),
        evaluation=float(chance.choice([0.0, chance.uniform(0.01, 0.06)])),
        startup_s=float(chance.uniform(1.0, 4.0)),
    )


def _usual_restart(chance: np.random.Generator, seed: int) -> tuple[Planted, ...]:
    """Return one restart with a small share, in every tenth healthy job."""
    share = float(chance.uniform(0.01, 0.03))
    return (Planted("restarts", share, float(chance.uniform()), 1),) if seed % 10 == 7 else ()


def _fitting(shape: Shape, causes: list[Planted], chance: np.random.Generator) -> Shape:
    """Return the shape with steps so long that hangs, restarts and GPUs of a host fit in."""
    needed_s = 0.0
    for one in causes:
        if one.cause == "hang":
            needed_s = max(needed_s, MIN_HANG_S / one.share * float(chance.uniform(1.0, 1.5)))
        elif one.cause == "restarts":
            needed_s = max(needed_s, one.count * 12.0 / one.share)
    step_s = max(shape.step_s, needed_s * (1 - sum(one.share for one in causes)) / shape.iterations)
    # Startup is a small share of the job, and at least a share of each restart.
    startup_s = min(shape.startup_s, 0.02 * shape.iterations * step_s)
    return replace(shape, step_s=step_s, startup_s=startup_s)
