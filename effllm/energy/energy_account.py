"""The energy of windows and of runs, with what may be wrong with it: each joule counted once; pure.

Random errors of windows that follow each other share an edge: what one gains there the other loses.
So a sum of windows remembers the variance at its open ends, and forgets it where two windows meet.
The gain of sensors is common to all windows of a board and may be common to all boards of a model, so
it adds up linearly and never averages out (arXiv 2312.02741, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from msgspec import Struct

from effllm.aggregation.columns import Array, Positions, Table, array_of
from effllm.schema import NORMAL_95, Device, Integrals

#: Windows that a late report can still change; the edges of older ones are final.
OPEN_WINDOWS = 10
#: A window whose random error is a larger share of its energy than this is too short to tell its energy.
MOST_RANDOM_ERROR = 0.05


class Stretch(Struct, frozen=True):
    """Energy of one stretch of time on one time base, over the devices that count."""

    joules: float = 0.0
    start_j2: float = 0.0
    end_j2: float = 0.0
    inside_j2: float = 0.0
    gain_j: float = 0.0  # half-width, 95 %, of the sensors' gain
    estimated_j: float = 0.0

    @property
    def error_j(self) -> float:
        """Half-width, 95 %, of the random error of this stretch alone."""
        return NORMAL_95 * math.sqrt(self.start_j2 + self.end_j2 + self.inside_j2)


class Stretches:
    """The energies of many devices in one window, side by side."""

    def __init__(self, owners: Sequence[str], values: Array) -> None:
        self.owners = owners  # whose energy it is
        self.values = values  # a row for each, in the order of Stretch's fields

    def total(self) -> Stretch:
        """Return the energy of all: their random errors know nothing of each other."""
        return Stretch(*(float(one) for one in self.values.sum(axis=0)))

    def by_owner(self) -> dict[str, Stretch]:
        """Return the energy of each."""
        rows = self.values.tolist()
        return {owner: Stretch(*row) for owner, row in zip(self.owners, rows, strict=True)}


class WindowEnergy(Struct, frozen=True):
    """The energy of one window of the cluster."""

    coverage: float | None  # measured device-seconds over expected ones; None where nothing can measure
    wall: Stretch
    iterations: Stretch
    phases_j: dict[str, float]
    stretches: Stretches  # of the devices that were measured, over the wall time
    gpus_coverage: float | None = None  # of the GPUs, whatever the scope
    gpus_wall_j: float = 0.0
    gpus_iterations_j: float = 0.0
    num_owners: int = 0  # devices whose energy the window should hold
    lowest_coverage: float = 1.0  # of any of these devices; 0 where a device or a rank is missing
    num_left: int = 0  # devices whose ranks have left while others train: they are in no coverage

    @property
    def share(self) -> float:
        """Share of the window's energy that was measured, of devices whose ranks have left too."""
        num_owners = self.num_owners + self.num_left
        return (self.coverage or 0.0) * self.num_owners / num_owners if num_owners else 0.0

    @property
    def wall_j(self) -> float:
        """Joules over the whole wall time; a sum only where the coverage suffices."""
        return self.wall.joules

    @property
    def iterations_j(self) -> float:
        """Joules in iterations; a sum only where the coverage suffices."""
        return self.iterations.joules

    @property
    def by_device(self) -> dict[str, Stretch]:
        """The energy of each device that was measured, by whose it is."""
        return self.stretches.by_owner()

    @property
    def by_device_j(self) -> dict[str, float]:
        """Joules of each device that was measured."""
        return {key: stretch.joules for key, stretch in self.by_device.items()}


def stretch_of(device: Device, integrals: Integrals) -> Stretch:
    """Return the energy of one device in one window."""
    joules = integrals.energy_j or 0.0
    return Stretch(
        joules=joules,
        start_j2=integrals.energy_start_j2,
        end_j2=integrals.energy_end_j2,
        inside_j2=integrals.energy_inside_j2,
        gain_j=device.sensor.gain_error * joules,
        estimated_j=integrals.energy_estimated_j,
    )


def sum_of(stretches: Mapping[str, Stretch]) -> Stretch:
    """Return the energy of several devices in one window: their random errors know nothing of each other."""
    fields = {name: sum(getattr(one, name) for one in stretches.values()) for name in Stretch.__struct_fields__}
    return Stretch(**fields)


class Edge(Struct):
    """A boundary between two windows: the variances of the one that ends there and of the one that begins."""

    before_j2: float | None = None
    after_j2: float | None = None

    @property
    def open_j2(self) -> float:
        """What the boundary adds to the error of a sum: nothing where two windows meet."""
        if self.before_j2 is not None and self.after_j2 is not None:
            return 0.0
        return self.before_j2 or self.after_j2 or 0.0

    @property
    def is_bare(self) -> bool:
        """Whether no window of the sum touches it."""
        return self.before_j2 is None and self.after_j2 is None


class EnergySums(Struct):
    """Energy over many windows."""

    joules: float = 0.0
    inside_j2: float = 0.0
    gain_j: float = 0.0
    estimated_j: float = 0.0
    closed_j2: float = 0.0  # of open ends that no window will meet any more
    edges: dict[int, Edge] = {}  # by the window that ends there
    newest: int = 0

    def add(self, window: int, stretch: Stretch, sign: int = 1) -> None:
        """Add a window, by its number; with a sign of -1 take it back."""
        self.joules += sign * stretch.joules
        self.inside_j2 += sign * stretch.inside_j2
        self.gain_j += sign * stretch.gain_j
        self.estimated_j += sign * stretch.estimated_j
        self._touch(window - 1, "after_j2", stretch.start_j2, sign)
        self._touch(window, "before_j2", stretch.end_j2, sign)
        self.newest = max(self.newest, window)
        for boundary in [one for one in self.edges if one < self._oldest]:
            self.closed_j2 += self.edges.pop(boundary).open_j2

    def close(self) -> None:
        """End an attempt of the job: the next one's windows are numbered anew and meet none of these."""
        self.closed_j2 += sum(edge.open_j2 for edge in self.edges.values())
        self.edges, self.newest = {}, 0

    @property
    def error_j(self) -> float:
        """Half-width, 95 %, of the random error."""
        open_j2 = sum(edge.open_j2 for edge in self.edges.values())
        return NORMAL_95 * math.sqrt(max(self.inside_j2 + self.closed_j2 + open_j2, 0.0))

    @property
    def _oldest(self) -> int:
        return self.newest - OPEN_WINDOWS

    def _touch(self, boundary: int, side: str, variance_j2: float, sign: int) -> None:
        if boundary < self._oldest:  # nobody remembers who met there
            self.closed_j2 += sign * variance_j2
            return
        edge = self.edges.setdefault(boundary, Edge())
        setattr(edge, side, variance_j2 if sign > 0 else None)
        if edge.is_bare:
            del self.edges[boundary]


class DeviceEnergies(Table):
    """`EnergySums` of many devices, side by side; windows are numbered alike for all of them."""

    NAMES = ("joules", "inside_j2", "gain_j", "estimated_j", "closed_j2")

    def __init__(self) -> None:
        super().__init__()
        self._edges: dict[int, Array] = {}  # by boundary: before and after of each device, nan where no window meets it
        self._newest = 0

    def add(self, window: int, stretches: Stretches, sign: int = 1) -> None:
        """Add a window, by its number; with a sign of -1 take it back."""
        rows = self.find(stretches.owners)
        joules, start_j2, end_j2, inside_j2, gain_j, estimated_j = stretches.values.T
        self._values[rows, :4] += sign * np.stack((joules, inside_j2, gain_j, estimated_j), axis=1)
        self._touch(window - 1, 1, rows, start_j2, sign)
        self._touch(window, 0, rows, end_j2, sign)
        self._newest = max(self._newest, window)
        for boundary in [one for one in self._edges if one < self._oldest]:
            self._end(self._edges.pop(boundary))

    def close(self) -> None:
        """End an attempt of the job: the next one's windows are numbered anew and meet none of these."""
        for edge in self._edges.values():
            self._end(edge)
        self._edges, self._newest = {}, 0

    def joules(self) -> dict[str, float]:
        """Return the energy of each device."""
        return self._by_key(self.column("joules"))

    def errors_j(self) -> dict[str, float]:
        """Return the half-width, 95 %, of the random error of each."""
        variance_j2 = self.column("inside_j2") + self.column("closed_j2")
        for edge in self._edges.values():
            variance_j2[: len(edge)] += _open_j2(edge)
        return self._by_key(NORMAL_95 * np.sqrt(np.maximum(variance_j2, 0.0)))

    def packed(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        edges = {str(boundary): edge.astype("<f8").tobytes() for boundary, edge in self._edges.items()}
        return {**super().packed(), "edges": edges, "newest": self._newest}

    @classmethod
    def unpacked(cls, stored: Mapping[str, Any]) -> DeviceEnergies:
        """Undo `packed`, after JSON has made text of bytes.

        Raises:
            ValueError: these are no such values.
        """
        table = cast("DeviceEnergies", super().unpacked(stored))
        try:
            table._edges = {int(key): array_of(text).reshape(-1, 2) for key, text in stored["edges"].items()}
            table._newest = int(stored["newest"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no table of energies: {error}") from error
        return table

    @property
    def _oldest(self) -> int:
        return self._newest - OPEN_WINDOWS

    def _by_key(self, values: Array) -> dict[str, float]:
        return dict(zip(cast("list[str]", list(self.keys)), values.tolist(), strict=True))

    def _end(self, edge: Array) -> None:
        self.column("closed_j2")[: len(edge)] += _open_j2(edge)

    def _touch(self, boundary: int, side: int, rows: Positions, variance_j2: Array, sign: int) -> None:
        if boundary < self._oldest:  # nobody remembers who met there
            self._values[rows, self.NAMES.index("closed_j2")] += sign * variance_j2
            return
        edge = self._edges.get(boundary)
        if edge is None or len(edge) < len(self):
            wider = np.full((len(self), 2), np.nan)
            if edge is not None:
                wider[: len(edge)] = edge
            edge = self._edges[boundary] = wider
        edge[rows, side] = variance_j2 if sign > 0 else np.nan
        if sign < 0 and np.isnan(edge).all():
            del self._edges[boundary]


def _open_j2(edge: Array) -> Array:
    """Return what a boundary adds to the error of each device's sum: nothing where two windows meet."""
    met = ~np.isnan(edge).any(axis=1)
    opened: Array = np.where(met, 0.0, np.nan_to_num(edge).sum(axis=1))
    return opened


def difference_error(one: Mapping[str, Stretch], other: Mapping[str, Stretch]) -> tuple[float, float]:
    """Return the random and the systematic error, half-widths of 95 %, of the difference of two energies.

    A sensor's gain is the same in both, and cancels as far as their energies are equal, only for the very
    same sensor; nothing is known of how the gains of two boards differ, so those add up.

    Args:
        one: an energy, by the UUIDs of the devices that drew it.
        other: the energy that it is compared with.
    """
    nothing = Stretch()
    random_j2 = sum(stretch.error_j**2 for stretch in (*one.values(), *other.values()))
    gain_j = sum(abs(one[key].gain_j - other[key].gain_j) for key in one.keys() & other.keys())
    gain_j += sum(one.get(key, nothing).gain_j + other.get(key, nothing).gain_j for key in one.keys() ^ other.keys())
    return math.sqrt(random_j2), gain_j
