"""The devices of a window in columns, from the reports of all ranks that use the devices. No I/O.

A device is identified only by its key, so a device of several ranks counts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from effllm.job.joining import add_to, largest
from effllm.records.columns import Array, Positions, fields_of, structs_of
from effllm.records.energy import COVERED_S, MIN_COVERED_S, NOT_MEASURED, EnergyAmount
from effllm.records.rank import GAUGES, Device, DeviceWindow, Integrals, RankReport

#: Columns of memory and utilization: integrals over time, each with its covered seconds.
LEVELS = ("memory_byte_seconds", "memory_covered_s", "utilization_seconds", "utilization_covered_s")
MEMORY_S, BUSY, BUSY_S = 1, 2, 3  # positions in `LEVELS`

MAX_REASONS = 32  # maximum number of reasons in `GpuReadings.throttled_by_s`; NVML and AMD SMI have eleven


class Expected(dict[str, Device]):
    """The devices that a window should have, with derived properties that are the same in every window."""

    @cached_property
    def sorted_keys(self) -> list[str]:
        return sorted(self)

    @cached_property
    def owners(self) -> list[str]:
        """The energy key of each device, in the order of the keys."""
        return [self[key].energy_key or key for key in self.sorted_keys]

    @cached_property
    def is_gpu(self) -> NDArray[np.bool_]:
        """Mask of the GPUs, in the order of the keys."""
        return np.array([self[key].is_gpu for key in self.sorted_keys], bool)

    @cached_property
    def is_first_of_owner(self) -> NDArray[np.bool_]:
        """Mask of the first device of each energy key, in the order of the keys."""
        first = {owner: at for at, owner in reversed(list(enumerate(self.owners)))}
        return np.array([first[owner] == at for at, owner in enumerate(self.owners)], bool)

    @cached_property
    def shared(self) -> frozenset[str]:
        """The keys of devices whose readings are one rank's share."""
        return frozenset(key for key, device in self.items() if device.shared)

    def rows_in(self, merged: Merged) -> Positions:
        """Return the row of each of these devices in ``merged``, in the order of the keys; -1 if missing."""
        keys, positions = self._last_found
        if keys != merged.keys:
            find = merged.row_by_key.get
            positions = np.fromiter((find(key, -1) for key in self.sorted_keys), np.intp, len(self))
            self._last_found = merged.keys, positions
        return positions

    @cached_property
    def _last_found(self) -> tuple[list[str], Positions]:
        return [], np.full(len(self), -1)


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

    def add_window(self, window: DeviceWindow) -> None:
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
        by_reason = self.throttled_by_s
        for reason, seconds in more.throttled_by_s.items():
            if reason in by_reason or len(by_reason) < MAX_REASONS:
                by_reason[reason] = by_reason.get(reason, 0.0) + sign * seconds

    def merge(self, more: GpuReadings) -> GpuReadings:
        both = GpuReadings()
        for readings in (self, more):
            both.add_readings(readings)
        return both


class DeviceColumns(NamedTuple):
    """The integrals of devices on one time base, one row per device; nan if not measured."""

    energy: Array  # columns: the fields of EnergyAmount
    levels: Array  # columns: LEVELS

    @classmethod
    def of(cls, integrals: Sequence[Integrals]) -> DeviceColumns:
        return cls(structs_of([integral.energy for integral in integrals], EnergyAmount), fields_of(integrals, LEVELS))

    def merge(self, more: DeviceColumns) -> DeviceColumns:
        return DeviceColumns(*map(np.concatenate, zip(self, more, strict=True)))


class Merged(Struct, dict=True, eq=False):
    """The devices of a window as columns; each device has one row."""

    keys: list[str]
    devices: list[Device]
    span_s: Array  # wall time of the report from which the device's energy is taken
    wall: DeviceColumns
    iterations: DeviceColumns  # wall time without phases
    peaks: Array  # bytes
    phases_j: dict[int, dict[str, float | None]]  # row of a device -> joules of its phases
    gpus: GpuReadings

    def __len__(self) -> int:
        return len(self.keys)

    def merge(self, more: Merged) -> Merged:
        """Return these devices and ``more``; no device may be in both."""
        return Merged(
            keys=self.keys + more.keys,
            devices=self.devices + more.devices,
            span_s=np.concatenate((self.span_s, more.span_s)),
            wall=self.wall.merge(more.wall),
            iterations=self.iterations.merge(more.iterations),
            peaks=np.concatenate((self.peaks, more.peaks)),
            phases_j={**self.phases_j, **{at + len(self): parts for at, parts in more.phases_j.items()}},
            gpus=self.gpus.merge(more.gpus),
        )

    @cached_property
    def row_by_key(self) -> dict[str, int]:
        return dict(zip(self.keys, range(len(self)), strict=True))

    @cached_property
    def energy_coverage(self) -> Array:
        """For each device: the share of ``span_s`` in which its energy was measured."""
        covered = np.zeros(len(self))
        np.divide(self.wall.energy[:, COVERED_S], self.span_s, out=covered, where=self.span_s > 0)
        return np.minimum(covered, 1.0)

    def covered_s(self) -> tuple[float, float, float]:
        """Return seconds of computing devices: wall time, time with measured memory, time with measured utilization."""
        computing = ~np.array([device.only_power for device in self.devices], bool)
        memory_s, busy_s = self.wall.levels[computing][:, [MEMORY_S, BUSY_S]].T
        return float(self.span_s[computing].sum()), float(memory_s.sum()), float(busy_s.sum())

    def count_measured_gpus(self, expected: Expected) -> int:
        """Return the number of expected GPUs with any measured quantity."""
        there = expected.rows_in(self)[expected.is_gpu]
        covered_s = self.wall.energy[:, COVERED_S] + self.wall.levels[:, [MEMORY_S, BUSY_S]].sum(axis=1)
        return int((covered_s[there[there >= 0]] > 0).sum())


def merge_devices(
    rows: Sequence[RankReport],
    expected: Expected,
    members: Mapping[str, set[int]],
    readings: GpuReadings | None = None,
) -> Merged:
    """Return each device of a window once; ``readings`` are the sums of all reports, if each has one device.

    Readings of a whole device are from the rank with the highest coverage; if coverages are equal, the lowest rank is
    used.  So every window uses the same rank, whose periods are adjacent.  Shares of a shared device are added; if the
    share of a rank is missing, the device is not measured, because a partial sum would be wrong.
    """
    by_key = _only_device_each(rows, expected)
    readings = readings if by_key and expected.is_gpu.all() else None
    several: dict[str, list[tuple[RankReport, DeviceWindow]]] = {}
    for row in rows if not by_key else ():
        for window in row.devices:
            if (key := window.device) not in expected:
                continue
            if key not in by_key:
                by_key[key] = (row, window)
            else:
                several.setdefault(key, [by_key[key]]).append((row, window))
    for key, pairs in several.items():
        by_key[key] = min(pairs, key=lambda pair: (*_lacks(*pair), pair[0].rank))
    windows = [window for _, window in by_key.values()]
    wall, phases_j = DeviceColumns.of([window.wall for window in windows]), {}
    iterations = DeviceColumns(*map(np.copy, wall))
    for at, window in enumerate(windows):
        if window.phases:
            only = DeviceColumns.of([window.iterations])
            iterations.energy[at], iterations.levels[at] = only.energy[0], only.levels[0]
            phases_j[at] = {name: part.energy.joules for name, part in window.phases.items()}
    peaks = fields_of(windows, ("memory_peak_bytes",))[:, 0]
    for at, key in enumerate(by_key) if several or expected.shared else ():
        pairs = several.get(key) or [by_key[key]]
        if key in expected.shared:
            is_whole = members.get(key, set()) <= {row.rank for row, _ in pairs}
            wall.levels[at] = _summed_levels([share.wall for _, share in pairs], is_whole)
            iterations.levels[at] = _summed_levels([share.iterations for _, share in pairs], is_whole)
            peaks[at] = fields_of([share for _, share in pairs], ("memory_peak_bytes",)).sum() if is_whole else np.nan
        elif key in several:
            peaks[at] = np.fmax.reduce(fields_of([window for _, window in pairs], ("memory_peak_bytes",))[:, 0])
    _clear_tiny_coverage(iterations)
    if readings is None:
        readings = GpuReadings()
        for window in windows:
            if expected[window.device].is_gpu:
                readings.add_window(window)
    return Merged(
        keys=list(by_key),
        devices=list(map(expected.__getitem__, by_key)),
        span_s=np.array([row.wall_s for row, _ in by_key.values()]),
        wall=wall,
        iterations=iterations,
        peaks=peaks,
        phases_j=phases_j,
        gpus=readings,
    )


def has_one_device_each(rows: Sequence[RankReport]) -> bool:
    return set(map(len, map(attrgetter("devices"), rows))) == {1}


def _only_device_each(rows: Sequence[RankReport], expected: Expected) -> dict[str, tuple[RankReport, DeviceWindow]]:
    """Return the device of each report by its key, if each report has one device of its own; else nothing."""
    if not has_one_device_each(rows):
        return {}
    by_key = {row.devices[0].device: (row, row.devices[0]) for row in rows}
    return by_key if len(by_key) == len(rows) and by_key.keys() <= expected.keys() else {}


def _clear_tiny_coverage(columns: DeviceColumns) -> None:
    """Mark values as not measured if they cover less time than a rounding error."""
    columns.energy[~(columns.energy[:, COVERED_S] > MIN_COVERED_S)] = _NOT_MEASURED
    for value in (0, 2):
        nothing = ~(columns.levels[:, value + 1] > MIN_COVERED_S)
        columns.levels[nothing, value], columns.levels[nothing, value + 1] = np.nan, 0.0


_NOT_MEASURED = structs_of([NOT_MEASURED], EnergyAmount)[0]


def _lacks(row: RankReport, window: DeviceWindow) -> tuple[float, bool]:
    """Return the share of a report without energy, rounded so that equal shares compare equal, and if it has no memory.

    The windows of two ranks begin at different times.  If the energy of one window came from another rank, only because
    its memory has fewer gaps, the time between the two starts would be left out or counted twice.
    """
    covered_s = window.wall.energy.covered_s
    lack = round(1 - covered_s / row.wall_s, 5) if row.wall_s > 0 else 1.0
    return lack, window.wall.memory_covered_s <= 0


def _summed_levels(parts: Sequence[Integrals], is_whole: bool) -> tuple[float, ...]:
    """Return the levels of a device from the shares of its ranks; nan if a rank is missing."""
    levels = fields_of(parts, LEVELS).T if is_whole else np.zeros((4, 1))
    return (*_sum_of_means(levels[0], levels[1]), *_sum_of_means(levels[2], levels[3]))


def _sum_of_means(values: Array, covered_s: Array) -> tuple[float, float]:
    # The reports of the ranks cover slightly different periods, so their means add up, not their integrals.
    min_s = float(covered_s.min())
    return (float((np.nan_to_num(values) / covered_s).sum()) * min_s, min_s) if min_s > 0 else (np.nan, 0.0)
