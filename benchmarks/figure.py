"""One measured figure, with its goal."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """A number for reports and comparisons.

    ``value`` is ``None`` if it was not measured, and ``note`` has the reason.  ``goal`` is the largest allowed value;
    ``detail`` has the values behind the number.
    """

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    interval: tuple[float, float] | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; ``None`` without a goal or a value."""
        return None if self.goal is None or self.value is None else self.value <= self.goal

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def interval_95(values: Sequence[float], statistic: Callable[[Sequence[float]], float]) -> tuple[float, float]:
    """Return the bootstrap percentile interval of a statistic, from 4000 resamples with a fixed seed."""
    chance = random.Random(20261120)
    resampled = sorted(statistic(chance.choices(values, k=len(values))) for _ in range(4000))
    return resampled[100], resampled[3899]


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
