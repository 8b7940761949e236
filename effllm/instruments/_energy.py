"""The readings of the devices of this rank in a span of time, with the formulas of the energy instruments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from effllm.records.spans import NAN, SpanPart

J_PER_WH = 3600.0
MIN_UTILIZATION = 0.01  # in the efficiency
BYTES_PER_MB = 1e6


@dataclass(frozen=True)
class SpanReadings:
    """The readings of devices in one or more spans, such as those of steps; ``nan``: not measured."""

    parts: dict[int, SpanPart] = field(default_factory=dict)  # by the number of the device in the rank
    start_ns: int = 0  # of the first span, on the monotonic clock
    end_ns: int = 0
    num_spans: int = 0
    number: int = 0  # of the request; 0 for several spans

    @classmethod
    def of(cls, parts: Iterable[SpanPart], start_ns: int = 0, end_ns: int = 0, number: int = 0) -> SpanReadings:
        return cls({part.device: part for part in parts}, start_ns, end_ns, 1, number)

    def then(self, later: SpanReadings) -> SpanReadings:
        """Return the combined readings of this span and the next span."""
        both = self.parts.keys() & later.parts.keys()
        merged = {**self.parts, **later.parts} | {n: self.parts[n].then(later.parts[n]) for n in both}
        return SpanReadings(merged, self.start_ns or later.start_ns, later.end_ns, self.num_spans + later.num_spans)

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9

    @property
    def wh_per_span(self) -> float:
        return self.joules / J_PER_WH / self.num_spans if self.num_spans else NAN

    @property
    def efficiency(self) -> float:
        """Energy per span divided by utilization, or ``nan``; a smaller value is better."""
        return self.wh_per_span / max(self.utilization, MIN_UTILIZATION)  # max(nan, number) is nan

    @property
    def joules(self) -> float:
        return _sum_or_nan(part.joules for part in self.parts.values())

    @property
    def covered_s(self) -> float:
        """Seconds with energy readings; with several devices, the smallest number of seconds."""
        return min((part.covered_s for part in self.parts.values()), default=0.0)

    @property
    def error_j(self) -> float:
        """Half-width, 95 %, of the random error of the energy."""
        return math.hypot(*(part.error_j for part in self.parts.values())) if self.is_measured else NAN

    @property
    def gain_j(self) -> float:
        """Half-width, 95 %, of the error from the gain of the sensors, which is common to all spans."""
        return sum(part.gain_j for part in self.parts.values()) if self.is_measured else NAN

    @property
    def is_measured(self) -> bool:
        return not math.isnan(self.joules)

    @property
    def power_w(self) -> float:
        """Mean power over the covered seconds, summed over the devices."""
        return _sum_or_nan(_ratio(part.joules, part.covered_s) for part in self.parts.values())

    @property
    def power_max_w(self) -> float:
        """Largest power; with several devices, the sum of their largest powers."""
        return _sum_or_nan(part.power_max_w for part in self.parts.values())

    @property
    def power_min_w(self) -> float:
        return _sum_or_nan(part.power_min_w for part in self.parts.values())

    @property
    def temperature_c(self) -> float:
        """Mean temperature over time and devices."""
        return self._mean_over_time("temperature_c_seconds", "temperature_covered_s")

    @property
    def temperature_max_c(self) -> float:
        maxima = (part.temperature_max_c for part in self.parts.values())
        return max((maximum for maximum in maxima if not math.isnan(maximum)), default=NAN)

    @property
    def utilization(self) -> float:
        """Mean utilization over time and devices, 0..1."""
        return self._mean_over_time("utilization_seconds", "utilization_covered_s")

    @property
    def memory_bytes(self) -> float:
        """Mean memory in use, summed over the devices."""
        return _sum_or_nan(_ratio(part.memory_byte_seconds, part.memory_covered_s) for part in self.parts.values())

    @property
    def num_readings(self) -> int:
        return int(sum(part.num_readings for part in self.parts.values()))

    def _mean_over_time(self, integral: str, covered: str) -> float:
        measured = [part for part in self.parts.values() if not math.isnan(getattr(part, integral))]
        total = sum(getattr(part, integral) for part in measured)
        return _ratio(total, sum(getattr(part, covered) for part in measured))


@dataclass(frozen=True)
class Baseline:
    """The power before the first step; ``nan`` if it was not measured."""

    power_w: float = NAN
    error_w: float = NAN
    covered_s: float = 0.0

    @classmethod
    def of(cls, readings: SpanReadings, min_covered_s: float) -> Baseline:
        covered_s = readings.covered_s
        if not readings.is_measured or covered_s < min_covered_s:
            return cls(covered_s=covered_s)
        return cls(readings.power_w, readings.error_j / covered_s, covered_s)


def above_baseline_j(readings: SpanReadings, baseline: Baseline) -> tuple[float, float]:
    """Return the energy above the baseline, at least 0, and its random error as the half-width of a 95 % interval.

    The error of the baseline's power is multiplied by the covered seconds, and added as an independent error.
    """
    above_j = readings.joules - baseline.power_w * readings.covered_s
    error_j = math.hypot(readings.error_j, baseline.error_w * readings.covered_s)
    return (NAN, NAN) if math.isnan(above_j) else (max(above_j, 0.0), error_j)


def energy_amounts(readings: SpanReadings, baseline: Baseline) -> dict[str, float]:
    """Return the energy, total and above the baseline, with errors and covered seconds."""
    above_j, above_error_j = above_baseline_j(readings, baseline)
    return {
        "energy_consumed_wh": readings.joules / J_PER_WH,
        "energy_error_wh": readings.error_j / J_PER_WH,
        "energy_gain_error_wh": readings.gain_j / J_PER_WH,
        "covered_s": readings.covered_s,
        "energy_above_baseline_wh": above_j / J_PER_WH,
        "energy_above_baseline_error_wh": above_error_j / J_PER_WH,
    }


def _sum_or_nan(values: Iterable[float]) -> float:
    """Return the sum; ``nan`` without values, or if one value is ``nan``, because a part is not shown as the whole."""
    numbers = list(values)
    return sum(numbers) if numbers else NAN


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else NAN


def checked(value: Any, name: str, is_valid: Callable[[float], bool], rule: str) -> float:
    """Return an argument as a number.

    Raises:
        ValueError: the argument is not a number, or is not valid.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not is_valid(value):
        raise ValueError(f"{name}={value!r} must be {rule}")
    return float(value)
