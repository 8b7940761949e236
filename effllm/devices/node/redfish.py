"""The power of a node from its management controller's Redfish service.

The power is the sum of the inputs of the power supplies (PowerSubsystem), else the power that the chassis states
(EnvironmentMetrics, or the deprecated Power: DGX A100 to B200 and iLO 5 have no other).  If a supply is present but has
no reading, the whole reading fails, because a sum without this supply would be too low.  This file was tested with the
forms of DMTF's public mock-ups (DSP2043), not on real hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from effllm.devices import DeviceUnavailable
from effllm.devices.node.reader import PSU_INTERVAL_S, NodeReader, node_device
from effllm.devices.node.redfish_service import LIMIT_S, Document, Service, is_own, parse_url, read_credentials
from effllm.records.rank import INSTANT, NODE_PSU, Sensor

READ_LIMIT_S = 10.0  # timeout of all requests of one reading
SEARCH_LIMIT_S = 120.0  # timeout of the search through all chassis, which runs once
MAX_CHASSIS, MAX_SUPPLIES = 128, 64

#: Relative error of a supply's meter above a fifth of the full load; at a lower load 15 % are allowed.
SUPPLY_ERROR = 0.05
_SUPPLY_SOURCE = "an error of 5 % is assumed, the limit for meters of power supplies (Intel E72797-009, table 17)"
CHASSIS_ERROR = 0.10
_CHASSIS_SOURCE = "an error of 10 % is assumed, because the service does not state how it measures power"
_TICK_S = 5.0  # assumed period of the sensor
_MAX_W = 1e6


class Source(NamedTuple):
    """A source of a node's power, with its error."""

    note: str
    gain_error: float
    error_source: str
    read_w: Callable[[], float]  # raises OSError or ValueError if a part of the power cannot be read


def find_source(service: Service, path: str) -> tuple[Source, str]:
    """Return the source of the node's power, and the name of the machine.

    Args:
        service: the service.
        path: path of a chassis; or of the root, for the chassis that no other chassis contains.

    Raises:
        OSError, ValueError: the service has no source, or more than one source.
    """
    links = _members(service, _path(service.get("/redfish/v1/") or {}, "Chassis"))[:MAX_CHASSIS]
    if is_named := path not in ("", "/redfish", "/redfish/v1", "/redfish/v1/Chassis"):
        links = [link for link in links if link.rstrip("/") == path]
        if not links:
            raise ValueError(f"{path} is neither the root of the service nor one of its chassis")
    every = [(link, chassis) for link in links if (chassis := service.get(link)) is not None]
    top = [one for one in every if is_named or not _path(_object(one[1].get("Links")), "ContainedBy")] or every
    why_not: list[str] = []
    found = [(*one, source) for one in top if (source := _best_source(service, one[1], why_not)) is not None]
    if not found:
        raise ValueError("; ".join(["the service shows no power of a whole chassis", *why_not]))
    link, chassis, source = found[0]
    if len(found) > 1:
        raise ValueError(f"the service shows the power of {len(found)} chassis: name one in the URL, such as {link}")
    names = (chassis.get("Manufacturer"), chassis.get("Model"))
    return source, " ".join(name for name in names if isinstance(name, str))


def _best_source(service: Service, chassis: Document, why_not: list[str]) -> Source | None:
    """Return the best source of a chassis' power; reasons why a better one is not used are added to ``why_not``."""
    for source in _sources(service, chassis):
        try:
            source.read_w()
        except ValueError as error:
            why_not.append(str(error))
        else:
            return source._replace(note="; ".join([source.note, *why_not]))
    return None


def _sources(service: Service, chassis: Document) -> Iterator[Source]:
    subsystem = service.get(_path(chassis, "PowerSubsystem")) or {}
    links = _members(service, _path(subsystem, "PowerSupplies"))[:MAX_SUPPLIES]
    if links:
        supplies = {link: _path(service.get(link) or {}, "Metrics") for link in links}
        note = f"sum of the inputs of {len(supplies)} power supplies"
        if (systems := len(_objects(_object(chassis.get("Links")).get("ComputerSystems")))) > 1:
            note += f"; the supplies feed {systems} computer systems, as stated by the service"
        yield Source(note, SUPPLY_ERROR, _SUPPLY_SOURCE, partial(_supplies_w, service, supplies))
    for name, read_w in (("EnvironmentMetrics", _environment_w), ("Power", _control_w)):
        if path := _path(chassis, name):
            note = f"{name} of chassis {chassis.get('Id')}: the vendor chooses the measured parts"
            yield Source(note, CHASSIS_ERROR, _CHASSIS_SOURCE, partial(read_w, service, path))


def _supplies_w(service: Service, supplies: dict[str, str]) -> float:
    """Return the sum of the inputs, from the metrics by supply; a removed or unplugged supply draws nothing."""
    total_w = 0.0
    for path, metrics in supplies.items():
        watts = _watts(_object((service.get(metrics) or {}).get("InputPowerWatts")).get("Reading"))
        if watts is not None:
            total_w += watts
        elif (supply := service.get(path)) is not None:
            is_absent = _object(supply.get("Status")).get("State") == "Absent"
            if not is_absent and supply.get("LineInputStatus") != "LossOfInput":
                raise ValueError(f"power supply {supply.get('Id')} is present but reports no input power")
    return _drawn(total_w)


def _environment_w(service: Service, path: str) -> float:
    return _drawn(_watts(_object((service.get(path) or {}).get("PowerWatts")).get("Reading")))


def _control_w(service: Service, path: str) -> float:
    """Return the largest power: some services list the chassis and also its parts, such as CPUs and memory."""
    controls = _objects((service.get(path) or {}).get("PowerControl"))
    whole = [one for one in controls if one.get("PhysicalContext") == "Chassis"] or controls
    known = [watts for one in whole if (watts := _watts(one.get("PowerConsumedWatts"))) is not None]
    return _drawn(max(known, default=None))


def _watts(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < _MAX_W:  # also a number that is not finite
        raise ValueError(f"{str(value)[:40]} W is not a possible power")
    return float(value)


def _drawn(watts: float | None) -> float:
    if not watts:
        raise ValueError("the service shows no power, or 0 W, which a running node cannot draw")
    return watts


def _members(service: Service, path: str) -> list[str]:
    """Return the paths of the members of a collection."""
    members = _objects((service.get(path) or {}).get("Members"))
    return [one["@odata.id"] for one in members if isinstance(one.get("@odata.id"), str)]


def _path(document: Document, name: str) -> str:
    """Return the path of a linked resource; empty if there is no link."""
    path = _object(document.get(name)).get("@odata.id")
    return path if isinstance(path, str) else ""


def _object(value: Any) -> Document:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Document]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def open_reader(host: str, url: str, credentials_file: Path | None = None, limit_s: float = LIMIT_S) -> NodeReader:
    """Open the power of a node; ``{host}`` in the URL is replaced by the node's name up to its first dot.

    Raises:
        DeviceUnavailable: the URL or the credentials file is not usable, or the service has no power readings.
    """
    try:
        address = parse_url(url.replace("{host}", host.partition(".")[0]))
        credentials = read_credentials(credentials_file.expanduser()) if credentials_file is not None else None
        service = Service(address, credentials, limit_s)
    except ValueError as error:
        raise DeviceUnavailable(f"node power: {error}") from error
    service.begin(SEARCH_LIMIT_S)
    try:
        source, name = find_source(service, address.path.rstrip("/"))
        began_s = time.monotonic()
        source.read_w()
    except (OSError, ValueError) as error:
        service.close()
        raise DeviceUnavailable(f"node power: Redfish at {address.hostname}: {error}") from error
    device = node_device(
        host,
        NODE_PSU,
        kind="redfish",
        name=name or "node",
        method=INSTANT,
        note=f"{source.note}; power is integrated",
        sensor=Sensor(
            tick_s=_TICK_S,
            tick_error_s=_TICK_S,
            is_held=True,
            gain_error=source.gain_error,
            call_s=time.monotonic() - began_s,
            source=f"{source.error_source}; a period of {_TICK_S:g} s is assumed",
        ),
        driver="Redfish",
        energy_key="" if is_own(address.hostname or "") else f"psu:{address.netloc}{address.path}",
    )

    def measure() -> float:
        service.begin(READ_LIMIT_S)
        return source.read_w()

    return NodeReader(device, PSU_INTERVAL_S, measure, service.close)
