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
MEMORY, MEMORY_S, BUSY, BUSY_S = range(len(LEVELS))  # positions in `LEVELS`

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
        first = {owner: position for position, owner in reversed(list(enumerate(self.owners)))}
        return np.array([first[owner] == position for position, owner in enumerate(self.owners)], bool)

    @cached_property
    def shared(self) -> frozenset[str]:
        """The keys of devices whose readings are one rank's share."""
        return frozenset(key for key, device in self.items() if device.shared)

    def rows_in(self, merged: Merged) -> Positions:
        """Return the row of each of these devices in ``merged``, in the order of the keys; -1 if missing."""
        merged_keys, rows = self._last_keys_and_rows
        if merged_keys != merged.keys:
            row_of = merged.row_by_key.get
            rows = np.fromiter((row_of(key, -1) for key in self.sorted_keys), np.intp, len(self))
            self._last_keys_and_rows = merged.keys, rows
        return rows

    @cached_property
    def _last_keys_and_rows(self) -> tuple[list[str], Positions]:
        return [], np.full(len(self), -1)  # before the first call of `rows_in`, which replaces them


class GaugeSums(Struct):
    """The running sums of a gauge over all GPUs."""

    value_seconds: float = 0.0  # integral of the value over time
    covered_s: float = 0.0  # time with readings
    most: float | None = None  # the largest value

    @property
    def mean(self) -> float | None:
        return self.value_seconds / self.covered_s if self.covered_s > 0 else None


class GpuReadings(Struct):
    """The readings of the GPUs of a window, or of all windows, besides energy, memory and utilization."""

    gauges: dict[str, GaugeSums] = {}
    throttled_s: float = 0.0
    throttle_covered_s: float = 0.0
    power_histogram_s: dict[int, float] = {}  # bin of `DeviceWindow.power_histogram_s` -> seconds
    power_peak_w: float | None = None
    throttled_by_s: dict[str, float] = {}  # clocks event reason -> seconds; reasons may overlap

    def add_window(self, window: DeviceWindow) -> None:
        """Add the readings of one GPU; reasons above `MAX_REASONS` and unknown gauges are left out."""
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
        for power_bin, seconds in window.power_histogram_s.items():
            histogram_s[power_bin] = histogram_s.get(power_bin, 0.0) + seconds
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
            phases_j={**self.phases_j, **{row + len(self): joules for row, joules in more.phases_j.items()}},
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
        gpu_rows = expected.rows_in(self)[expected.is_gpu]
        covered_s = self.wall.energy[:, COVERED_S] + self.wall.levels[:, [MEMORY_S, BUSY_S]].sum(axis=1)
        return int((covered_s[gpu_rows[gpu_rows >= 0]] > 0).sum())


def merge_devices(
    rows: Sequence[RankReport],
    expected: Expected,
    members: Mapping[str, set[int]],
    readings: GpuReadings | None = None,
) -> Merged:
    """Return each device of a window once; ``readings`` are the sums of all reports, if each has one device.

    Readings of a whole device are from the rank with the highest coverage; if coverages are equal, the lowest rank is
    used.  So every window uses the same rank, whose periods are adjacent.  Shares of a shared device are added; if the
    share of one of its ranks (``members``) is missing, the device is not measured: a partial sum would be wrong.
    """
    chosen = _only_device_each(rows, expected)  # key -> the report whose readings of the device are used
    readings = readings if chosen and expected.is_gpu.all() else None
    of_several_ranks: dict[str, list[tuple[RankReport, DeviceWindow]]] = {}  # key -> all reports of the device
    for row in rows if not chosen else ():
        for window in row.devices:
            if (key := window.device) not in expected:
                continue
            if key not in chosen:
                chosen[key] = (row, window)
            else:
                of_several_ranks.setdefault(key, [chosen[key]]).append((row, window))
    for key, pairs in of_several_ranks.items():
        chosen[key] = min(pairs, key=lambda pair: (*_lack_of_coverage(*pair), pair[0].rank))
    windows = [window for _, window in chosen.values()]
    wall, phases_j = DeviceColumns.of([window.wall for window in windows]), {}
    iterations = DeviceColumns(*map(np.copy, wall))
    for i, window in enumerate(windows):
        if window.phases:
            without_phases = DeviceColumns.of([window.iterations])
            iterations.energy[i], iterations.levels[i] = without_phases.energy[0], without_phases.levels[0]
            phases_j[i] = {name: part.energy.joules for name, part in window.phases.items()}
    peaks = fields_of(windows, ("memory_peak_bytes",))[:, 0]
    for i, key in enumerate(chosen) if of_several_ranks or expected.shared else ():
        pairs = of_several_ranks.get(key) or [chosen[key]]
        if key in expected.shared:
            has_all = members.get(key, set()) <= {row.rank for row, _ in pairs}
            wall.levels[i] = _summed_levels([share.wall for _, share in pairs], has_all)
            iterations.levels[i] = _summed_levels([share.iterations for _, share in pairs], has_all)
            peaks[i] = fields_of([share for _, share in pairs], ("memory_peak_bytes",)).sum() if has_all else np.nan
        elif key in of_several_ranks:
            peaks[i] = np.fmax.reduce(fields_of([window for _, window in pairs], ("memory_peak_bytes",))[:, 0])
    _clear_tiny_coverage(iterations)
    if readings is None:
        readings = GpuReadings()
        for window in windows:
            if expected[window.device].is_gpu:
                readings.add_window(window)
    return Merged(
        keys=list(chosen),
        devices=list(map(expected.__getitem__, chosen)),
        span_s=np.array([row.wall_s for row, _ in chosen.values()]),
        wall=wall,
        iterations=iterations,
        peaks=peaks,
        phases_j=phases_j,
        gpus=readings,
    )


def has_one_device_each(rows: Sequence[RankReport]) -> bool:
    return set(map(len, map(attrgetter("devices"), rows))) == {1}


def _only_device_each(rows: Sequence[RankReport], expected: Expected) -> dict[str, tuple[RankReport, DeviceWindow]]:
    """Return by key the report and readings of each device, if each report has one device of its own; else nothing."""
    if not has_one_device_each(rows):
        return {}
    by_key = {row.devices[0].device: (row, row.devices[0]) for row in rows}
    return by_key if len(by_key) == len(rows) and by_key.keys() <= expected.keys() else {}


def _clear_tiny_coverage(columns: DeviceColumns) -> None:
    """Mark values as not measured if they cover less time than a rounding error."""
    columns.energy[~(columns.energy[:, COVERED_S] > MIN_COVERED_S)] = _NOT_MEASURED
    for value, covered_s in ((MEMORY, MEMORY_S), (BUSY, BUSY_S)):
        is_tiny = ~(columns.levels[:, covered_s] > MIN_COVERED_S)
        columns.levels[is_tiny, value], columns.levels[is_tiny, covered_s] = np.nan, 0.0


_NOT_MEASURED = structs_of([NOT_MEASURED], EnergyAmount)[0]


def _lack_of_coverage(row: RankReport, window: DeviceWindow) -> tuple[float, bool]:
    """Return the share of a report without energy, rounded so that equal shares compare equal, and if it has no memory.

    The windows of two ranks begin at different times.  If the energy of one window came from another rank, only because
    its memory has fewer gaps, the time between the two starts would be left out or counted twice.
    """
    covered_s = window.wall.energy.covered_s
    share = round(1 - covered_s / row.wall_s, 5) if row.wall_s > 0 else 1.0
    return share, window.wall.memory_covered_s <= 0


def _summed_levels(shares: Sequence[Integrals], has_all: bool) -> tuple[float, ...]:
    """Return the `LEVELS` of a device from the shares of its ranks; not measured if the share of a rank is missing."""
    memory, memory_s, busy, busy_s = fields_of(shares, LEVELS).T if has_all else np.zeros((len(LEVELS), 1))
    return (*_sum_of_means(memory, memory_s), *_sum_of_means(busy, busy_s))


def _sum_of_means(integrals: Array, covered_s: Array) -> tuple[float, float]:
    """Return the sum of the means over time, as an integral over the shortest covered time, and this time."""
    # The reports of the ranks cover slightly different periods, so their means add up, not their integrals.
    min_s = float(covered_s.min())
    return (float((np.nan_to_num(integrals) / covered_s).sum()) * min_s, min_s) if min_s > 0 else (np.nan, 0.0)
