"""RAPL, the energy counters of Intel's and AMD's CPUs, read through powercap.

Energy is never estimated from a TDP.  This file is not tested on real hardware; the tests use recorded trees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from effllm.devices import DeviceUnavailable
from effllm.devices.node import CPU_INTERVAL_S, NodeReader, node_device
from effllm.records.rank import COUNTER, CPU, Sensor

POWERCAP = Path("/sys/class/powercap")

# Upper limit of the power of a CPU package.  If a counter rose faster, it was reset.  If the time between two reads is
# longer than the counter's range divided by this power, the counter may have wrapped twice.
_PACKAGE_MAX_W = 1000.0

# The total's first value, and its decrease after a period of unknown energy.  The decrease is larger than the energy
# until the next reading, so the total's difference over that period is negative, and is not counted as energy.
_START_J, _BACK_J = 1e9, 1e6

# Dies that mirror one counter are equal in each comparison; counters of two sockets differ in the first comparison.
_COMPARISONS, _PAUSE_S, _MIN_MOVES = 8, 0.01, 3

SENSOR = Sensor(
    tick_s=0.001,
    gain_error=0.10,
    source="the error is assumed, because neither Intel nor AMD states an error; Intel's CPUs measure their power "
    "since Haswell (doi 10.1109/IPDPSW.2015.70), and the error of DRAM is constant (doi 10.1145/2989081.2989088); "
    "AMD's Zen 2 computes its power with a model (arXiv 2108.00808)",
)

NO_RAPL = (
    "energy: this machine exposes no RAPL power sensor; virtual machines have no such sensor, and containers hide "
    "/sys/devices/virtual/powercap unless it is mounted into them"
)
RAPL_UNREADABLE = (
    "energy: only root may read the RAPL counters; let root make /sys/class/powercap/intel-rapl:*/energy_uj readable "
    "at boot (tmpfiles.d, sysfs.conf or a udev rule), or give Python CAP_DAC_READ_SEARCH, or run as root; see "
    "docs/node-power.md"
)


class Counter(NamedTuple):
    """One energy counter that wraps."""

    is_package: bool  # False for DRAM
    range_uj: int  # energy until the counter wraps
    path: Path

    def microjoules(self) -> int:
        """Return the count.

        Raises:
            OSError, ValueError: the counter cannot be read.
        """
        return int(self.path.read_text())


def powercap_counters(root: Path) -> list[Counter]:
    """Return the counters of the packages and of their DRAM.

    The zones psys and cores are left out: psys contains the packages, and cores is a part of a package.
    """
    counters = []
    for path in sorted(root.glob("intel-rapl:*")):  # AMD has the same names; intel-rapl-mmio repeats a package
        try:
            name = (path / "name").read_text().strip()
        except FileNotFoundError:  # a container that masks the zones shows only their folders
            continue
        if name.startswith("package") or name == "dram":
            range_uj = int((path / "max_energy_range_uj").read_text())
            counters.append(Counter(name != "dram", range_uj, path / "energy_uj"))
    return counters


class Rapl:
    """The sum of the energy counters of all CPU packages and their DRAM, without wraps and jumps."""

    def __init__(self, counters: Sequence[Counter], clock: Callable[[], float], note: str = "") -> None:
        self.note = note
        self._counters = counters
        self._clock = clock
        self._last_uj = [counter.microjoules() for counter in counters]
        self._last_s = clock()
        self._start_j = self._total_j = _START_J  # the total after the last unknown energy, and now
        self._smallest_range_j = min(counter.range_uj for counter in counters) / 1e6

    def energy_j(self) -> float:
        """Return the total energy; only differences of totals have a meaning.

        A failed read does not change the total; the next read includes the missing energy.  After a period of
        unknown energy the total is lower than before.

        Raises:
            OSError, ValueError: a counter cannot be read, or its count since the last read is unknown.
        """
        now_uj, now_s = [counter.microjoules() for counter in self._counters], self._clock()
        # A counter that decreased has wrapped around; the difference modulo the range is right.
        spent_j = [
            (now - last) % counter.range_uj / 1e6
            for counter, now, last in zip(self._counters, now_uj, self._last_uj, strict=True)
        ]
        limit_j = _PACKAGE_MAX_W * (now_s - self._last_s + 1.0)
        self._last_uj, self._last_s = now_uj, now_s
        if limit_j > self._smallest_range_j:
            self._lower_total()
            raise ValueError("the counters were not read for so long that they may have wrapped more than once")
        if max(spent_j) > limit_j:
            self._lower_total()
            raise ValueError("a counter was reset")
        self._total_j += sum(spent_j)
        return self._total_j

    def _lower_total(self) -> None:
        self._start_j = self._total_j = max(self._start_j - _BACK_J, 0.0)


def mirrored_packages(counters: Sequence[Counter], pause: Callable[[float], None]) -> set[int]:
    """Return the indices of the packages that repeat the counter of an earlier package.

    Linux lists one package per die.  On some AMD processors every die has the counter of the whole socket: the sum
    over the dies would be two or twelve times the energy (CodeCarbon issues 1274 and 1379; kernel commits 26096aed255f
    and 8d72eba1cf8c).
    """
    packages = [index for index, counter in enumerate(counters) if counter.is_package]
    values: dict[tuple[int, int], set[int]] = {  # package, and a later one that may mirror it -> values of the later
        (package, later): set()
        for package, later in combinations(packages, 2)
        if counters[package].range_uj == counters[later].range_uj
    }
    for _ in range(_COMPARISONS):
        if not values:
            break
        pause(_PAUSE_S)
        first, second = ([counter.microjoules() for counter in counters] for _ in range(2))
        for package, later in list(values):
            range_uj = counters[package].range_uj
            # `later` is read between two reads of `package`: a mirror has a value from the first to the second.
            if (first[later] - first[package]) % range_uj <= (second[package] - first[package]) % range_uj:
                values[package, later].add(first[later])
            else:
                del values[package, later]
    # Counters that did not move are equal by chance.
    return {later for (_, later), values_of_later in values.items() if len(values_of_later) > _MIN_MOVES}


def open_rapl(
    clock: Callable[[], float] = time.monotonic,
    powercap: Path = POWERCAP,
    pause: Callable[[float], None] = time.sleep,
) -> Rapl:
    """Open the counters of all packages and their DRAM.

    Raises:
        DeviceUnavailable: the counters do not exist, or are not readable.
    """
    try:
        counters = powercap_counters(powercap)
        mirrored = mirrored_packages(counters, pause)
        kept = [counter for index, counter in enumerate(counters) if index not in mirrored]
        if kept:
            return Rapl(kept, clock, _note(kept, len(mirrored)))
    except PermissionError as error:  # readable only for root since Linux 5.10, because of CVE-2020-8694
        raise DeviceUnavailable(RAPL_UNREADABLE) from error
    except (OSError, ValueError) as error:
        raise DeviceUnavailable(f"energy: the RAPL counters cannot be read through powercap: {error}") from error
    raise DeviceUnavailable(NO_RAPL)


def _note(counters: Sequence[Counter], num_mirrored: int) -> str:
    num_packages = sum(counter.is_package for counter in counters)
    packages = f"{num_packages} CPU package{'s' if num_packages > 1 else ''}"
    dram = "with DRAM" if num_packages < len(counters) else "without DRAM, which has no counter"
    note = f"RAPL through powercap: {packages} {dram}"
    if num_mirrored:
        note += f"; {num_mirrored} more packages repeat these counters and are not counted again"
    return note


def open_reader(host: str, rapl: Rapl | None = None) -> NodeReader:
    """Open the CPUs of a node, with their DRAM if it has counters.

    Raises:
        DeviceUnavailable: the counters do not exist, or are not readable.
    """
    if rapl is None:
        rapl = open_rapl()
    device = node_device(
        host, CPU, kind="rapl", name="CPU", energy_method=COUNTER, energy_note=rapl.note, sensor=SENSOR
    )
    return NodeReader(device, CPU_INTERVAL_S, rapl.energy_j)
