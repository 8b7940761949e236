"""The power of a node's CPUs and of the whole node, read once per node.

A sensor is an `effllm.devices.Reader` with an ``interval_s`` between readings.  The device has the scope CPU or
NODE_PSU and measures only power; ``energy_note`` and ``sensor`` describe the source and the error.  A separate thread
opens and reads the sensors, because this may take seconds.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from effllm.devices import DeviceUnavailable
from effllm.records.rank import AVERAGE, COUNTER, CPU, INSTANT, Device, Sample

NO_HWMON = "energy: no hwmon sensor reports the power of the CPUs (ACPI power meters on Grace)"
AUTO, NONE, IPMI = "auto", "none", "ipmi"
ALLOWED = "auto, none, ipmi, or the URL of a Redfish service or one of its chassis ({host} becomes the node's name)"

#: Seconds between readings of the CPUs, and between readings of the power supplies.  The controller of the power
#: supplies is slow and shared.
CPU_INTERVAL_S, PSU_INTERVAL_S = 1.0, 10.0

_FIELDS = {COUNTER: "energy_j", INSTANT: "power_w", AVERAGE: "power_average_w"}


def node_device(host: str, scope: str, **fields: Any) -> Device:
    """Return the device of a sensor, with further fields of `Device`."""
    key = f"{'cpu' if scope == CPU else 'psu'}:{host}"
    return Device(key=key, power_scope=scope, is_gpu=False, only_power=True, **fields)


class NodeReader:
    """An open sensor of the node, an `effllm.devices.Reader`.

    Args:
        device: the sensor's device; its energy method selects the field of the reading.
        interval_s: time between readings, at least the sensor's own period.
        measure: returns one reading in W or J, or raises OSError or ValueError with the reason.
        close: releases the sensor; may be called twice.
    """

    def __init__(
        self,
        device: Device,
        interval_s: float,
        measure: Callable[[], float],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.interval_s = device, interval_s
        self._measure, self.close = measure, close

    def read(self) -> tuple[Sample, dict[str, str]]:
        values: dict[str, float] = {}
        failures: dict[str, str] = {}
        field = _FIELDS[self.device.energy_method or INSTANT]
        before_ns = time.monotonic_ns()
        try:
            values[field] = self._measure()
        except (OSError, ValueError) as error:
            failures[field] = f"{self.device.kind}: {error}"
        return replace(Sample((before_ns + time.monotonic_ns()) // 2), **values), failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return all values: these sensors have only energy and power."""
        sample, failures = self.read()
        return replace(sample, energy_only=True), failures


class Opener(NamedTuple):
    """A sensor before it is opened."""

    name: str  # "cpu" or "psu"
    interval_s: float
    open: Callable[[], NodeReader]  # raises DeviceUnavailable, whose text has the reason and the remedy


def openers(choice: str, host: str, credentials: Path | None = None) -> list[Opener]:
    """Return the sensors that this node may have, before they are opened.

    Args:
        choice: ``auto`` or ``ipmi``: the CPUs, and the whole node from its management controller, without use of
            the network; the URL of a Redfish service: the CPUs, and the whole node from this service; ``none``: no
            sensor.
        host: the node's name, a part of each device's key.
        credentials: file with the user and the password for the Redfish service.

    Raises:
        ValueError: the choice is invalid; a wrong URL is reported when the sensor is opened.
    """
    if choice == NONE:
        return []
    if choice not in (AUTO, IPMI) and not choice.startswith(("https://", "http://")):
        raise ValueError(f"{choice!r} is not usable: {ALLOWED}")

    def open_node() -> NodeReader:
        if choice in (AUTO, IPMI):
            return _open_sensor("ipmi", host)
        if reason := missing_package(choice):
            raise DeviceUnavailable(f"node power: {reason}")
        return _open_sensor("redfish", host, choice, credentials)

    return [
        Opener("cpu", CPU_INTERVAL_S, lambda: open_cpu(host)),
        Opener("psu", PSU_INTERVAL_S, open_node),
    ]


def missing_package(choice: str) -> str:
    """Return a sentence with the missing package and the command that installs it; empty if none is missing."""
    if choice.startswith(("https://", "http://")):
        try:
            importlib.import_module("urllib3")
        except ImportError:
            return "Redfish needs urllib3, which is not installed: pip install 'effllm[redfish]'"
    return ""


def open_cpu(host: str) -> NodeReader:
    """Open the CPUs by RAPL, else by hwmon.

    Raises:
        DeviceUnavailable: RAPL and hwmon both fail; the reason is hwmon's if hwmon has a sensor, else RAPL's.
    """
    try:
        return _open_sensor("rapl", host)
    except DeviceUnavailable as by_rapl:
        try:
            return _open_sensor("hwmon", host)
        except DeviceUnavailable as by_hwmon:
            raise (by_rapl if str(by_hwmon) == NO_HWMON else by_hwmon) from None


def _open_sensor(name: str, *arguments: object) -> NodeReader:
    # The module is imported on demand, because TLS takes as much memory as a small process.
    sensor: NodeReader = importlib.import_module(f"{__name__}.{name}").open_reader(*arguments)
    return sensor
