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

from effllm.schema import Device, Integrals

#: Half-width of a 95 % interval over the standard deviation of a normal distribution.
NORMAL_95 = 1.96
#: Windows that a late report can still change; the edges of older ones are final.
OPEN_WINDOWS = 10


class Stretch(Struct, frozen=True):
    """Energy of one window on one time base, over the devices that count."""

    joules: float = 0.0
    gpus_j: float = 0.0  # the part of it that GPUs drew
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
    by_device: dict[str, Stretch]

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
        gpus_j=joules if device.is_gpu else 0.0,
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


class EnergySums(Struct):
    """Energy over many windows."""

    joules: float = 0.0
    gpus_j: float = 0.0
    inside_j2: float = 0.0
    gain_j: float = 0.0
    estimated_j: float = 0.0
    closed_j2: float = 0.0  # of open ends that no window can meet any more
    edges: dict[int, tuple[int, float]] = {}  # boundary -> (+1 it ends here, -1 it starts here; variance)
    newest: int = 0

    def add(self, window: int, stretch: Stretch, sign: int = 1) -> None:
        """Add a window, by its number; with a sign of -1 take it back."""
        self.joules += sign * stretch.joules
        self.gpus_j += sign * stretch.gpus_j
        self.inside_j2 += sign * stretch.inside_j2
        self.gain_j += sign * stretch.gain_j
        self.estimated_j += sign * stretch.estimated_j
        self._meet(window - 1, -sign, stretch.start_j2)
        self._meet(window, sign, stretch.end_j2)
        self.newest = max(self.newest, window)
        for boundary in [one for one in self.edges if one < self.newest - OPEN_WINDOWS]:
            self.closed_j2 += self.edges.pop(boundary)[1]

    def close(self) -> None:
        """End an attempt of the job: the next one's windows are numbered anew and meet none of these."""
        self.closed_j2 += sum(variance for _, variance in self.edges.values())
        self.edges, self.newest = {}, 0

    @property
    def error_j(self) -> float:
        """Half-width, 95 %, of the random error."""
        open_j2 = sum(variance for _, variance in self.edges.values())
        return NORMAL_95 * math.sqrt(max(self.inside_j2 + self.closed_j2 + open_j2, 0.0))

    def _meet(self, boundary: int, side: int, variance: float) -> None:
        before, known = self.edges.pop(boundary, (0, 0.0))
        if before + side:
            self.edges[boundary] = (before + side, max(variance, known))
