"""Readings of devices besides energy, memory and utilization, summed when reports arrive. No I/O.

Summation at the end of the window would take the same CPU time (1.1 us per report), but frames would wait for it: 11 ms
for ten thousand ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from msgspec import Struct, field

from effllm.records.rank import GAUGES, DeviceWindow, RankReport

MAX_REASONS = 32  # maximum number of reasons in `GpuReadings.throttled_by_s`; NVML and AMD SMI have eleven


Name = TypeVar("Name", int, str)
Number = TypeVar("Number", int, float)


def add_to(sums: dict[Name, Number], more: Mapping[Name, Number], sign: int = 1) -> None:
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + sign * value


def summed(parts: Iterable[Mapping[Name, float]]) -> dict[Name, float]:
    sums: dict[Name, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


class GaugeSums(Struct):
    """The running sums of a gauge over all GPUs."""

    value_seconds: float = 0.0
    covered_s: float = 0.0
    most: float | None = None

    @property
    def mean(self) -> float | None:
        return self.value_seconds / self.covered_s if self.covered_s > 0 else None


class GpuReadings(Struct):
    """The readings of the GPUs of a window, or of all windows, besides energy, memory and utilization."""

    gauges: dict[str, GaugeSums] = {}
    throttled_s: float = 0.0
    throttle_covered_s: float = 0.0
    power_histogram_s: dict[int, float] = {}
    power_peak_w: float | None = None
    throttled_by_s: dict[str, float] = {}  # clocks event reason -> seconds; reasons may overlap

    def add(self, window: DeviceWindow) -> None:
        for name, gauge in window.gauges.items():
            sums = self.gauges.get(name)
            if sums is None:
                if name not in GAUGES:
                    continue
                sums = self.gauges[name] = GaugeSums()
            sums.value_seconds += gauge.value_seconds
            sums.covered_s += gauge.covered_s
            most = gauge.most
            if sums.most is None or most > sums.most:
                sums.most = most
        histogram_s = self.power_histogram_s
        for step, seconds in window.power_histogram_s.items():
            histogram_s[step] = histogram_s.get(step, 0.0) + seconds
        if window.throttled_s:
            self.throttled_s += window.throttled_s.get("any", 0.0)
            for reason, seconds in window.throttled_s.items():
                if reason in self.throttled_by_s or len(self.throttled_by_s) < MAX_REASONS:
                    self.throttled_by_s[reason] = self.throttled_by_s.get(reason, 0.0) + seconds
        self.throttle_covered_s += window.throttle_covered_s
        peak_w = window.power_peak_w
        if peak_w is not None and (self.power_peak_w is None or peak_w > self.power_peak_w):
            self.power_peak_w = peak_w

    def add_readings(self, more: GpuReadings, sign: int = 1) -> None:
        """Add the readings of other GPUs or of another window; a sign of -1 subtracts them, but keeps maxima."""
        for name, gauge in more.gauges.items():
            sums = self.gauges.setdefault(name, GaugeSums())
            sums.value_seconds += sign * gauge.value_seconds
            sums.covered_s += sign * gauge.covered_s
            sums.most = largest((sums.most, gauge.most))
        self.throttled_s += sign * more.throttled_s
        self.throttle_covered_s += sign * more.throttle_covered_s
        add_to(self.power_histogram_s, more.power_histogram_s, sign)
        self.power_peak_w = largest((self.power_peak_w, more.power_peak_w))
        known = self.throttled_by_s
        for reason, seconds in more.throttled_by_s.items():
            if reason in known or len(known) < MAX_REASONS:
                known[reason] = known.get(reason, 0.0) + sign * seconds

    def merge(self, more: GpuReadings) -> GpuReadings:
        both = GpuReadings()
        for readings in (self, more):
            both.add_readings(readings)
        return both


class Gathered(Struct):
    """The readings of ranks with one device each, in one window."""

    readings: GpuReadings = field(default_factory=GpuReadings)
    num_rows: int = 0
    is_simple: bool = True  # each rank has one device

    def add(self, row: RankReport) -> None:
        self.num_rows += 1
        if len(row.devices) == 1:
            self.readings.add(row.devices[0])
        else:
            self.is_simple = False

    def of(self, num_devices: int, num_rows: int) -> GpuReadings | None:
        """Return the readings, or ``None`` unless each rank has one GPU and all ``num_rows`` reports were added."""
        return self.readings if self.is_simple and num_devices == num_rows == self.num_rows else None
