"""The part of ``effllm fit``'s output about the measured peaks of earlier runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from effllm.memory.byte_range import ByteRange
from effllm.memory.learned import MIN_PLANS, Correction


@dataclass(frozen=True)
class LearnedFit:
    """The correction of an estimate, and the estimate without it."""

    correction: Correction
    left_out: dict[str, int]  # runs by reason
    before: ByteRange


def learned_lines(learned: LearnedFit) -> Iterator[str]:
    """Yield what was learned, or why nothing was."""
    found = learned.correction
    counts = f"{_counted(found.runs, 'run')} of {_counted(len(found.ratios), 'plan')} of this family"
    if found.ratio is None:
        ratios = f": measured / estimated {', '.join(f'{one:.3f}' for one in found.ratios)}" if found.ratios else ""
        yield f"measured peaks: {counts}{ratios}; at least {MIN_PLANS} plans are needed, nothing is corrected"
    else:
        low, high = (found.ratio * math.exp(sign * found.half_width) for sign in (-1, 1))
        yield (
            f"measured peaks: {counts}, measured / estimated {found.ratio:.3f}, 90 % interval {low:.3f} to {high:.3f}; "
            "corrected by this, without CUDA context, NCCL and fragmentation"
        )
        errors = [100 * abs(math.expm1(one)) for one in found.errors]
        yield f"leave-one-out error: median {statistics.median(errors):.1f} %, largest {max(errors):.1f} %"
        low, expected, high = (one / 1e9 for one in (learned.before.low, learned.before.expected, learned.before.high))
        yield f"total without these peaks: {expected:.1f} GB ({low:.1f}-{high:.1f})"
    if learned.left_out:
        reasons = ", ".join(f"{count} with {reason}" for reason, count in sorted(learned.left_out.items()))
        yield f"runs left out: {reasons}"


def learned_document(learned: LearnedFit) -> dict[str, Any]:
    found = learned.correction
    before = learned.before
    return {
        "runs": found.runs,
        "ratios": list(found.ratios),
        "ratio": found.ratio,
        "ratio_low": None if found.ratio is None else found.ratio * math.exp(-found.half_width),
        "ratio_high": None if found.ratio is None else found.ratio * math.exp(found.half_width),
        "leave_one_out_errors": [math.expm1(one) for one in found.errors],
        "left_out": learned.left_out,
        "total_before": {"low": round(before.low), "expected": round(before.expected), "high": round(before.high)},
    }


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"
