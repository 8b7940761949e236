"""What a node draws by its management controller's Redfish service, over HTTPS.

The inputs of the power supplies are what a node draws, so their sum is taken where the service has it; else
the chassis' own figure, whatever the vendor counts into it.  A sum with a hole in it is no sum: a supply
that is there and gives no reading fails the whole reading.  Not run on real hardware so far.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from effllm.devices import DeviceUnavailable
from effllm.node_power.credentials import Credentials
from effllm.node_power.https import LIMIT_S, Address, NotFound, Service
from effllm.node_power.reader import Measured, NodeReader
from effllm.schema import COUNTER, INSTANT, NODE_PSU, Device, Sensor

#: A controller is a slow computer that has other work.
INTERVAL_S = 10.0
#: All questions of one reading together.
READ_LIMIT_S = 10.0
#: Looking through all chassis, once.
SEARCH_LIMIT_S = 120.0
MOST_CHASSIS = 128
MOST_SUPPLIES = 64

ROOT = "/redfish/v1/"
_MOST_W = 1e6
_MOST_COUNT = 1e15
_KWH_J = 3.6e6

#: Of a supply's own meter, above a fifth of its load; below that 15 % are allowed.
SUPPLY_ERROR = 0.05
_SUPPLY_SOURCE = "5 % is what makers of server supplies demand of their meters (Intel E72797-009, table 17)"
CHASSIS_ERROR = 0.10
_CHASSIS_SOURCE = "10 % assumed: the service does not say what its figure is taken from"
_TICK_S = 5.0  # where the service does not say how often it looks

Resource = TypeVar("Resource", bound=Struct)


class Link(Struct):
    """A pointer to another resource."""

    path: str = field(name="@odata.id")


class Root(Struct):
    """The service itself."""

    chassis: Link | None = field(name="Chassis", default=None)
    version: str | None = field(name="RedfishVersion", default=None)


class Collection(Struct):
    """Pointers to resources of one kind."""

    members: list[Link] = field(name="Members", default_factory=list)


class Status(Struct):
    """Whether a part is there and works."""

    state: str | None = field(name="State", default=None)


class Reading(Struct):
    """A sensor's value in brief, and where the whole sensor is."""

    value: Decimal | None = field(name="Reading", default=None)
    sensor: str | None = field(name="DataSourceUri", default=None)


class ChassisLinks(Struct):
    """What a chassis belongs to."""

    contained_by: Link | None = field(name="ContainedBy", default=None)
    systems: list[Link] = field(name="ComputerSystems", default_factory=list)


class Chassis(Struct):
    """A box, with what shows its power."""

    id: str = field(name="Id")
    manufacturer: str | None = field(name="Manufacturer", default=None)
    model: str | None = field(name="Model", default=None)
    subsystem: Link | None = field(name="PowerSubsystem", default=None)
    power: Link | None = field(name="Power", default=None)
    environment: Link | None = field(name="EnvironmentMetrics", default=None)
    links: ChassisLinks | None = field(name="Links", default=None)


class Subsystem(Struct):
    """The power subsystem of a chassis."""

    supplies: Link | None = field(name="PowerSupplies", default=None)


class Supply(Struct):
    """A power supply."""

    id: str = field(name="Id")
    metrics: Link | None = field(name="Metrics", default=None)
    serial: str | None = field(name="SerialNumber", default=None)
    status: Status | None = field(name="Status", default=None)
    line: str | None = field(name="LineInputStatus", default=None)


class SupplyMetrics(Struct):
    """What a power supply measures."""

    watts: Reading | None = field(name="InputPowerWatts", default=None)
    kwh: Reading | None = field(name="EnergykWh", default=None)


class Environment(Struct):
    """What a chassis measures of itself."""

    watts: Reading | None = field(name="PowerWatts", default=None)
    joules: Reading | None = field(name="EnergyJoules", default=None)
    kwh: Reading | None = field(name="EnergykWh", default=None)


class Control(Struct):
    """The power of a chassis or a part of it, in the older form."""

    watts: float | None = field(name="PowerConsumedWatts", default=None)
    member: str | None = field(name="MemberId", default=None)
    name: str | None = field(name="Name", default=None)
    context: str | None = field(name="PhysicalContext", default=None)


class OldSupply(Struct):
    """A power supply, in the older form."""

    watts: float | None = field(name="PowerInputWatts", default=None)
    member: str | None = field(name="MemberId", default=None)
    name: str | None = field(name="Name", default=None)
    serial: str | None = field(name="SerialNumber", default=None)
    volts: float | None = field(name="LineInputVoltage", default=None)
    status: Status | None = field(name="Status", default=None)


class OldPower(Struct):
    """The power of a chassis in the older form, all in one resource."""

    controls: list[Control] = field(name="PowerControl", default_factory=list)
    supplies: list[OldSupply] = field(name="PowerSupplies", default_factory=list)


class SensorResource(Struct):
    """What a sensor says of itself."""

    value: float | None = field(name="Reading", default=None)
    interval: str | None = field(name="SensingInterval", default=None)
    accuracy: float | None = field(name="ReadingAccuracy", default=None)  # in the unit of the reading
    accuracy_percent: float | None = field(name="Accuracy", default=None)


class Get:
    """Asks for resources, all of them before one deadline."""

    def __init__(self, service: Service, limit_s: float) -> None:
        self._service = service
        self._until_s = time.monotonic() + limit_s
        self._limit_s = limit_s

    def __call__(self, path: str, kind: type[Resource]) -> Resource:
        """Return a resource.

        Raises:
            OSError, ValueError: there is none, or it is not of its kind.
        """
        if time.monotonic() > self._until_s:
            raise TimeoutError(f"the service took more than {self._limit_s:g} s for all its answers")
        content = self._service.get(path)
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError, ArithmeticError, ValueError) as error:
            raise ValueError(f"{path} is no Redfish resource of this kind: {str(error)[:150]}") from None


class Power(NamedTuple):
    """What a source shows."""

    watts: float
    joules: float | None = None  # so far, where there is a counter
    step_j: float = 0.0  # of that counter
    sensors: tuple[str | None, ...] = (None,)  # where the sensor of each addend is, as far as the service says


class Source(Protocol):
    """Where the power of a node is taken from."""

    note: str
    gain_error: float
    error_source: str

    def read(self, get: Get) -> Power:
        """Return the power; raises OSError or ValueError where not all of it can be read."""


class SupplyPath(NamedTuple):
    """Where a supply and its metrics are."""

    name: str
    supply: str
    metrics: str


class SupplyInputs:
    """The sum over power supplies of what each draws from its line."""

    gain_error = SUPPLY_ERROR
    error_source = _SUPPLY_SOURCE

    def __init__(self, supplies: Sequence[SupplyPath]) -> None:
        self._supplies = supplies
        self._joules: dict[str, float] = {}  # of one that is out, the last that it showed
        self._has_energy = True
        self.note = f"sum of the inputs of {len(supplies)} power supplies"

    def read(self, get: Get) -> Power:
        """Return the sum; a supply that is out or has no line draws nothing, one that is silent fails it."""
        watts, step_j, sensors = 0.0, 0.0, []
        for one in self._supplies:
            metrics = _optional(get, one.metrics, SupplyMetrics)
            if metrics is None or metrics.watts is None or metrics.watts.value is None:
                self._must_be_off(get, one)
                continue
            watts += _watts(metrics.watts.value)
            sensors.append(metrics.watts.sensor)
            if metrics.kwh is not None and metrics.kwh.value is not None:
                self._joules[one.metrics], step = _energy(metrics.kwh.value, _KWH_J)
                step_j = max(step_j, step)
            else:
                self._has_energy = False
        joules = sum(self._joules.values()) if self._has_energy else None
        return Power(_drawn(watts), joules, step_j, tuple(sensors))

    def _must_be_off(self, get: Get, one: SupplyPath) -> None:
        supply = _optional(get, one.supply, Supply)
        if supply is not None and not _is_off(supply.status, supply.line == "LossOfInput"):
            raise ValueError(f"power supply {one.name} is there and gives no input power")


class OldSupplyInputs:
    """The same sum in the older form, where one resource has all supplies of a chassis."""

    gain_error = SUPPLY_ERROR
    error_source = _SUPPLY_SOURCE

    def __init__(self, paths: Sequence[str], num_supplies: int) -> None:
        self._paths = paths
        self.note = f"sum of the inputs of {num_supplies} power supplies"

    def read(self, get: Get) -> Power:
        """Return the sum, as `SupplyInputs`."""
        return Power(_drawn(sum(sum(_old_inputs(get(path, OldPower))) for path in self._paths)))


class ChassisPower:
    """What a chassis says that it draws."""

    gain_error = CHASSIS_ERROR
    error_source = _CHASSIS_SOURCE

    def __init__(self, path: str, chassis: str) -> None:
        self._path = path
        self.note = f"EnvironmentMetrics of chassis {chassis}: what the vendor counts into it"

    def read(self, get: Get) -> Power:
        """Return the power, and the energy where there is a counter."""
        metrics = get(self._path, Environment)
        if metrics.watts is None or metrics.watts.value is None:
            raise ValueError("the chassis gives no power")
        watts = _drawn(_watts(metrics.watts.value))
        for reading, unit_j in ((metrics.joules, 1.0), (metrics.kwh, _KWH_J)):
            if reading is not None and reading.value is not None:
                return Power(watts, *_energy(reading.value, unit_j), (metrics.watts.sensor,))
        return Power(watts, sensors=(metrics.watts.sensor,))


class ControlPower:
    """What a chassis says that it draws, in the older form."""

    gain_error = CHASSIS_ERROR
    error_source = _CHASSIS_SOURCE

    def __init__(self, path: str, chassis: str, controls: Sequence[Control]) -> None:
        self._path = path
        # Beside the whole some list its parts (CPU, memory): these are not added to it.
        named = [control for control in controls if control.context == "Chassis"] or controls
        self._place, chosen = max(
            ((place, control) for place, control in enumerate(controls) if control in named),
            key=lambda pair: pair[1].watts or 0.0,
        )
        self._member = chosen.member
        of = f", the largest of {len(controls)}" if len(controls) > 1 else ""
        self.note = f"PowerControl {chosen.name or chosen.member or '0'!r}{of}, of chassis {chassis}: " + (
            "what the vendor counts into it"
        )

    def read(self, get: Get) -> Power:
        """Return the power."""
        controls = get(self._path, OldPower).controls
        for place, control in enumerate(controls):
            chosen = control.member == self._member if self._member is not None else place == self._place
            if chosen and control.watts is not None:
                return Power(_drawn(_watts(control.watts)))
        raise ValueError("the chassis gives no power")


def _watts(value: Decimal | float) -> float:
    if not math.isfinite(value) or not 0 <= value < _MOST_W:
        raise ValueError(f"{value} W is no power")
    return float(value)


def _drawn(watts: float) -> float:
    if watts <= 0:
        raise ValueError("the service shows 0 W, which a node that runs cannot draw")
    return watts


def _energy(value: Decimal, unit_j: float) -> tuple[float, float]:
    """Return a counter's joules, and the smallest step that its digits can show."""
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or not 0 <= value < _MOST_COUNT:
        raise ValueError(f"{value} is no energy")
    return float(value) * unit_j, 10.0**exponent * unit_j


def _is_off(status: Status | None, has_no_line: bool) -> bool:
    return has_no_line or (status is not None and status.state == "Absent")


def _old_inputs(power: OldPower) -> Iterator[float]:
    for supply in power.supplies:
        if supply.watts is not None:
            yield _watts(supply.watts)
        elif not _is_off(supply.status, supply.volts == 0):
            raise ValueError(f"power supply {supply.name or supply.member} is there and gives no input power")


# --- the search ---


class Found(NamedTuple):
    """A chassis and where it is."""

    path: str
    chassis: Chassis


def find_source(get: Get, path: str) -> tuple[Source, str]:
    """Return the best source of the node's power, and the name of the machine.

    Raises:
        OSError, ValueError: there is none, or more than one and no telling which.
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
        f"the service shows the power of {len(sources)} chassis: name one in the URL, such as {top[0].path}"
    )


def _chassis_paths(get: Get, path: str) -> list[str]:
    """Return the chassis that a URL means: all of the service's, or the one that it names."""
    if re.fullmatch(r"/redfish/v1/Chassis/[^/]+", path):
        return [path]
    if path not in ("", "/redfish", "/redfish/v1", "/redfish/v1/Chassis"):
        raise ValueError(f"{path} is neither the root of a Redfish service nor a chassis")
    root = get(ROOT, Root)
    if root.chassis is None:
        raise ValueError("the service has no chassis")
    return [link.path for link in get(root.chassis.path, Collection).members[:MOST_CHASSIS]]


def _supplies(get: Get, found: Iterable[Found]) -> Source | None:
    supplies: dict[str, SupplyPath] = {}
    homes: dict[str, str] = {}
    for one in found:
        for path in _supply_paths(get, one.chassis):
            supply = get(path, Supply)
            if supply.serial and homes.setdefault(supply.serial, one.path) != one.path and path not in supplies:
                raise ValueError(f"power supply {supply.serial} is in two chassis: name one of them in the URL")
            if supply.metrics is not None:
                supplies[path] = SupplyPath(supply.id, path, supply.metrics.path)
            elif not _is_off(supply.status, has_no_line=False):
                raise ValueError(f"power supply {supply.id} measures nothing")
    if not supplies:
        return None
    source = SupplyInputs(list(supplies.values()))
    source.read(get)
    return source


def _supply_paths(get: Get, chassis: Chassis) -> list[str]:
    """Return the supplies of a chassis, empty slots among them: what is put in later counts."""
    subsystem = _optional(get, chassis.subsystem.path, Subsystem) if chassis.subsystem is not None else None
    if subsystem is None or subsystem.supplies is None:
        return []
    return [link.path for link in get(subsystem.supplies.path, Collection).members[:MOST_SUPPLIES]]


def _old_supplies(get: Get, found: Iterable[Found]) -> Source | None:
    num_supplies: dict[str, int] = {}
    for one in found:
        power = _optional(get, one.chassis.power.path, OldPower) if one.chassis.power is not None else None
        if one.chassis.power is not None and power is not None:
            num_supplies[one.chassis.power.path] = sum(supply.watts is not None for supply in power.supplies)
    paths = [path for path, number in num_supplies.items() if number]
    if not paths:
        return None
    source = OldSupplyInputs(paths, sum(num_supplies.values()))
    source.read(get)
    return source


def _of_chassis(get: Get, one: Found) -> list[Source]:
    """Return what shows the power of a chassis as a whole: the newer form, else the older, else nothing."""
    if one.chassis.environment is not None:
        environment = _optional(get, one.chassis.environment.path, Environment)
        if environment is not None and environment.watts is not None and environment.watts.value is not None:
            return [ChassisPower(one.chassis.environment.path, one.chassis.id)]
    if one.chassis.power is not None:
        power = _optional(get, one.chassis.power.path, OldPower)
        if power is not None and any(control.watts is not None for control in power.controls):
            return [ControlPower(one.chassis.power.path, one.chassis.id, power.controls)]
    return []


def _shared_by(found: Iterable[Found]) -> str:
    num_systems = max((len(one.chassis.links.systems) for one in found if one.chassis.links is not None), default=1)
    return f"; they feed {num_systems} computer systems by the service's word" if num_systems > 1 else ""


def _optional(get: Get, path: str, kind: type[Resource]) -> Resource | None:
    try:
        return get(path, kind)
    except NotFound:
        return None


# --- the sensor ---


def describe(get: Get, source: Source, sensors: Iterable[str | None]) -> tuple[float, float, str]:
    """Return how often the sensors of a source look and how far they may be off, and where that is from."""
    intervals_s: list[float | None] = []
    errors: list[float | None] = []
    for path in sensors:
        sensor = SensorResource()
        with contextlib.suppress(OSError, ValueError):  # many point to sensors that they do not have
            sensor = get(path, SensorResource) if path else sensor
        intervals_s.append(_seconds(sensor.interval))
        errors.append(_relative_error(sensor))
    tick_s, error = _worst(intervals_s), _worst(errors)
    said = [word for word, value in (("period", tick_s), ("error", error)) if value is not None]
    told = f"{' and '.join(said)} by the service's word" if said else ""
    assumed = [source.error_source] if error is None else []
    assumed += [f"a period of {_TICK_S:g} s assumed"] if tick_s is None else []
    gain_error = error if error is not None else source.gain_error
    return tick_s or _TICK_S, gain_error, "; ".join(part for part in (told, *assumed) if part)


def _worst(values: Sequence[float | None]) -> float | None:
    """Return the largest, ``None`` where not all are known."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _relative_error(sensor: SensorResource) -> float | None:
    if sensor.accuracy and sensor.value:
        return abs(sensor.accuracy / sensor.value)
    return abs(sensor.accuracy_percent) / 100 if sensor.accuracy_percent else None


def _seconds(duration: str | None) -> float | None:
    """Return the seconds of a duration as ISO 8601 writes them, such as PT0.5S or PT1M."""
    parts = re.fullmatch(r"PT(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?", duration or "")
    seconds = 60 * float(parts[1] or 0) + float(parts[2] or 0) if parts else 0.0
    return seconds or None


# --- the reader ---


def open_reader(host: str, url: str, credentials_file: Path | None = None, limit_s: float = LIMIT_S) -> NodeReader:
    """Open the power of a node; ``{host}`` in the URL stands for the node's name up to its first dot.

    Raises:
        DeviceUnavailable: the URL or the credentials file is not usable, or the service shows no power.
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
    # A counter whose step takes longer than the time between two readings tells less than power does.
    is_counted = power.joules is not None and 0 < power.step_j / power.watts <= INTERVAL_S
    method = COUNTER if is_counted else INSTANT
    note = f"{source.note}; {'its energy counter' if is_counted else 'integrated power'}"
    device = Device(
        key=f"psu:{host}",
        kind="redfish",
        name=name or "node",
        is_gpu=False,
        energy_method=method,
        power_scope=NODE_PSU,
        energy_key="" if _is_own(address.host) else f"psu:{address.host}:{address.port}{address.path}",
        energy_note=note,
        sensor=Sensor(
            tick_s=max(tick_s, power.step_j / power.watts) if is_counted else tick_s,
            tick_error_s=tick_s,
            is_held=True,
            gain_error=gain_error,
            call_s=call_s,
            source=where_from,
        ),
        driver="Redfish",
        only_power=True,
    )

    def measure() -> Measured:
        now = source.read(Get(service, READ_LIMIT_S))
        return Measured(power_w=now.watts, energy_j=now.joules if is_counted else None)

    return NodeReader(device, INTERVAL_S, measure, service.close)


def _is_own(host: str) -> bool:
    """Whether an address means another controller on every node: a loopback or link-local one."""
    try:
        address: Any = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return bool(address.is_loopback or address.is_link_local)
