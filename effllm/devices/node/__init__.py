"""The power of a node's CPUs and of the whole node, read once per node.

A sensor is an `effllm.devices.Reader` with an ``interval_s`` between readings.  The device has the scope CPU or
NODE_PSU and measures only power; ``energy_note`` and ``sensor`` describe the source and the error.  A separate thread
opens and reads the sensors, because this may take seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from effllm.devices import DeviceUnavailable
from effllm.devices.node import hwmon, rapl
from effllm.devices.node.reader import CPU_INTERVAL_S, PSU_INTERVAL_S, NodeReader

AUTO, NONE, IPMI = "auto", "none", "ipmi"
ALLOWED = "auto, none, ipmi, or the URL of a Redfish service or one of its chassis ({host} becomes the node's name)"


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
            return _open("ipmi", host)
        if reason := missing(choice):
            raise DeviceUnavailable(f"node power: {reason}")
        return _open("redfish", host, choice, credentials)

    return [
        Opener("cpu", CPU_INTERVAL_S, lambda: open_cpu(host)),
        Opener("psu", PSU_INTERVAL_S, open_node),
    ]


def missing(choice: str) -> str:
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
        return rapl.open_reader(host)
    except DeviceUnavailable as by_rapl:
        try:
            return hwmon.open_reader(host)
        except DeviceUnavailable as by_hwmon:
            raise (by_rapl if str(by_hwmon) == hwmon.NO_HWMON else by_hwmon) from None


def _open(name: str, *arguments: object) -> NodeReader:
    # The module is imported on demand, because TLS takes as much memory as a small process.
    sensor: NodeReader = importlib.import_module(f"{__name__}.{name}").open_reader(*arguments)
    return sensor
