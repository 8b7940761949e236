"""RAPL's counters one by one, as powercap's tree and perf's power PMU show them."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from effllm.node_power.perf_event import PerfEvent

POWERCAP = Path("/sys/class/powercap")
PERF = Path("/sys/bus/event_source/devices/power")

#: Opens a counter by the PMU's number, what to count, and the CPU.
OpenEvent = Callable[[int, int, int], PerfEvent]


class Counter(Protocol):
    """One energy counter that wraps."""

    is_package: bool  # else DRAM
    range: int  # after so many counts it starts again
    per_joule: float

    def read(self) -> int:
        """Return the count; raises OSError or ValueError where it cannot be read."""

    def close(self) -> None:
        """Give back what is held; may be called twice."""


class Zone:
    """A counter in powercap's tree."""

    per_joule = 1e6

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.is_package = name.startswith("package")
        self.range = int((path / "max_energy_range_uj").read_text())

    def read(self) -> int:
        """Return the microjoules."""
        return int((self.path / "energy_uj").read_text())

    def close(self) -> None:
        """Nothing is held."""


class RaplEvent:
    """A counter of perf's power PMU, which the kernel keeps from wrapping."""

    range = 2**64

    def __init__(self, event: PerfEvent, is_package: bool, per_joule: float) -> None:
        self._event = event
        self.is_package = is_package
        self.per_joule = per_joule

    def read(self) -> int:
        """Return the count since it was opened."""
        return self._event.read()

    def close(self) -> None:
        """Close it."""
        self._event.close()


def powercap_zones(root: Path) -> list[Zone]:
    """Return the packages and their DRAM; not psys, which contains them, nor cores, which they contain."""
    zones = []
    for path in sorted(root.glob("intel-rapl:*")):  # the same names on AMD; intel-rapl-mmio shows a package twice
        try:
            name = (path / "name").read_text().strip()
        except FileNotFoundError:  # a container that masks the zones shows where they would be
            continue
        if name.startswith("package") or name == "dram":
            zones.append(Zone(path, name))
    return zones


def perf_events(root: Path, open_event: OpenEvent = PerfEvent) -> list[RaplEvent]:
    """Return the packages and their DRAM as counters of the power PMU, none where there is no such PMU.

    Raises:
        OSError, ValueError: it may not be used, or is not as its documentation says.
    """
    if not (root / "type").exists():
        return []
    kind, cpus = int((root / "type").read_text()), _cpus((root / "cpumask").read_text())
    events: list[RaplEvent] = []
    with ExitStack() as opened:
        for name in ("energy-pkg", "energy-ram"):  # neither -psys nor -cores nor -gpu
            if (root / "events" / name).exists():
                config, per_joule = _event(root / "events", name)
                for cpu in cpus:
                    event = open_event(kind, config, cpu)
                    opened.callback(event.close)
                    events.append(RaplEvent(event, name == "energy-pkg", per_joule))
        opened.pop_all()
    return events


def _event(folder: Path, name: str) -> tuple[int, float]:
    """Return what to ask the kernel for, and how many counts are a joule."""
    asked = re.fullmatch(r"event=(0x[0-9a-f]+)", (folder / name).read_text().strip())
    unit = (folder / f"{name}.unit").read_text().strip()
    scale = float((folder / f"{name}.scale").read_text())
    if asked is None or unit != "Joules" or not 0.0 < scale <= 1.0:
        raise ValueError(f"perf's {name} is not as expected: unit {unit!r}, scale {scale!r}")
    return int(asked[1], 16), 1.0 / scale


def _cpus(mask: str) -> list[int]:
    """Return the CPUs of a list as ``0,28`` or ``0-1``: the kernel names one per package, or per die."""
    cpus: list[int] = []
    for part in mask.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
