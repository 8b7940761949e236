"""Correct an estimate by the measured peaks of earlier runs of the same model family.

The ratios of measured and estimated peaks of a family have a median, which corrects the expected bytes.  Each plan is
also predicted from all other plans; the errors of these predictions give the interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from effllm.memory.byte_range import ByteRange, total_of
from effllm.memory.estimate import MemoryEstimate
from effllm.memory.overheads import nccl_buffers

#: With fewer plans, the spread of their ratios is not known, and nothing is corrected.
MIN_PLANS = 3
#: The interval has at least this half-width: the median error of activations counted on a CPU.
MIN_HALF_WIDTH = math.log(1.02)
#: The 95th percentile of Student's t by degrees of freedom; other degrees have the value of the next lower row.
STUDENT_95 = (
    (2, 2.920), (3, 2.353), (4, 2.132), (5, 2.015), (6, 1.943), (7, 1.895), (8, 1.860), (9, 1.833), (10, 1.812),
    (12, 1.782), (15, 1.753), (20, 1.725), (30, 1.697), (60, 1.671),
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredPeak:
    """The peak of torch's allocated memory of a run, beside the estimate of the same plan."""

    found: MemoryEstimate
    measured: float

    @property
    def family(self) -> Hashable:
        return family_of(self.found)

    @property
    def ratio(self) -> float:
        return self.measured / self.found.allocated.expected


@dataclass(frozen=True)
class Correction:
    """The correction of a family; without a ratio there are too few plans."""

    runs: int
    ratios: tuple[float, ...]  # measured over estimated, of each plan
    ratio: float | None = None  # their median
    errors: tuple[float, ...] = ()  # of each plan predicted from all others: the logarithm of measured over predicted
    half_width: float = 0.0  # of the 90 % interval, as a logarithm


def family_of(found: MemoryEstimate) -> tuple[Hashable, ...]:
    """Return what runs have in common that correct each other.

    It is the architecture, the kernels, whether there are several ranks, and whether adapters are trained.
    """
    plan = found.plan
    return found.shape.architecture, plan.implementation, plan.gpus * plan.ep > 1, plan.lora_rank > 0


def learn(peaks: Sequence[MeasuredPeak]) -> Correction:
    """Return the correction from the runs of one family.

    Runs of the same plan count once, with their largest peak: a peak is a lower bound of what the plan can need.
    """
    by_plan: dict[Hashable, float] = {}
    for one in peaks:
        key = (one.found.shape, one.found.plan)
        by_plan[key] = max(by_plan.get(key, 0.0), one.ratio)
    ratios = tuple(sorted(by_plan.values()))
    if len(ratios) < MIN_PLANS:
        return Correction(len(peaks), ratios)
    logs = [math.log(one) for one in ratios]
    errors = tuple(one - statistics.median(logs[:i] + logs[i + 1 :]) for i, one in enumerate(logs))
    spread = math.sqrt(math.fsum(one**2 for one in errors) / len(errors))
    half_width = max(student_95(len(errors) - 1) * spread, MIN_HALF_WIDTH)
    return Correction(len(peaks), ratios, math.exp(statistics.median(logs)), errors, half_width)


def student_95(degrees: int) -> float:
    """Return the 95th percentile of Student's t, or that of the next lower degrees of freedom in the table."""
    return max((row for row in STUDENT_95 if row[0] <= degrees), default=STUDENT_95[0])[1]


def corrected(found: MemoryEstimate, correction: Correction) -> MemoryEstimate:
    """Return an estimate with another total; its parts are not changed.

    An inference and an upper bound are not corrected.
    """
    if correction.ratio is None or not found.plan.is_training or found.shape.is_upper_bound:
        return found
    factor = math.exp(correction.half_width)
    allocated = ByteRange.exact(found.allocated.expected * correction.ratio).scaled(1 / factor, factor)
    outside = [found.part("CUDA context").bytes, nccl_buffers(found.plan)]
    loose = found.part("fragmentation").bytes
    return replace(
        found,
        total=total_of([allocated, *outside, loose]),
        allocated=allocated,
        reserved=total_of([allocated, loose]),
        is_corrected=True,
    )
