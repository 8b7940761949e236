"""The errors of the estimates, and whether intervals learnt from other configurations cover the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from benchmarks.memory.configurations import Configuration
from effllm.memory.config_json import read_config
from effllm.memory.estimate import as_computed
from effllm.memory.model import ModelShape
from effllm.memory.plan import MemoryPlan
from effllm.memory.states import (
    count_parameters,
    gradient_bytes,
    rank_tensors,
    stages,
    state_bytes,
    trained_tensors,
    weight_bytes,
)
from effllm.memory.training import training_course

COVERAGE = 0.9


@dataclass(frozen=True)
class Judged:
    """A configuration with its counted bytes, and those of the estimator."""

    configuration: Configuration
    counted: dict[str, float]
    estimated: dict[str, float]

    @property
    def exact(self) -> bool:
        return all(self.counted[name] == self.estimated[name] for name in ("weights", "gradients", "states"))

    @property
    def ratio(self) -> float:
        """Counted over estimated activations."""
        return self.counted["activations"] / self.estimated["activations"]

    @property
    def error(self) -> float:
        """Relative error of the peak of the whole step."""
        return self.estimated["peak"] / self.counted["peak"] - 1


def judge(configuration: Configuration, counted: dict[str, float]) -> Judged:
    return Judged(configuration, counted, estimated(configuration))


def shape_and_plan(one: Configuration) -> tuple[ModelShape, MemoryPlan]:
    shape = read_config(one.fields, one.architecture)
    return shape, as_computed(shape, plan_of(one))


def plan_of(training: Any) -> MemoryPlan:
    """Return the plan with the fields of a dataclass that are settings of a plan."""
    shared = {field.name for field in fields(training)} & {field.name for field in fields(MemoryPlan)}
    return MemoryPlan(**{name: getattr(training, name) for name in shared})


def estimated(one: Configuration) -> dict[str, float]:
    """Return what effllm estimates for a configuration, without the parts that only a GPU has."""
    shape, plan = shape_and_plan(one)
    stage = stages(shape, plan)[0]
    held = rank_tensors(shape, plan, stage)
    trained = trained_tensors(plan, held)
    weights, states = weight_bytes(plan, held, trained), state_bytes(plan, trained)
    gradients = gradient_bytes(plan, trained)
    course = training_course(shape, plan, stage, held)
    return {
        "parameters": count_parameters(shape).total,
        "weights": weights,
        "gradients": gradients,
        "states": states,
        "activations": course.activations,
        "peak": max(weights + states + course.peak.total, weights + states + gradients),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, conservative: the next value outwards."""
    at = round(share * (len(values) + 1)) - 1
    return values[min(max(at, 0), len(values) - 1)]


def limits(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an interval that contains nine of ten ratios."""
    values = sorted(ratios)
    return quantile(values, (1 - COVERAGE) / 2), quantile(values, (1 + COVERAGE) / 2)


def covered(found: Sequence[Judged]) -> float:
    """Return the share of configurations whose ratio is within the limits of all others."""
    inside = 0
    for at, one in enumerate(found):
        low, high = limits([other.ratio for other in (*found[:at], *found[at + 1 :])])
        inside += low <= one.ratio <= high
    return inside / len(found)


def covered_architectures(found: Sequence[Judged]) -> float:
    """Return the same share, with the limits of the other architectures alone."""
    inside = 0
    for one in found:
        others = [other.ratio for other in found if other.configuration.architecture != one.configuration.architecture]
        low, high = limits(others)
        inside += low <= one.ratio <= high
    return inside / len(found)


def summary(found: Sequence[Judged]) -> dict[str, Any]:
    """Return the figures of the benchmark."""
    errors = sorted(abs(1 / one.ratio - 1) for one in found)
    low, high = limits([one.ratio for one in found])
    return {
        "configurations": len(found),
        "exact": sum(one.exact for one in found) / len(found),
        "activations_within_10_percent": sum(error <= 0.1 for error in errors) / len(errors),
        "activations_median_error": median(errors),
        "activations_largest_error": errors[-1],
        "limits": [round(low, 4), round(high, 4)],
        "covered_leave_one_out": covered(found),
        "covered_leave_one_architecture_out": covered_architectures(found),
    }


def peak_errors(estimates: Sequence[float], found: Sequence[Judged]) -> dict[str, float]:
    """Return the errors of an estimator's peaks against the counted peaks."""
    ratios = [estimate / one.counted["peak"] for estimate, one in zip(estimates, found, strict=True)]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    return {
        "median_error": median(errors),
        "error_of_nine_of_ten": quantile(errors, 0.9),
        "within_10_percent": sum(error <= 0.1 for error in errors) / len(errors),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }
