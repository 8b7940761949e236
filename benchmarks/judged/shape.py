"""Draws a job without any avoidable loss, and the small losses that every job has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.judged.job import CHECKPOINT, EVALUATION, Attempt, Job, Planted, Seconds, Way, calibrated

#: Step time -> iterations, and possible numbers of iterations in a report.
STEPS: dict[float, tuple[int, tuple[int, ...]]] = {
    0.001: (12_000, (300, 300, 500, 500, 2000)),
    0.003: (6_000, (100, 100, 300, 300, 1200)),
    0.01: (2_400, (25, 50, 100)),
    0.1: (600, (5, 10, 20)),
    1.0: (300, (1, 5, 10, 20)),
}
MAX_CELLS = 60_000  # iterations times ranks
MAX_WINDOWS = 320
RANKS = (2, 3, 4, 6, 8, 16, 32, 64)


def clean_job(
    kind: str,
    seed: int,
    chance: np.random.Generator,
    way: Way,
    ranks: Sequence[int] = RANKS,
    step_s: float = 0.0,
    count: int = 0,
    profiled: bool | None = None,
) -> Job:
    """Return a job whose ranks do the same work in each iteration.

    The work of an iteration varies with its batch (log-normal, the same on all ranks).  Communication and idle devices
    are as large as in usual jobs.  ``step_s`` and ``count`` of 0 draw a job of seconds to minutes.
    """
    near = step_s or tuple(STEPS)[int(chance.integers(len(STEPS)))]
    usual, intervals = STEPS[min(STEPS, key=lambda one: abs(np.log(one / near)))]
    step_s = step_s or near * float(chance.uniform(0.8, 1.3))
    count = count or int(usual * chance.uniform(0.8, 1.2))
    interval = max(int(chance.choice(intervals)), -(-count // MAX_WINDOWS))
    fitting = [one for one in ranks if one * count <= MAX_CELLS] or [min(ranks)]
    number = int(chance.choice(fitting))
    size = (count, number)
    sigma = float(chance.choice([0.01, 0.05, 0.1, 0.2, 0.3]))
    common = chance.lognormal(-(sigma**2) / 2, sigma, count)[:, None]
    communication = float(chance.uniform(0.01, 0.08)) if number > 1 else 0.0
    compute_s = step_s * (1 - communication)
    parts = np.array([chance.uniform(0.25, 0.4), chance.uniform(0.45, 0.6), chance.uniform(0.03, 0.12)])
    parts *= compute_s / parts.sum()
    if profiled is None:
        profiled = bool(chance.random() < 0.5)
    forward = np.broadcast_to(parts[0] * common, size).copy()
    return Job(
        kind, seed, way, number, int(chance.choice([1, 4, 8])),
        interval=interval,
        min_window_s=1.0 if chance.random() < (0.3 if step_s < 0.002 else 0.5) else 0.0,
        step_s=step_s,
        profile_every=int(chance.choice([5, 10, max(count // 60, 10)])) if profiled else 0,
        mfu=float(chance.uniform(0.25, 0.6)),
        wait=np.zeros(size),
        forward=forward,
        backward=np.broadcast_to(parts[1] * common, size).copy(),
        optimizer=np.full(size, parts[2]),
        idle=forward * float(chance.uniform(0.0, 0.15)),
        communication=communication * step_s * chance.lognormal(0, 0.1, count),
        clock=np.full(size, float(chance.uniform(0.93, 1.0))),
        attempts=[Attempt(0, count, 0.0, min(0.03 * count * step_s, 8.0) * float(chance.uniform(0.3, 1.0)))],
        late_s=np.zeros(number),
        stay_s=np.zeros(number),
        limit=np.ones(number),
    )  # fmt: skip


def jitter(job: Job, chance: np.random.Generator, sigma: float = 0.02, tails: float = 0.0) -> dict[str, Seconds]:
    """Return independent noise of the ranks with a mean of 0 over the ranks, in forward and backward."""
    size = job.wait.shape
    noise = chance.lognormal(-(sigma**2) / 2, sigma, size) - 1
    noise += (chance.random(size) < tails) * chance.uniform(0.1, 0.6, size)
    noise -= noise.mean(axis=1, keepdims=True)
    own = noise if chance.random() < 0.5 else chance.permuted(noise, axis=1)  # the parts vary together, or not
    return {"forward": noise * job.forward, "backward": own * job.backward}


def usual_losses(job: Job, chance: np.random.Generator, without: Sequence[str] = ()) -> Planted:
    """Return small losses of usual kinds; their sum is calibrated later."""
    size, step_s, adds = job.wait.shape, job.step_s, dict[str, Seconds]()

    def weight() -> float:
        return float(chance.uniform(0.1, 1.0))

    if job.ranks > 1 and "jitter" not in without:
        sigma = 0.02 * weight()
        if chance.random() < 0.3:  # a rank that is always a little slower, and a load that drifts
            drift = np.cumsum(chance.standard_normal(size), axis=0) / np.sqrt(len(job.wait))
            drift = 0.01 * weight() * (drift - drift.mean(axis=1, keepdims=True))
            drift[:, int(chance.integers(job.ranks))] += 0.01 * weight()
            adds = {"forward": drift * job.forward, "backward": drift * job.backward}
        for name, array in jitter(job, chance, sigma, float(chance.choice([0.0, 0.001]))).items():
            adds[name] = adds.get(name, 0.0) + array
    if "wait" not in without and chance.random() < 0.8:
        each = chance.gamma(4.0, 0.25, (len(job.wait), 1)) * chance.uniform(0.9, 1.1, size)
        adds["wait"] = 0.01 * weight() * step_s * each
    for name, often in ((CHECKPOINT, 2), (EVALUATION, 3)):
        if name not in without and chance.random() < 0.4:
            adds[name] = at_times(job, often) * 0.01 * weight() * step_s * len(job.wait) / often
    if "pauses" not in without and chance.random() < 0.3:
        pauses = np.zeros(size)
        pauses[chance.integers(10, len(pauses), 3)] = 1.0
        adds["backward"] = adds.get("backward", 0.0) + pauses * 0.002 * weight() * step_s * len(job.wait)
    if "warmup" not in without and chance.random() < 0.5:
        first = np.zeros(size)
        first[0] = 0.004 * weight() * step_s * len(first)
        adds["forward"] = adds.get("forward", 0.0) + first
    return Planted(adds)


def at_times(job: Job, times: int) -> Seconds:
    """Return 1 after equally distant iterations, on all ranks."""
    found = np.zeros(job.wait.shape)
    found[np.linspace(len(found) / times, len(found), times).astype(int) - 1] = 1.0
    return found


def with_usual_losses(job: Job, chance: np.random.Generator, share: float, without: Sequence[str] = ()) -> Job:
    planted = usual_losses(job, chance, without)
    return calibrated(planted, job, share)[0] if planted.adds else job
