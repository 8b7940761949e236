"""Rows of ranks to the totals of the cluster, pure: each token, joule and second counted once.

A device is known by its key alone, so one that several ranks sit on enters once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from effllm.agents.window import add_profiles, iterations_only
from effllm.aggregation.columns import Array, Positions, Table, fields_of
from effllm.aggregation.gathered import Gathered, GaugeSums, GpuReadings
from effllm.energy.energy_account import EnergySums, Stretch, Stretches, WindowEnergy
from effllm.energy.power_scope import Scope
from effllm.schema import NODE_PSU, NORMAL_95, ClusterTotals, Device, DeviceWindow, Integrals, Profile, RankReport

#: Coverage is a quotient of sums of floats; this much below is still full.
ROUNDING = 1e-6


class Rows(list[RankReport]):
    """The rows of a window, with what they come to."""

    gathered: Gathered | None = None  # what was added up of them as they came

    @cached_property
    def ranks(self) -> list[int]:
        """Whose they are."""
        return [row.rank for row in self]

    @cached_property
    def numbers(self) -> dict[str, Array]:
        """Their times and iterations, a column for each."""
        names = (*_PLACED, "wall_s", "busy_s", "wait_s", *_SUMMED)
        columns = dict(zip(names, fields_of(self, names).T, strict=True))
        columns["iterations"] = columns["iteration_last"] - columns["iteration_first"] + 1
        columns["time_s"] = columns["busy_s"] + columns["wait_s"]
        return columns

    @cached_property
    def counts(self) -> dict[str, int]:
        """Their counts, each over all rows: whole numbers, exactly."""
        return {name: sum(map(attrgetter(name), self)) for name in _COUNTED}

    @cached_property
    def iterations(self) -> int:
        """How many iterations the longest of them has."""
        return int(self.numbers["iterations"].max(initial=0.0))

    @cached_property
    def loss(self) -> float | None:
        """The loss, of the first that has it."""
        return next((loss for loss in map(attrgetter("loss"), self) if loss is not None), None)

    @cached_property
    def first_not_finite(self) -> int | None:
        """The first iteration whose loss was NaN or infinite, by the number shown."""
        numbers = [number for number in map(attrgetter("first_not_finite"), self) if number is not None]
        return min(numbers, default=None)

    @cached_property
    def profile(self) -> Profile | None:
        """Their profiled iterations."""
        return reduce(add_profiles, filter(None, map(attrgetter("profile"), self)), None)

    @cached_property
    def phases_s(self) -> dict[str, float]:
        """Their phases, over all rows."""
        sums: dict[str, float] = {}
        for phases_s in filter(None, map(attrgetter("phases_s"), self)):
            for name, seconds in phases_s.items():
                sums[name] = sums.get(name, 0.0) + seconds
        return sums

    @cached_property
    def is_final(self) -> bool:
        """Whether one of them is its rank's last."""
        return bool(self.numbers["final"].any())

    def joined(self, more: Rows) -> Rows:
        """Return what these rows and more come to, without the rows themselves."""
        both = Rows()
        both.__dict__.update(
            ranks=self.ranks + more.ranks,
            numbers={name: np.concatenate((column, more.numbers[name])) for name, column in self.numbers.items()},
            counts={name: count + more.counts[name] for name, count in self.counts.items()},
            iterations=max(self.iterations, more.iterations),
            loss=more.loss if self.loss is None else self.loss,
            profile=add_profiles(self.profile, more.profile),
            phases_s={
                name: self.phases_s.get(name, 0.0) + more.phases_s.get(name, 0.0)
                for name in {**self.phases_s, **more.phases_s}
            },
            is_final=self.is_final or more.is_final,
        )
        return both

    @classmethod
    def of(cls, rows: Iterable[RankReport]) -> Rows:
        """Return rows as such, those that are already as they are."""
        return rows if isinstance(rows, Rows) else cls(rows)

    @classmethod
    def by_rank(cls, rows: Mapping[int, RankReport], gathered: Gathered | None = None) -> Rows:
        """Return the rows of ranks in their order, with what was added up of them as they came."""
        ranks = sorted(rows)
        ordered = cls(map(rows.__getitem__, ranks))
        ordered.ranks, ordered.gathered = ranks, gathered
        return ordered


_PLACED = (
    "sequence",
    "final",
    "iteration_first",
    "iteration_last",
    "iteration_shown",
    "start_time_s",
    "end_time_s",
)
_SUMMED = ("generation_s", "device_steps", "device_step_s")
_COUNTED = (
    "tokens",
    "tokens_processed",
    "tokens_loss",
    "samples",
    "generated_tokens",
    "prompt_tokens",
    "losses_not_finite",
)


class MergedDevice(Struct, frozen=True):
    """What one device did in one window, from the rows of all ranks that sit on it."""

    device: Device
    wall: Integrals
    iterations: Integrals
    phases_j: dict[str, float | None]
    span_s: float  # of the row that its energy is from
    memory_peak_bytes: float | None
    window: DeviceWindow  # of that row

    @property
    def is_measured(self) -> bool:
        """Whether anything of it was measured."""
        return self.wall.memory_covered_s + self.wall.utilization_covered_s + self.wall.energy_covered_s > 0

    @property
    def energy_coverage(self) -> float:
        """Share of its span in which its energy was measured."""
        return min(self.wall.energy_covered_s / self.span_s, 1.0) if self.span_s > 0 else 0.0


#: Columns of an array of integrals.
_FIELDS = Integrals.__struct_fields__
_ENERGY, _ENERGY_S, _MEMORY, _MEMORY_S, _BUSY, _BUSY_S = range(6)
_ESTIMATED = _FIELDS.index("energy_estimated_j")
_ERRORS = [_FIELDS.index(name) for name in ("energy_start_j2", "energy_end_j2", "energy_inside_j2")]
#: Less than this is the rounding of a difference, and no stretch of time.
_LEAST_S = 1e-6


class Expected(dict[str, Device]):
    """The devices that a window should hold, with what is asked of them window for window."""

    @classmethod
    def of(cls, devices: Mapping[str, Device]) -> Expected:
        """Return devices as such, those that are already as they are."""
        return devices if isinstance(devices, Expected) else cls(devices)

    @cached_property
    def order(self) -> list[str]:
        """The keys, sorted."""
        return sorted(self)

    @cached_property
    def owners(self) -> list[str]:
        """Whose energy each shows, in the order of the keys."""
        return [self[key].energy_key or key for key in self.order]

    @cached_property
    def is_gpu(self) -> NDArray[np.bool_]:
        """Which are GPUs, in the order of the keys."""
        return np.array([self[key].is_gpu for key in self.order], bool)

    @cached_property
    def is_measurable(self) -> bool:
        """Whether any has a sensor of energy or power."""
        return any(device.energy_method for device in self.values())

    @cached_property
    def is_first_of_owner(self) -> NDArray[np.bool_]:
        """Which are the first that show an energy, in the order of the keys."""
        first = {owner: at for at, owner in reversed(list(enumerate(self.owners)))}
        return np.array([first[owner] == at for at, owner in enumerate(self.owners)], bool)

    @cached_property
    def has_only_gpus(self) -> bool:
        """Whether all are GPUs."""
        return bool(self.is_gpu.all())

    @cached_property
    def shared(self) -> frozenset[str]:
        """The keys of those whose readings are one rank's share."""
        return frozenset(key for key, device in self.items() if device.shared)

    @cached_property
    def keys_alike(self) -> dict[str, str]:
        """One object for each key, however often it is read."""
        return {key: key for key in self}

    def positions(self, merged: Merged) -> Positions:
        """Return the column of each of these devices, in the order of the keys; -1 for those that are not there."""
        names, found = self._found
        if names != merged.names:
            find = merged._positions.get
            found = np.fromiter((find(key, -1) for key in self.order), np.intp, len(self))
            self._found = merged.names, found
        return found

    @cached_property
    def _found(self) -> tuple[list[str], Positions]:
        return [], np.full(len(self), -1)

    @cached_property
    def _masks(self) -> list[tuple[Scope, NDArray[np.bool_]]]:
        return []

    def within(self, scope: Scope | None) -> NDArray[np.bool_]:
        """Return which are in a scope, in the order of the keys."""
        if scope is None:
            return np.ones(len(self), bool)
        for known, mask in self._masks:
            if known is scope:
                return mask
        mask = np.array([key in scope.keys for key in self.order], bool)
        self._masks[:] = [*self._masks[-2:], (scope, mask)]
        return mask


#: What `Merged` computes from its columns when it is asked.
_DERIVED = frozenset({"names", "energy_coverage", "stretches", "is_measured"})


class Merged(Mapping[str, MergedDevice]):
    """The devices of a window, each once: as objects by their keys, and side by side as columns."""

    def __init__(self, rows: Iterable[RankReport], devices: Expected, members: Mapping[str, set[int]]) -> None:
        known: dict[str, tuple[RankReport, DeviceWindow]] = {}
        several: dict[str, list[tuple[RankReport, DeviceWindow]]] = {}
        same = devices.keys_alike.get
        for row in rows:
            for one in row.devices:
                # One and the same text for a key from window to window, which is found, and found equal, unread.
                key = same(one.device)
                if key is None:
                    continue
                if key not in known:
                    known[key] = (row, one)
                else:
                    several.setdefault(key, [known[key]]).append((row, one))
        self.devices = list(map(devices.__getitem__, known))
        self._special = {
            key: _merge(several.get(key) or [known[key]], devices[key], members.get(key, set()))
            for key in (known if several or devices.shared else ())
            if key in several or key in devices.shared
        }
        self._positions = dict(zip(known, range(len(known)), strict=True))
        self._windows: list[DeviceWindow] = [one for _, one in known.values()]
        spans_s = [row.wall_s for row, _ in known.values()]
        for key, special in self._special.items():
            self._windows[self._positions[key]] = special.window
            spans_s[self._positions[key]] = special.span_s
        self.span_s = np.array(spans_s)
        self.wall = fields_of([one.wall for one in self._windows], _FIELDS)
        self.peaks = fields_of(self._windows, ("memory_peak_bytes",))[:, 0]
        self.phases_j: dict[int, dict[str, float | None]] = {}  # by position, of those that have any
        self.iterations = self._iterations()
        for key, special in self._special.items():
            at = self._positions[key]
            both = [tuple(getattr(one, name) for name in _FIELDS) for one in (special.wall, special.iterations)]
            self.wall[at], self.iterations[at] = np.array(both, np.float64)
            self.peaks[at] = np.nan if special.memory_peak_bytes is None else special.memory_peak_bytes
        gathered = rows.gathered if isinstance(rows, Rows) and devices.has_only_gpus and not self._special else None
        readings = gathered.of(len(known), len(rows)) if gathered is not None and isinstance(rows, Rows) else None
        self.gpus = self._readings() if readings is None else readings

    def _readings(self) -> GpuReadings:
        readings = GpuReadings()
        for device, window in zip(self.devices, self._windows, strict=True):
            if device.is_gpu:
                readings.add(window)
        return readings

    def _iterations(self) -> Array:
        """Return what the devices did less the phases; see `iterations_only`."""
        left = self.wall.copy()
        for value, covered in ((_ENERGY, _ENERGY_S), (_MEMORY, _MEMORY_S), (_BUSY, _BUSY_S)):
            nothing = ~(left[:, covered] > _LEAST_S)
            left[nothing, value], left[nothing, covered] = np.nan, 0.0
        left[np.isnan(left[:, _ENERGY]), 6:] = 0.0
        for at, phases in enumerate(map(attrgetter("phases"), self._windows)):
            if phases:
                only = iterations_only(self._windows[at])
                left[at] = np.array([getattr(only, name) for name in _FIELDS], np.float64)
                self.phases_j[at] = {name: part.energy_j for name, part in phases.items()}
        return left

    def forgetful(self) -> Merged:
        """Return the same columns, without the objects that they were made from."""
        other = Merged.__new__(Merged)
        kept = {name: value for name, value in self.__dict__.items() if name not in _DERIVED}
        other.__dict__.update({**kept, "_windows": [], "_special": {}})
        return other

    def joined(self, more: Merged) -> Merged:
        """Return these devices and more, none of which is among these, as columns alone."""
        both = self.forgetful()
        both.devices = self.devices + more.devices
        both._positions = {key: at for at, key in enumerate([*self, *more])}
        for name in ("span_s", "wall", "iterations", "peaks"):
            setattr(both, name, np.concatenate((getattr(self, name), getattr(more, name))))
        both.phases_j = {**self.phases_j, **{at + len(self): parts for at, parts in more.phases_j.items()}}
        both.gpus = self.gpus.joined(more.gpus)
        return both

    def __getitem__(self, key: str) -> MergedDevice:
        """Return one device."""
        at = self._positions[key]
        if key in self._special:
            return self._special[key]
        window = self._windows[at]
        return MergedDevice(
            device=self.devices[at],
            wall=window.wall,
            iterations=iterations_only(window),
            phases_j=self.phases_j.get(at, {}),
            span_s=float(self.span_s[at]),
            memory_peak_bytes=window.memory_peak_bytes,
            window=window,
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    @cached_property
    def names(self) -> list[str]:
        """The keys, in the order of the columns."""
        return list(self._positions)

    @cached_property
    def energy_coverage(self) -> Array:
        """Share of its span in which each device's energy was measured."""
        covered = np.zeros(len(self))
        np.divide(self.wall[:, _ENERGY_S], self.span_s, out=covered, where=self.span_s > 0)
        return np.minimum(covered, 1.0)

    @cached_property
    def stretches(self) -> tuple[Array, Array]:
        """Energies over the wall time and over the iterations, in the order of Stretch's fields."""
        gain = np.array([device.sensor.gain_error for device in self.devices])
        return _stretches(self.wall, gain), _stretches(self.iterations, gain)

    @cached_property
    def is_measured(self) -> NDArray[np.bool_]:
        """Whether anything of each device was measured."""
        measured: NDArray[np.bool_] = self.wall[:, [_ENERGY_S, _MEMORY_S, _BUSY_S]].sum(axis=1) > 0
        return measured

    def mean_power_w(self, at: Positions) -> Array:
        """Return the mean power of devices in iterations, of those of which it was measured."""
        return _means(np.nan_to_num(self.iterations[at, _ENERGY]), self.iterations[at, _ENERGY_S])

    def mean_utilization(self, at: Positions) -> Array:
        """Return the mean utilization of devices in iterations, of those of which it was measured."""
        return _means(np.nan_to_num(self.iterations[at, _BUSY]), self.iterations[at, _BUSY_S])

    def covered_s(self) -> tuple[float, float, float]:
        """Return the spans of devices that compute, and the seconds in which memory and utilization were measured."""
        computing = ~np.array([device.only_power for device in self.devices], bool)
        memory_s, busy_s = self.wall[computing, _MEMORY_S].sum(), self.wall[computing, _BUSY_S].sum()
        return float(self.span_s[computing].sum()), float(memory_s), float(busy_s)

    def count_measured(self, expected: Expected) -> int:
        """Return of how many of the expected GPUs anything was measured."""
        there = expected.positions(self)[expected.is_gpu]
        return int(self.is_measured[there[there >= 0]].sum())


def _stretches(integrals: Array, gain_error: Array) -> Array:
    joules = np.nan_to_num(integrals[:, _ENERGY])
    return np.column_stack((joules, integrals[:, _ERRORS], gain_error * joules, integrals[:, _ESTIMATED]))


def merge_devices(rows: Iterable[RankReport], devices: Mapping[str, Device], members: Mapping[str, set[int]]) -> Merged:
    """Return each device of a window once.

    Whole-device readings are taken from the rank that covers most of its row, of equals from the first: one
    and the same from window to window, whose rows meet.  Shares of a shared device add up, and with a rank
    missing they are not measured, for a sum with a hole in it is not a sum.

    Args:
        rows: the window's rows.
        devices: every known device by its key.
        members: the ranks that sit on each device.
    """
    return Merged(rows, Expected.of(devices), members)


def _merge(pairs: list[tuple[RankReport, DeviceWindow]], device: Device, members: set[int]) -> MergedDevice:
    row, best = min(pairs, key=lambda pair: (*_least_covered(*pair), pair[0].rank))
    peaks = [one.memory_peak_bytes for _, one in pairs if one.memory_peak_bytes is not None]
    wall, iterations = best.wall, iterations_only(best)
    if device.shared:
        whole = members <= {row.rank for row, _ in pairs}
        wall = _add_shares(wall, [one.wall for _, one in pairs], whole)
        iterations = _add_shares(iterations, [iterations_only(one) for _, one in pairs], whole)
        peaks = [sum(peaks)] if whole and len(peaks) == len(pairs) else []
    return MergedDevice(
        device=device,
        wall=wall,
        iterations=iterations,
        phases_j={name: part.energy_j for name, part in best.phases.items()},
        span_s=row.wall_s,
        memory_peak_bytes=max(peaks, default=None),
        window=best,
    )


def _least_covered(row: RankReport, one: DeviceWindow) -> tuple[float, float]:
    """Return the uncovered shares of a row, without the digits in which equal ones differ by rounding."""
    covered = one.wall.energy_covered_s, one.wall.memory_covered_s
    energy, memory = (round(1 - seconds / row.wall_s, 5) if row.wall_s > 0 else 1.0 for seconds in covered)
    return energy, memory


def _add_shares(best: Integrals, shares: Sequence[Integrals], whole: bool) -> Integrals:
    memory = [(share.memory_byte_seconds, share.memory_covered_s) for share in shares]
    utilization = [(share.utilization_seconds, share.utilization_covered_s) for share in shares]
    memory_sum, memory_s = _sum_of_means(memory) if whole else (None, 0.0)
    utilization_sum, utilization_s = _sum_of_means(utilization) if whole else (None, 0.0)
    return replace(
        best,
        memory_byte_seconds=memory_sum,
        memory_covered_s=memory_s,
        utilization_seconds=utilization_sum,
        utilization_covered_s=utilization_s,
    )


def _sum_of_means(shares: Sequence[tuple[float | None, float]]) -> tuple[float | None, float]:
    # The rows of the ranks span slightly different stretches, so their means add up, not their integrals.
    covered_s = min(seconds for _, seconds in shares)
    if covered_s <= 0:
        return None, 0.0
    return sum((value or 0.0) / seconds for value, seconds in shares) * covered_s, covered_s


def window_energy(
    merged: Merged,
    devices: Mapping[str, Device],
    absent: int,
    blind: int = 0,
    scope: Scope | None = None,
    left: Iterable[str] = (),
) -> WindowEnergy:
    """Return the energy of a window and how much of it was measured.

    Args:
        merged: the window's devices.
        devices: every device that the window should hold.
        absent: ranks of which nothing is known.
        blind: ranks without a device, though they are there.
        scope: whose energy is the job's; ``None`` for that of all devices.
        left: devices whose ranks have all left while others train.
    """
    expected = Expected.of(devices)
    lacking = absent + (scope.lacking if scope else 0) + (0 if scope and scope.choice == NODE_PSU else blind)
    is_measurable = expected.is_measurable if scope is None else bool(scope.label)
    rows = expected.positions(merged)
    owners, shown = _shown(merged, expected, rows, expected.within(scope))
    gpu_owners, gpus = _shown(merged, expected, rows, expected.is_gpu)
    wall, iterations = merged.stretches
    there = shown >= 0
    there[there] = ~np.isnan(merged.wall[shown[there], _ENERGY])
    measured = shown[there]
    phases_j: dict[str, float] = {}
    for at in set(merged.phases_j).intersection(measured.tolist()) if merged.phases_j else ():
        for name, joules in merged.phases_j[at].items():
            phases_j[name] = phases_j.get(name, 0.0) + (joules or 0.0)
    names = owners if there.all() else [owner for owner, is_there in zip(owners, there, strict=True) if is_there]
    by_owner = Stretches(names, wall[measured])
    present = gpus[gpus >= 0]
    is_all_there = bool(there.all()) and not lacking
    return WindowEnergy(
        coverage=_coverage(shown, merged, lacking) if is_measurable else None,
        wall=by_owner.total(),
        iterations=Stretches(names, iterations[measured]).total(),
        phases_j=phases_j,
        stretches=by_owner,
        gpus_coverage=_coverage(gpus, merged, absent + blind) if gpu_owners else None,
        gpus_wall_j=float(wall[present, 0].sum()),
        gpus_iterations_j=float(iterations[present, 0].sum()),
        num_owners=len(owners) + lacking,
        lowest_coverage=float(merged.energy_coverage[shown].min(initial=1.0)) if is_all_there else 0.0,
        num_left=sum(scope is None or key in scope.keys for key in left),
    )


def _shown(
    merged: Merged, expected: Expected, rows: Positions, chosen: NDArray[np.bool_]
) -> tuple[list[str], Positions]:
    """Return whose energy is to be measured, each once, and the row that shows it best in this window, or -1."""
    if chosen.all():
        owners, found = expected.owners, rows
    else:
        owners, found = [expected.owners[i] for i in np.flatnonzero(chosen)], rows[chosen]
    if len(set(owners)) == len(owners):
        return owners, found.copy()
    best: dict[str, int] = {}
    coverage = merged.energy_coverage
    for owner, at in zip(owners, found.tolist(), strict=True):
        known = best.setdefault(owner, at)
        if at >= 0 and (known < 0 or coverage[at] > coverage[known] + ROUNDING):
            best[owner] = at
    return list(best), np.array(list(best.values()), np.intp)


def _coverage(shown: Positions, merged: Merged, lacking: int) -> float:
    """Return measured over expected device-seconds."""
    if not len(merged):
        return 0.0
    span_s = float(merged.span_s.max())
    there = shown[shown >= 0]
    expected_s = float(merged.span_s[there].sum()) + (len(shown) - len(there) + lacking) * span_s
    covered_s = float((merged.energy_coverage[there] * merged.span_s[there]).sum())
    return covered_s / expected_s if expected_s > 0 else float(span_s <= 0)  # of no time nothing is missing


def is_covered(coverage: float | None, least: float) -> bool:
    """Whether a window's energy may enter sums."""
    return coverage is not None and coverage >= least - ROUNDING


class RankSums(Table):
    """The running sums of each rank."""

    NAMES = (
        "iterations",
        "time_s",
        "busy_s",
        "wait_s",
        "energy_time_s",  # of the windows whose energy is in the sum
        "generation_s",
        "device_steps",
        "device_step_s",
    )


class DeviceSums(Table):
    """The running sums of each device."""

    NAMES = (
        "memory_byte_seconds",
        "memory_covered_s",
        "utilization_seconds",
        "utilization_covered_s",
        "memory_peak_bytes",  # the largest; nan where none was measured
    )
    EMPTY = (0.0, 0.0, 0.0, 0.0, np.nan)


class Account(Struct):
    """The running sums of a job on one time base.

    ``wall`` chooses the base: the whole wall time of the rows, or their iterations alone.
    """

    wall: bool = False
    ranks: RankSums = msgspec.field(default_factory=RankSums)
    devices: DeviceSums = msgspec.field(default_factory=DeviceSums)
    tokens: int = 0
    tokens_processed: int = 0
    tokens_loss: int = 0
    samples: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    losses_not_finite: int = 0
    profile: Profile | None = None
    energy: EnergySums = msgspec.field(default_factory=EnergySums)  # of the covered windows
    energy_tokens: int = 0
    energy_samples: int = 0
    energy_iterations: int = 0
    energy_windows: int = 0
    holes: int = 0  # windows whose energy is not in the sum
    partial: int = 0  # windows of which a device is not in it, or only in part; the holes are among them
    left_windows: int = 0  # those of them in which it is missing because its ranks had left
    covered_s: float = 0.0  # wall time, mean over devices, whose energy was measured
    covered_iterations: float = 0.0
    measured_j: float = 0.0
    gpus_j: float = 0.0  # what GPUs drew in the covered windows, whatever the scope ...
    gpus_holes: int = 0  # ... and in how many of these that is not known
    gauges: dict[str, GaugeSums] = {}
    throttled_s: float = 0.0
    throttle_covered_s: float = 0.0
    power_histogram_s: dict[int, float] = {}
    power_peak_w: float | None = None

    def add_rows(self, rows: Iterable[RankReport]) -> None:
        """Add the times and counts of rows, each of which may be added once."""
        rows = Rows.of(rows)
        numbers, counts = rows.numbers, rows.counts
        columns = ["iterations", "wall_s" if self.wall else "time_s", "busy_s", "wait_s", *_SUMMED]
        added = np.stack([numbers[name] for name in columns], axis=1)
        at = self.ranks.find(rows.ranks)
        self.ranks.values[at[:, None], _OF_ROWS] += added
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)
        self.profile = add_profiles(self.profile, rows.profile)

    def add_devices(self, merged: Merged, sign: int = 1) -> None:
        """Add the memory and utilization of a window's devices; with a sign of -1 take them back."""
        integrals = merged.wall if self.wall else merged.iterations
        at = self.devices.find(merged.names)
        values = self.devices.values
        values[at, :4] += sign * np.nan_to_num(integrals[:, [_MEMORY, _MEMORY_S, _BUSY, _BUSY_S]])
        values[at, 4] = np.fmax(values[at, 4], merged.peaks)
        self._add_readings(merged.gpus, sign)

    def _add_readings(self, readings: GpuReadings, sign: int) -> None:
        for name, gauge in readings.gauges.items():
            sums = self.gauges.setdefault(name, GaugeSums())
            sums.value_seconds += sign * gauge.value_seconds
            sums.covered_s += sign * gauge.covered_s
            if gauge.most is not None:
                sums.most = gauge.most if sums.most is None else max(sums.most, gauge.most)
        self.throttled_s += sign * readings.throttled_s
        self.throttle_covered_s += sign * readings.throttle_covered_s
        for step, seconds in readings.power_histogram_s.items():
            self.power_histogram_s[step] = self.power_histogram_s.get(step, 0.0) + sign * seconds
        if readings.power_peak_w is not None:
            self.power_peak_w = max(readings.power_peak_w, self.power_peak_w or 0.0)

    def add_energy(
        self, window: int, energy: WindowEnergy, rows: Iterable[RankReport], least_coverage: float, sign: int = 1
    ) -> None:
        """Add a window's energy, with the seconds and counts it belongs to, if enough of it was measured.

        With a sign of -1 take it back, for a late row changes all of it.
        """
        stretch: Stretch = energy.wall if self.wall else energy.iterations
        self.measured_j += sign * stretch.joules
        rows = Rows.of(rows)
        is_whole = is_covered(energy.coverage, least_coverage) and is_covered(energy.lowest_coverage, least_coverage)
        self.partial += sign * (not is_whole or energy.num_left > 0)
        self.left_windows += sign * (energy.num_left > 0)
        self.covered_s += sign * energy.share * float(rows.numbers["wall_s"].max(initial=0.0))
        self.covered_iterations += sign * energy.share * rows.iterations
        if not is_covered(energy.coverage, least_coverage):
            self.holes += sign
            return
        self.energy_windows += sign
        self.energy.add(window, stretch, sign)
        self.gpus_j += sign * (energy.gpus_wall_j if self.wall else energy.gpus_iterations_j)
        self.gpus_holes += sign * (not is_covered(energy.gpus_coverage, least_coverage))
        self.energy_iterations += sign * rows.iterations
        at = self.ranks.find(rows.ranks)
        self.ranks.column("energy_time_s")[at] += sign * rows.numbers["wall_s" if self.wall else "time_s"]
        self.energy_tokens += sign * rows.counts["tokens"]
        self.energy_samples += sign * rows.counts["samples"]

    def totals(self, *, sample_s: float | None = None, **known: Any) -> ClusterTotals:
        """Return what every metric is computed from: sums per rank first, the maximum over ranks last.

        Args:
            sample_s: time between two samples of a device, where the error of means is to be known.
            known: fields of the totals that are not sums: parameters, number of GPUs, peak, prices.
        """
        memory = _means(self.devices.column("memory_byte_seconds"), self.devices.column("memory_covered_s"))
        busy = _means(self.devices.column("utilization_seconds"), self.devices.column("utilization_covered_s"))
        peaks = self.devices.column("memory_peak_bytes")
        peaks = peaks[~np.isnan(peaks)]
        ranks = dict(zip(RankSums.NAMES, self.ranks.values.T, strict=True))
        longest = int(ranks["time_s"].argmax()) if len(self.ranks) else -1
        slowest = _slowest(ranks["busy_s"], ranks["iterations"])
        slowest_device = _slowest(ranks["device_step_s"], ranks["device_steps"])
        return ClusterTotals(
            iterations=int(_largest(ranks["iterations"])),
            time_s=_at(ranks["time_s"], longest),
            slowest_step_s=_at(ranks["busy_s"], slowest),
            slowest_iterations=int(_at(ranks["iterations"], slowest)),
            wait_s=_at(ranks["wait_s"], longest),
            tokens=self.tokens,
            tokens_processed=self.tokens_processed,
            tokens_loss=self.tokens_loss,
            samples=self.samples,
            generated_tokens=self.generated_tokens,
            generation_s=_largest(ranks["generation_s"]),
            prompt_tokens=self.prompt_tokens,
            losses_not_finite=self.losses_not_finite,
            profile=self.profile,
            device_steps=int(_at(ranks["device_steps"], slowest_device)),
            device_step_s=_at(ranks["device_step_s"], slowest_device),
            memory_mean_bytes=float(memory.mean()) if len(memory) else None,
            memory_min_bytes=float(memory.min()) if len(memory) else None,
            memory_max_bytes=float(memory.max()) if len(memory) else None,
            memory_peak_bytes=float(peaks.max()) if len(peaks) else None,
            memory_error_bytes=self._sampling_error("memory", sample_s),
            utilization_error=self._sampling_error("utilization", sample_s) if known.get("gpus") else None,
            utilization_mean=float(busy.mean()) if len(busy) else None,
            utilization_min=float(busy.min()) if len(busy) else None,
            utilization_max=float(busy.max()) if len(busy) else None,
            energy_j=self.energy.joules if self.energy_windows else None,
            energy_gpus_j=self.gpus_j if self.energy_windows and not self.gpus_holes else None,
            energy_error_j=self.energy.error_j if self.energy_windows else None,
            energy_gain_error_j=self.energy.gain_j if self.energy_windows else None,
            energy_estimated_j=self.energy.estimated_j if self.energy_windows else None,
            energy_time_s=_largest(ranks["energy_time_s"]),
            energy_tokens=self.energy_tokens,
            energy_samples=self.energy_samples,
            energy_iterations=self.energy_iterations,
            energy_complete=self.energy_windows > 0 and not self.partial,
            energy_measured_j=self.measured_j if self.energy_windows or self.measured_j else None,
            power_peak_w=self.power_peak_w,
            power_histogram_s=dict(self.power_histogram_s),
            throttled_s=self.throttled_s if self.throttle_covered_s > 0 else None,
            throttle_covered_s=self.throttle_covered_s,
            temperature_max_c=self._gauge("temperature_c").most,
            sm_clock_hz=self._gauge("sm_clock_hz").mean,
            sm_activity=self._gauge("sm_activity_ratio").mean,
            tensor_activity=self._gauge("tensor_activity_ratio").mean,
            dram_activity=self._gauge("dram_activity_ratio").mean,
            **known,
        )

    def _sampling_error(self, name: str, sample_s: float | None) -> float | None:
        """Return the half-width (95 %) of a mean of samples over devices, or ``None`` where it is not known.

        What varies around a mean m between 0 and a peak p has a variance of at most m (p - m) (Bhatia and Davis, 2000);
        of a mean of n samples at unrelated moments, a share 1/n of it.  Devices of a job do the same at the same time,
        so that their errors do not cancel.
        """
        integral = "memory_byte_seconds" if name == "memory" else "utilization_seconds"
        sums, covered_s = self.devices.column(integral), self.devices.column(f"{name}_covered_s")
        there = covered_s > 0
        if sample_s is None or not there.any():
            return None
        means = sums[there] / covered_s[there]
        peaks = self.devices.column("memory_peak_bytes")[there] if name == "memory" else 1.0
        variances = np.maximum(means * (peaks - means), 0.0) / np.maximum(covered_s[there] / sample_s, 1.0)
        error = NORMAL_95 * float(np.sqrt(variances).mean())
        return None if np.isnan(error) else error

    def iteration_s(self) -> float:
        """Return the mean iteration of the rank with the longest ones; 0 where there are none."""
        time_s, iterations = self.ranks.column("time_s"), self.ranks.column("iterations")
        return float(_means(time_s, iterations).max(initial=0.0))

    def _gauge(self, name: str) -> GaugeSums:
        return self.gauges.get(name) or GaugeSums()


#: Columns of a rank's sums that are of all windows, in the order of the columns of rows that enter them.
_OF_ROWS = [RankSums.NAMES.index(name) for name in ("iterations", "time_s", "busy_s", "wait_s", *_SUMMED)]


def _means(sums: Array, covered_s: Array) -> Array:
    there = covered_s > 0
    means: Array = sums[there] / covered_s[there]
    return means


def _largest(column: Array) -> float:
    return float(column.max(initial=0.0))


def _slowest(seconds: Array, steps: Array) -> int:
    """Return the row with the largest mean step, or -1 where there are no steps."""
    if not (steps > 0).any():
        return -1
    means = np.full(len(steps), -1.0)
    np.divide(seconds, steps, out=means, where=steps > 0)
    return int(means.argmax())


def _at(column: Array, row: int) -> float:
    return float(column[row]) if row >= 0 else 0.0
