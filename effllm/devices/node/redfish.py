"""The power of a node from its management controller's Redfish service, over HTTPS.

The power of a node is the sum of the inputs of its power supplies.  If the service does not report inputs, the power
of the chassis is used; the vendor chooses which parts it includes.  If a supply is present but has no reading, the
whole reading fails, because a sum without this supply would be wrong.  This file is not tested on real hardware.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from effllm.devices import DeviceUnavailable
from effllm.devices.node.credentials import Credentials
from effllm.devices.node.https import LIMIT_S, Address, Service, is_own
from effllm.devices.node.reader import PSU_INTERVAL_S, Measured, NodeReader, node_device
from effllm.devices.node.redfish_records import (
    Chassis,
    Collection,
    Environment,
    OldPower,
    Root,
    SensorResource,
    Subsystem,
    Supply,
)
from effllm.devices.node.redfish_sources import (
    ChassisPower,
    ControlPower,
    Get,
    OldSupplyInputs,
    Source,
    SupplyInputs,
    SupplyPath,
    is_off,
    optional,
)
from effllm.records.rank import COUNTER, INSTANT, NODE_PSU, Sensor

#: Timeout of all requests of one reading.
READ_LIMIT_S = 10.0
#: Timeout of the search through all chassis, which runs once.
SEARCH_LIMIT_S = 120.0
MAX_CHASSIS = 128
MAX_SUPPLIES = 64

ROOT = "/redfish/v1/"
_TICK_S = 5.0  # period of the sensor, assumed if the service does not state the period


# --- the search ---


class Found(NamedTuple):
    """A chassis and its path."""

    path: str
    chassis: Chassis


def find_source(get: Get, path: str) -> tuple[Source, str]:
    """Return the best source of the node's power, and the name of the machine.

    Raises:
        OSError, ValueError: the service has no source, or more than one source.
    """
    found = [Found(one, get(one, Chassis)) for one in _chassis_paths(get, path)]
    top = [one for one in found if one.chassis.links is None or one.chassis.links.contained_by is None] or found
    name = " ".join(part for part in (top[0].chassis.manufacturer, top[0].chassis.model) if part)
    why_not: list[str] = []
    for search in (_supplies, _old_supplies):
        try:
            source = search(get, found)
        except ValueError as error:
            why_not.append(str(error))
            continue
        if source is not None:
            source.note += _shared_by(found)
            return source, name
    sources = [source for one in top for source in _of_chassis(get, one)]
    if len(sources) == 1:
        sources[0].note += "".join(f"; {reason}" for reason in why_not)
        return sources[0], name
    if not sources:
        raise ValueError("; ".join(["the service shows no power of a whole chassis", *why_not]))
    raise ValueError(
        f"the service shows the power of {len(sources)} chassis: name one chassis in the URL, such as {top[0].path}"
    )


def _chassis_paths(get: Get, path: str) -> list[str]:
    """Return the path of the chassis in the URL, or the paths of all chassis of the service."""
    if re.fullmatch(r"/redfish/v1/Chassis/[^/]+", path):
        return [path]
    if path not in ("", "/redfish", "/redfish/v1", "/redfish/v1/Chassis"):
        raise ValueError(f"{path} is neither the root of a Redfish service nor a chassis")
    root = get(ROOT, Root)
    if root.chassis is None:
        raise ValueError("the service has no chassis")
    return [link.path for link in get(root.chassis.path, Collection).members[:MAX_CHASSIS]]


def _supplies(get: Get, found: Iterable[Found]) -> Source | None:
    supplies: dict[str, SupplyPath] = {}
    homes: dict[str, str] = {}
    for one in found:
        for path in _supply_paths(get, one.chassis):
            supply = get(path, Supply)
            if supply.serial and homes.setdefault(supply.serial, one.path) != one.path and path not in supplies:
                raise ValueError(f"power supply {supply.serial} is in two chassis: name one chassis in the URL")
            if supply.metrics is not None:
                supplies[path] = SupplyPath(supply.id, path, supply.metrics.path)
            elif not is_off(supply.status, has_no_line=False):
                raise ValueError(f"power supply {supply.id} has no measurements")
    if not supplies:
        return None
    source = SupplyInputs(list(supplies.values()))
    source.read(get)
    return source


def _supply_paths(get: Get, chassis: Chassis) -> list[str]:
    """Return the paths of a chassis' supplies, and of its empty slots, because a supply may be inserted later."""
    subsystem = optional(get, chassis.subsystem.path, Subsystem) if chassis.subsystem is not None else None
    if subsystem is None or subsystem.supplies is None:
        return []
    return [link.path for link in get(subsystem.supplies.path, Collection).members[:MAX_SUPPLIES]]


def _old_supplies(get: Get, found: Iterable[Found]) -> Source | None:
    num_supplies: dict[str, int] = {}
    for one in found:
        power = optional(get, one.chassis.power.path, OldPower) if one.chassis.power is not None else None
        if one.chassis.power is not None and power is not None:
            num_supplies[one.chassis.power.path] = sum(supply.watts is not None for supply in power.supplies)
    paths = [path for path, number in num_supplies.items() if number]
    if not paths:
        return None
    source = OldSupplyInputs(paths, sum(num_supplies.values()))
    source.read(get)
    return source


def _of_chassis(get: Get, one: Found) -> list[Source]:
    """Return the source of a chassis' power, from the newer or else the older resource; empty if both are missing."""
    if one.chassis.environment is not None:
        environment = optional(get, one.chassis.environment.path, Environment)
        if environment is not None and environment.watts is not None and environment.watts.value is not None:
            return [ChassisPower(one.chassis.environment.path, one.chassis.id)]
    if one.chassis.power is not None:
        power = optional(get, one.chassis.power.path, OldPower)
        if power is not None and any(control.watts is not None for control in power.controls):
            return [ControlPower(one.chassis.power.path, one.chassis.id, power.controls)]
    return []


def _shared_by(found: Iterable[Found]) -> str:
    num_systems = max((len(one.chassis.links.systems) for one in found if one.chassis.links is not None), default=1)
    return f"; the supplies feed {num_systems} computer systems, as stated by the service" if num_systems > 1 else ""


# --- the sensor ---


def describe(get: Get, source: Source, sensors: Iterable[str | None]) -> tuple[float, float, str]:
    """Return the longest period and the largest relative error of a source's sensors, and the origin of both values."""
    intervals_s: list[float | None] = []
    errors: list[float | None] = []
    for path in sensors:
        sensor = SensorResource()
        with contextlib.suppress(OSError, ValueError):  # many services link to sensors that do not exist
            sensor = get(path, SensorResource) if path else sensor
        intervals_s.append(_seconds(sensor.interval))
        errors.append(_relative_error(sensor))
    tick_s, error = _worst(intervals_s), _worst(errors)
    stated = [word for word, value in (("period", tick_s), ("error", error)) if value is not None]
    by_service = f"stated by the service: {' and '.join(stated)}" if stated else ""
    assumed = [source.error_source] if error is None else []
    assumed += [f"a period of {_TICK_S:g} s is assumed"] if tick_s is None else []
    gain_error = error if error is not None else source.gain_error
    return tick_s or _TICK_S, gain_error, "; ".join(part for part in (by_service, *assumed) if part)


def _worst(values: Sequence[float | None]) -> float | None:
    """Return the largest value, or ``None`` if a value is unknown."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _relative_error(sensor: SensorResource) -> float | None:
    if sensor.accuracy and sensor.value:
        return abs(sensor.accuracy / sensor.value)
    return abs(sensor.accuracy_percent) / 100 if sensor.accuracy_percent else None


def _seconds(duration: str | None) -> float | None:
    """Return the seconds of an ISO 8601 duration such as PT0.5S or PT1M."""
    parts = re.fullmatch(r"PT(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?", duration or "")
    seconds = 60 * float(parts[1] or 0) + float(parts[2] or 0) if parts else 0.0
    return seconds or None


# --- the reader ---


def open_reader(host: str, url: str, credentials_file: Path | None = None, limit_s: float = LIMIT_S) -> NodeReader:
    """Open the power of a node; ``{host}`` in the URL is replaced by the node's name up to its first dot.

    Raises:
        DeviceUnavailable: the URL or the credentials file is not usable, or the service has no power readings.
    """
    try:
        address = Address.parse(url.replace("{host}", host.partition(".")[0]))
        credentials = Credentials.read(credentials_file.expanduser()) if credentials_file is not None else None
        service = Service(address, credentials, limit_s)
    except ValueError as error:
        raise DeviceUnavailable(f"node power: {error}") from error
    try:
        return _open(host, address, service)
    except (OSError, ValueError) as error:
        service.close()
        raise DeviceUnavailable(f"node power: Redfish at {address.host}: {error}") from error


def _open(host: str, address: Address, service: Service) -> NodeReader:
    search = Get(service, SEARCH_LIMIT_S)
    source, name = find_source(search, address.path.rstrip("/"))
    began_s = time.monotonic()
    power = source.read(Get(service, READ_LIMIT_S))
    call_s = time.monotonic() - began_s
    tick_s, gain_error, where_from = describe(search, source, power.sensors)
    # If the counter changes less often than it is read, integrated power is more exact.
    is_counted = power.joules is not None and 0 < power.step_j / power.watts <= PSU_INTERVAL_S
    device = node_device(
        host,
        NODE_PSU,
        kind="redfish",
        name=name or "node",
        method=COUNTER if is_counted else INSTANT,
        note=f"{source.note}; {'from the energy counter' if is_counted else 'power is integrated'}",
        sensor=Sensor(
            tick_s=max(tick_s, power.step_j / power.watts) if is_counted else tick_s,
            tick_error_s=tick_s,
            is_held=True,
            gain_error=gain_error,
            call_s=call_s,
            source=where_from,
        ),
        driver="Redfish",
        energy_key="" if is_own(address.host) else f"psu:{address.host}:{address.port}{address.path}",
    )

    def measure() -> Measured:
        now = source.read(Get(service, READ_LIMIT_S))
        return Measured(power_w=now.watts, energy_j=now.joules if is_counted else None)

    return NodeReader(device, PSU_INTERVAL_S, measure, service.close)
