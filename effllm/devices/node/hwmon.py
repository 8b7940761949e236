"""Power of the CPUs of NVIDIA's Grace through hwmon.

Grace has power readings but no energy counter.  Its firmware describes ACPI power meters; their names are in
``power1_oem_info`` (Documentation/hwmon/acpi_power_meter.rst, and NVIDIA's Grace Performance Tuning Guide):

- ``Module Power Socket 0``: the whole module with Grace, GPU, HBM and regulators; this meter is not read.
- ``Grace Power Socket 0``: the whole CPU side of the socket; this meter is read.
- ``CPU Power Socket 0``, ``SysIO Power Socket 0``: rails that the Grace meter includes; they are not read.

If there is a Module meter, the GPU is in the same module, and NVML's counter may measure the whole module with this
CPU.  In this case the CPU's device has the energy key ``module-cpu:<host>``, and sums over devices exclude the CPU
on hosts whose GPUs have the scope MODULE.

This file is not tested on real hardware.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from effllm.devices import DeviceUnavailable
from effllm.devices.node import CPU_INTERVAL_S, NO_HWMON, NodeReader, node_device
from effllm.records.rank import AVERAGE, CPU, Sensor

HWMON = Path("/sys/class/hwmon")

# If an ACPI meter has no value (0xFFFFFFFF mW), the kernel returns 4.3 MW.
_MAX_W = 10_000.0

# Grace's successor calls its meters "Total Power Socket 0" and so on.
_METER = re.compile(r"(?:(?P<module>module)|grace|total(?: input)?) power(?: in uw)? socket (?P<socket>\d+)")

_ERROR = "the gain error of an uncalibrated board is assumed, because no accuracy is published"


class Meter(NamedTuple):
    """One power sensor, with its label and its averaging interval."""

    path: Path
    label: str
    average_s: float | None = None

    def watts(self) -> float:
        """Return the power.

        Raises:
            OSError, ValueError: the power cannot be read, or is impossible for a running CPU.
        """
        watts = int(self.path.read_text()) / 1e6
        if not 0.0 < watts < _MAX_W:
            raise ValueError(f"{self.label} shows {watts:g} W")
        return watts


def grace_meters(root: Path) -> tuple[list[Meter], bool]:
    """Return the meter of each socket, and whether there is also a meter of a module."""
    meters: dict[tuple[bool, int], Meter] = {}  # whether it is a module's, number of the socket -> meter
    for path in sorted([*root.glob("hwmon*/device/power*_average"), *root.glob("hwmon*/power*_average")]):
        label = _read_attribute(path, "oem_info") or _read_attribute(path, "label")
        if (match := _METER.fullmatch(label.lower())) is not None:
            interval_ms = _read_attribute(path, "average_interval")
            average_s = int(interval_ms) / 1e3 if interval_ms.isdecimal() else None
            meters.setdefault((match["module"] is not None, int(match["socket"])), Meter(path, label, average_s))
    sockets = [meter for (is_module, _), meter in meters.items() if not is_module]
    return sockets, len(sockets) < len(meters)


def _read_attribute(path: Path, suffix: str) -> str:
    try:
        return path.with_name(path.name.removesuffix("average") + suffix).read_text().strip()
    except OSError:
        return ""


def open_reader(host: str, root: Path = HWMON) -> NodeReader:
    """Open the CPUs of a node.

    Raises:
        DeviceUnavailable: no sensor reports the power of the CPUs, or the sensor cannot be read.
    """
    try:
        meters, has_module_meter = grace_meters(root)
    except (OSError, ValueError) as error:
        raise DeviceUnavailable(f"energy: hwmon cannot be read: {error}") from error
    if not meters:
        raise DeviceUnavailable(NO_HWMON)
    reader = _make_reader(host, meters, has_module_meter)
    _, failures = reader.read()
    if failures:
        raise DeviceUnavailable(f"energy: {next(iter(failures.values()))}")
    return reader


def _make_reader(host: str, meters: Sequence[Meter], has_module_meter: bool) -> NodeReader:
    intervals_s = {meter.average_s for meter in meters}
    average_s = max((interval_s for interval_s in intervals_s if interval_s is not None), default=1.0)
    how = "the averaging interval is assumed" if None in intervals_s else f"the meter averages over {average_s:g} s"
    device = node_device(
        host,
        CPU,
        kind="hwmon",
        name="NVIDIA Grace",
        energy_method=AVERAGE,
        energy_note=f"{', '.join(meter.label for meter in meters)}: the whole CPU side of the socket",
        sensor=Sensor(tick_s=average_s, average_s=average_s, is_held=True, source=f"{how}; {_ERROR}"),
        driver="acpi_power_meter",
        energy_key=f"module-cpu:{host}" if has_module_meter else "",
    )
    interval_s = max(CPU_INTERVAL_S, average_s)
    return NodeReader(device, interval_s, lambda: sum(meter.watts() for meter in meters))
