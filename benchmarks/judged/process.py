"""Losses around the iterations: restarts, hangs, late and early ranks, unused GPUs; and failures and generation."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.judged.job import GENERATION, Attempt, Job, Planted, device_seconds

Chance = np.random.Generator
MIN_HANG_S = 45.0  # a stall is reported after 30 s


def retries(windows: float) -> Callable[[Job, Chance, float], Planted]:
    """Plant retries of torch's allocator, in this share of the windows, in many of their iterations."""

    def plan(job: Job, chance: Chance, _share: float) -> Planted:
        number = np.arange(job.count) // job.interval
        tight = chance.random(number[-1] + 1) < (windows * chance.uniform(0.7, 1.3) if windows < 1 else 1.0)
        has = tight[number] & (chance.random(job.count) < chance.uniform(0.4, 0.9))
        each = has[:, None] * chance.uniform(0.8, 1.2, (job.count, 1)) * chance.uniform(0.95, 1.0, job.wait.shape)

        def other(made: Job, _size: float) -> None:
            made.retries = has

        return Planted({"backward": each * job.step_s}, other)

    return plan


def restarts(job: Job, chance: Chance, share: float) -> Planted:
    """Plant crashes, each with a gap, a start-up, and iterations since the last checkpoint that are repeated."""
    times = int(chance.integers(1, 4))
    stops = np.sort(chance.choice(np.arange(5, 19), times, replace=False)) * job.count // 20
    most = int(share * job.count / times * chance.uniform(0.1, 0.7))
    again = [min(int(chance.integers(0, most + 1)), int(stop) - 1) for stop in stops]
    if chance.random() < 0.5:  # checkpoints are at the ends of windows
        again = [count + (int(stop) - count) % job.interval for count, stop in zip(again, stops, strict=True)]
    again = [min(count, int(stop) // 3) for count, stop in zip(again, stops, strict=True)]
    part, status = float(chance.uniform(0.1, 0.6)), str(chance.choice(["killed", "failed"]))

    def other(made: Job, size: float) -> None:
        first = made.attempts[0]
        each_s = size * made.count * made.step_s / times
        made.attempts, start = [], 0
        for stop, count in zip(stops, again, strict=True):
            made.attempts.append(Attempt(start, int(stop), part * each_s, (1 - part) * each_s, 0.05, status))
            start = int(stop) - count
        made.attempts.append(Attempt(start, made.count, part * each_s, (1 - part) * each_s, first.shutdown_s))
        made.attempts[0].gap_s, made.attempts[0].startup_s = 0.0, first.startup_s

    return Planted({}, other)


def startup(job: Job, _chance: Chance, _share: float) -> Planted:
    job.attempts[0].startup_s = 1e-3

    def other(made: Job, size: float) -> None:
        made.attempts[0].startup_s = size * made.count * made.step_s

    return Planted({}, other)


def leaving(job: Job, _chance: Chance, _share: float) -> Planted:
    """Rank 0 stays to export the model, and the other ranks leave; their idle time is the loss."""

    def other(made: Job, size: float) -> None:
        made.stay_s = np.where(np.arange(made.ranks) == 0, size * made.count * made.step_s, 0.0)

    most = 0.3 * (job.ranks - 1) / job.ranks
    return Planted({}, other, most=max(most, 0.115), saved_s=lambda made: float(made.stay_s.max()) * (made.ranks - 1))


def joining(job: Job, chance: Chance, _share: float) -> Planted:
    """Three of four ranks begin late; the others wait for them in their start-up."""
    is_late = np.arange(job.ranks) % 4 != int(chance.integers(4))

    def other(made: Job, size: float) -> None:
        late_s = size * made.count * made.step_s
        made.late_s = np.where(is_late, late_s, 0.0)
        made.attempts[0].startup_s += late_s

    return Planted({}, other, saved_s=lambda made: float(made.late_s.sum()))


def hang(job: Job, chance: Chance, _share: float) -> Planted:
    """Plant a stall of all ranks in the middle or at the end: one rank computes for ever, or the all-reduce hangs."""
    at, rank, kind = int(chance.uniform(0.1, 0.9) * job.count), int(chance.integers(job.ranks)), int(chance.integers(3))

    def other(made: Job, size: float) -> None:
        seconds = size * made.count * made.step_s
        if kind == 0:
            made.attempts[-1].stuck_s, made.attempts[-1].status = seconds, "stalled"
        elif kind == 1:
            made.forward = made.forward.copy()
            made.forward[at, rank] += seconds
        else:
            made.communication = made.communication.copy()
            made.communication[at] += seconds

    whole_s = device_seconds(job) / job.ranks
    return Planted({}, other, least=MIN_HANG_S / (whole_s + MIN_HANG_S), most=0.4)


def unused(job: Job, chance: Chance, share: float) -> Planted:
    job.per_host = 4 if job.ranks % 4 != 1 else 8  # the only rank of a host may compute on several GPUs
    count = max(round(share / (1 - share) * job.ranks * float(chance.uniform(1, 1.5))), 1)
    if count / (job.ranks + count) < 0.023:
        count += 1

    def other(made: Job, _size: float) -> None:
        made.unused = count

    return Planted({}, other, least=count / (job.ranks + count), most=count / (job.ranks + count))


def failure(job: Job, chance: Chance, _share: float) -> Planted:
    """End the job with an error; in half of the jobs much time is lost in waits for data, too."""
    status, share = str(chance.choice(["failed", "killed"])), float(chance.choice([0.0, 0.3]))

    def other(made: Job, _size: float) -> None:
        made.attempts[-1].status = status

    return Planted({"wait": share * job.step_s * chance.gamma(4, 0.25, job.wait.shape)}, other, is_fixed=True)


def generation(job: Job, chance: Chance, _share: float) -> Planted:
    """Rollouts in every iteration or in every tenth; generation is productive."""
    found = np.zeros(job.wait.shape)
    every = int(chance.choice([1, 10]))
    found[every - 1 :: every] = every * float(chance.uniform(0.2, 1.5)) * job.step_s
    return Planted({GENERATION: found}, is_fixed=True)
