"""The single RAPL counters, from powercap's tree or from perf's power PMU."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES_BYTES = 64  # PERF_ATTR_SIZE_VER0: type, size, config
_EVERY_PROCESS, _NO_GROUP, _CLOSE_ON_EXEC = -1, -1, 8

POWERCAP = Path("/sys/class/powercap")
PERF = Path("/sys/bus/event_source/devices/power")


class PerfEvent:
    """An open counter of perf for one CPU, over all processes; it starts at zero and does not wrap."""

    def __init__(self, kind: int, config: int, cpu: int) -> None:
        self._descriptor = _open(kind, config, cpu)

    def read(self) -> int:
        """Return the count.

        Raises:
            OSError: the counter cannot be read, or is closed.
        """
        count: int = struct.unpack("=Q", os.read(self._descriptor, 8))[0]
        return count

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


#: Opens a counter; the arguments are the PMU's number, the event's configuration, and the CPU.
OpenEvent = Callable[[int, int, int], PerfEvent]


def _open(kind: int, config: int, cpu: int) -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(f"the number of the system call perf_event_open is unknown on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    attributes = ctypes.create_string_buffer(struct.pack("=IIQ", kind, _ATTRIBUTES_BYTES, config), _ATTRIBUTES_BYTES)
    descriptor: int = libc.syscall(
        ctypes.c_long(number),
        attributes,
        ctypes.c_int(_EVERY_PROCESS),
        ctypes.c_int(cpu),
        ctypes.c_int(_NO_GROUP),
        ctypes.c_ulong(_CLOSE_ON_EXEC),
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), "perf_event_open")
    return descriptor


class Counter(NamedTuple):
    """One energy counter that wraps."""

    is_package: bool  # False for DRAM
    range: int  # number of counts until the counter wraps
    per_joule: float
    read: Callable[[], int]  # raises OSError or ValueError
    close: Callable[[], None] = lambda: None  # may be called twice


def powercap_zones(root: Path) -> list[Counter]:
    """Return the packages and their DRAM.

    The zones psys and cores are left out: psys contains the packages, and cores is a part of a package.
    """
    zones = []
    for path in sorted(root.glob("intel-rapl:*")):  # AMD has the same names; intel-rapl-mmio repeats a package
        try:
            name = (path / "name").read_text().strip()
        except FileNotFoundError:  # a container that masks the zones shows only their folders
            continue
        if name.startswith("package") or name == "dram":
            size = int((path / "max_energy_range_uj").read_text())
            zones.append(Counter(name != "dram", size, 1e6, partial(_read_count, path / "energy_uj")))
    return zones


def _read_count(path: Path) -> int:
    return int(path.read_text())


def perf_events(root: Path, open_event: OpenEvent = PerfEvent) -> list[Counter]:
    """Return the packages and their DRAM as counters of the power PMU; an empty list if there is no power PMU.

    Raises:
        OSError, ValueError: this user may not use the PMU, or its files are not as documented.
    """
    if not (root / "type").exists():
        return []
    kind, cpus = int((root / "type").read_text()), _cpus((root / "cpumask").read_text())
    events = []
    with ExitStack() as opened:
        for name in ("energy-pkg", "energy-ram"):  # energy-psys, energy-cores and energy-gpu are left out
            if (root / "events" / name).exists():
                config, per_joule = _event(root / "events", name)
                for cpu in cpus:
                    event = open_event(kind, config, cpu)
                    opened.callback(event.close)
                    # The kernel extends these counters, so that they do not wrap.
                    events.append(Counter(name == "energy-pkg", 2**64, per_joule, event.read, event.close))
        opened.pop_all()
    return events


def _event(folder: Path, name: str) -> tuple[int, float]:
    """Return an event's configuration, and its counts per joule."""
    asked = re.fullmatch(r"event=(0x[0-9a-f]+)", (folder / name).read_text().strip())
    unit = (folder / f"{name}.unit").read_text().strip()
    scale = float((folder / f"{name}.scale").read_text())
    if asked is None or unit != "Joules" or not 0.0 < scale <= 1.0:
        raise ValueError(f"perf's {name} is not as expected: unit {unit!r}, scale {scale!r}")
    return int(asked[1], 16), 1.0 / scale


def _cpus(mask: str) -> list[int]:
    """Return the CPUs in a list such as ``0,28`` or ``0-1``: the kernel lists one CPU per package or die."""
    cpus: list[int] = []
    for part in mask.strip().split(","):
        first, _, last = part.partition("-")
        cpus += range(int(first), int(last or first) + 1)
    return cpus
