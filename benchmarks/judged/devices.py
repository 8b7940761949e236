"""Low clocks, with and without a loss.

A part of the work is bound by memory and does not become slower.  The clock of a GPU with a lower power limit falls
less than in proportion to the limit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.judged.job import Job, Planted

HEAT = ("sw_thermal", "hw_thermal", "hw_slowdown", "power_brake")
CAP, ANY = "power_cap", "any"


def low_clock(
    reason: str, is_on_all: bool, steady: bool = False
) -> Callable[[Job, np.random.Generator, float], Planted]:
    """Plant a low clock: by heat, by a power limit, or by a lock, which has no reason in the driver."""

    def plan(job: Job, chance: np.random.Generator, _share: float) -> Planted:
        size = job.wait.shape
        mask = np.zeros(size)
        if is_on_all:
            ranks = np.arange(job.ranks)
        elif chance.random() < 0.5 or job.ranks <= job.per_host:
            ranks = np.array([int(chance.integers(job.ranks))])
        else:  # the GPUs of one host
            host = int(chance.integers(job.ranks)) // job.per_host
            ranks = np.flatnonzero(np.arange(job.ranks) // job.per_host == host)
        duty = float(chance.uniform(0.4, 1.0)) if reason == "heat" and not steady else 1.0
        mask[:, ranks] = duty
        if reason == "heat" and not steady and chance.random() < 0.6:
            mask[: int(chance.uniform(0.1, 0.4) * size[0])] = 0  # it was cool at first
        compute, names = float(chance.choice([1.0, 0.85, 0.7])), {"heat": (str(chance.choice(HEAT)), ANY)}
        power = float(chance.uniform(0.4, 0.9))

        def other(made: Job, size: float) -> None:
            made.clock = made.clock * (1 - mask + mask / (1 + size))
            for name in names.get(reason, (CAP,) if reason == "limit" else ()):
                made.reasons[name] = mask * (0.97 if reason == "limit" else 1.0)
            if reason == "limit":
                made.limit = np.where(mask.max(axis=0) > 0, (1 + size) ** (-1 / power), 1.0)

        adds = {name: mask * getattr(job, name) * compute for name in ("forward", "backward", "optimizer")}
        slow = frozenset(ranks.tolist())  # if every GPU is slow, any may be named
        return Planted(adds, other, slow)

    return plan


def cool(job: Job, chance: np.random.Generator, _share: float) -> Planted:
    """Low clocks without a loss: the usual power cap, or heat that hardly lowers the clock."""
    kind, rank = int(chance.integers(3)), int(chance.integers(job.ranks))
    depth, duty = float(chance.uniform(0.72, 0.9)), float(chance.uniform(0.3, 1.0))

    def other(made: Job, _size: float) -> None:
        shape = made.wait.shape
        if kind == 0:  # all GPUs run at their default power limit
            made.clock = made.clock * depth
            made.reasons[CAP] = np.full(shape, duty)
        elif kind == 1:  # heat of one GPU for a part of the time, with a clock that is 1 % lower
            heat = duty * (np.arange(shape[1]) == rank) * np.ones(shape)
            made.clock, made.reasons[HEAT[0]], made.reasons[ANY] = made.clock * (1 - 0.01 * heat), heat, heat
        else:  # heat of all GPUs in a tenth of the time
            heat = np.full(shape, 0.1)
            made.clock, made.reasons[HEAT[1]], made.reasons[ANY] = made.clock * 0.985, heat, heat

    return Planted({}, other, is_fixed=True)
