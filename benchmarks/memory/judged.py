"""The errors of the estimates, and whether intervals learnt from other configurations cover the truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median
from typing import Any

from benchmarks.memory.configurations import Configuration
from effllm.memory.config_json import read_config
from effllm.memory.estimate import as_computed
from effllm.memory.plan import MemoryPlan, ModelShape
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
    return _covered(found, lambda one, other: one is not other)


def _covered(found: Sequence[Judged], is_other: Callable[[Judged, Judged], bool]) -> float:
    inside = 0
    for one in found:
        low, high = limits([other.ratio for other in found if is_other(one, other)])
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
        "peak_median_error": median(abs(one.error) for one in found),
        "peak_within_10_percent": sum(abs(one.error) <= 0.1 for one in found) / len(found),
        "limits": [round(low, 4), round(high, 4)],
        "covered_leave_one_out": covered(found),
        "covered_leave_one_architecture_out": _covered(
            found, lambda one, other: one.configuration.architecture != other.configuration.architecture
        ),
    }
