"""Jobs without a loss that is worth an accusation: all avoidable losses together take less than 3 % of the time."""

from __future__ import annotations

import numpy as np

from benchmarks.judged import devices, process
from benchmarks.judged.job import WAYS, Job, Planted, calibrated, chance_of
from benchmarks.judged.kinds import ONE, Case, padding, without_loss
from benchmarks.judged.shape import clean_job, usual_losses

HEALTHY = "healthy"
RIGHT = ("healthy", "none_found")
VARIANTS = ("plain", "low clocks", "generation", "a restart", "two lengths of batches", "padding", "long job")


def healthy_case(kind: str, seed: int) -> Case:
    """Return a healthy job.  ``gain`` is the gain without all of its avoidable losses."""
    chance, variant = chance_of(kind, seed), VARIANTS[seed % len(VARIANTS)]
    way = tuple(WAYS.values())[int(chance.integers(len(WAYS)))]
    step_s, count = (float(chance.uniform(0.8, 6.0)), 800) if variant == "long job" else (0.0, 0)
    job = clean_job(kind, seed, chance, way, ONE, step_s, count)
    if variant == "two lengths of batches":
        longer = np.where(chance.random(job.count) < 0.3, float(chance.uniform(1.3, 2.0)), 1.0)[:, None]
        job.forward, job.backward, job.idle = job.forward * longer, job.backward * longer, job.idle * longer
    shares, gain = chance.dirichlet([2.0, 1.0]) * float(chance.uniform(0.004, 0.028)), 1.0
    extra: Planted | None = None
    if variant == "a restart":
        extra = process.restarts(job, chance, float(shares[1]))
    elif variant == "padding":
        extra = padding(job, chance, 0.0)
    if extra is not None and shares[1] > 0.005:
        made, more = calibrated(extra, job, float(shares[1]))
        if more < 0.012:  # a restart may cost more than wanted, because iterations are repeated
            job, gain = made, 1 + more
    usual = usual_losses(job, chance)
    if usual.adds:
        job, more = calibrated(usual, job, float(shares[0]))
        gain *= 1 + more
    job = _without_loss(job, chance, variant)
    assert gain < 1.03 / (1 - 0.03 * 0.03), gain
    return Case(job, without_loss(job), frozenset(), gain - 1, 1 - 1 / gain)


def _without_loss(job: Job, chance: np.random.Generator, variant: str) -> Job:
    """Return the job with something that costs nothing, or that is work."""
    if variant == "low clocks":
        return devices.cool(job, chance, 0.0).plant(job, 1.0)
    return process.generation(job, chance, 0.0).plant(job, 1.0) if variant == "generation" else job
