"""Folders like /sys/class/powercap; tests change their energy counters."""

from pathlib import Path

INTEL_RANGE_UJ = 262_143_328_850
INTEL_DRAM_RANGE_UJ = 65_712_999_613
AMD_RANGE_UJ = 65_532_610_987

#: Two sockets of a Xeon with DRAM, and zones that must not be added, because the sockets contain their energy.
INTEL = {
    "intel-rapl:0": ("package-0", INTEL_RANGE_UJ),
    "intel-rapl:0:0": ("core", INTEL_RANGE_UJ),
    "intel-rapl:0:1": ("dram", INTEL_DRAM_RANGE_UJ),
    "intel-rapl:1": ("package-1", INTEL_RANGE_UJ),
    "intel-rapl:1:0": ("dram", INTEL_DRAM_RANGE_UJ),
    "intel-rapl:2": ("psys", INTEL_RANGE_UJ),
    "intel-rapl-mmio:0": ("package-0", INTEL_RANGE_UJ),
}

#: An EPYC socket: its zones have the same names as Intel zones; it has no DRAM zone.
AMD = {"intel-rapl:0": ("package-0", AMD_RANGE_UJ), "intel-rapl:0:0": ("core", AMD_RANGE_UJ)}

#: Two sockets with two dies each; each die has a zone with the counter of its whole socket.
AMD_DIES = {
    "intel-rapl:0": ("package-0-die-0", AMD_RANGE_UJ),
    "intel-rapl:1": ("package-0-die-1", AMD_RANGE_UJ),
    "intel-rapl:2": ("package-1-die-2", AMD_RANGE_UJ),
    "intel-rapl:3": ("package-1-die-3", AMD_RANGE_UJ),
}


class Powercap:
    """A powercap tree below ``root``; every counter starts at 1,000 J."""

    def __init__(self, root, zones=INTEL):
        self.root = root
        self.ranges_uj = {zone: range_uj for zone, (_, range_uj) in zones.items()}
        for zone, (name, range_uj) in zones.items():
            (root / zone).mkdir(parents=True)
            (root / zone / "name").write_text(name + "\n")
            (root / zone / "max_energy_range_uj").write_text(f"{range_uj}\n")
            self.set_j(zone, 1000)
        (root / "intel-rapl").mkdir()  # a control type, not a zone

    def set_j(self, zone, joules):
        (self.root / zone / "energy_uj").write_text(f"{round(joules * 1e6)}\n")

    def add_j(self, zone, joules):
        """Increase a counter; at the end of its range the counter continues at zero, as in hardware."""
        file = self.root / zone / "energy_uj"
        file.write_text(f"{(int(file.read_text()) + round(joules * 1e6)) % self.ranges_uj[zone]}\n")

    def break_zone(self, zone):
        (self.root / zone / "energy_uj").write_text("")


def forbid_reading(monkeypatch, name):
    """Let all files of this name be unreadable; file modes have no effect if the tests run as root."""
    read_text = Path.read_text

    def as_an_ordinary_user(path, *args, **kwargs):
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", as_an_ordinary_user)
