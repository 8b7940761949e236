"""The energy of windows and of runs, with what may be wrong with it: each joule counted once; pure.

Random errors of windows that follow each other share an edge: what one gains there the other loses.
So a sum of windows remembers the variance at its open ends, and forgets it where two windows meet.
The gain of sensors is common to all windows of a board and may be common to all boards of a model, so
it adds up linearly and never averages out (arXiv 2312.02741, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

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


class WindowEnergy(Struct, frozen=True):
    """The energy of one window of the cluster."""

    coverage: float | None  # measured device-seconds over expected ones; None where nothing can measure
    wall: Stretch
    iterations: Stretch
    phases_j: dict[str, float]
    by_device: dict[str, Stretch]  # by whose energy it is
    gpus_coverage: float | None = None  # of the GPUs, whatever the scope
    gpus_wall_j: float = 0.0
    gpus_iterations_j: float = 0.0

    @property
    def wall_j(self) -> float:
        """Joules over the whole wall time; a sum only where the coverage suffices."""
        return self.wall.joules

    @property
    def iterations_j(self) -> float:
        """Joules in iterations; a sum only where the coverage suffices."""
        return self.iterations.joules

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


def times_longer(stretch: Stretch, share: float = MOST_RANDOM_ERROR) -> float:
    """Return how many times as long a stretch must be for its random error to be a share of its energy.

    What its edges leave open stays as it is, what lies inside grows with the length and its energy does, too.
    """
    inside = NORMAL_95**2 * stretch.inside_j2
    edges = NORMAL_95**2 * (stretch.start_j2 + stretch.end_j2)
    allowed = (share * stretch.joules) ** 2
    if allowed <= 0:
        return math.inf
    # allowed x^2 = inside x + edges
    return (inside + math.sqrt(inside**2 + 4 * allowed * edges)) / (2 * allowed)


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
