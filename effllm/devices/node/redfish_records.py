"""The Redfish resources of power, with the properties that are read; any property may be missing."""

from __future__ import annotations

from decimal import Decimal

from msgspec import Struct, field


class ResourceLink(Struct):
    """A pointer to another resource."""

    path: str = field(name="@odata.id")


class Root(Struct):
    """The root resource of a service."""

    chassis: ResourceLink | None = field(name="Chassis", default=None)


class Collection(Struct):
    """Pointers to resources of one kind."""

    members: list[ResourceLink] = field(name="Members", default_factory=list)


class Status(Struct):
    """Whether a part is present and works."""

    state: str | None = field(name="State", default=None)


class Reading(Struct):
    """A sensor's value, and the path of the whole sensor."""

    value: Decimal | None = field(name="Reading", default=None)
    sensor: str | None = field(name="DataSourceUri", default=None)


class ChassisLinks(Struct):
    """The parent of a chassis, and its computer systems."""

    contained_by: ResourceLink | None = field(name="ContainedBy", default=None)
    systems: list[ResourceLink] = field(name="ComputerSystems", default_factory=list)


class Chassis(Struct):
    """A chassis, with the resources of its power."""

    id: str = field(name="Id")
    manufacturer: str | None = field(name="Manufacturer", default=None)
    model: str | None = field(name="Model", default=None)
    subsystem: ResourceLink | None = field(name="PowerSubsystem", default=None)
    power: ResourceLink | None = field(name="Power", default=None)
    environment: ResourceLink | None = field(name="EnvironmentMetrics", default=None)
    links: ChassisLinks | None = field(name="Links", default=None)


class Subsystem(Struct):
    """The power subsystem of a chassis."""

    supplies: ResourceLink | None = field(name="PowerSupplies", default=None)


class Supply(Struct):
    """A power supply."""

    id: str = field(name="Id")
    metrics: ResourceLink | None = field(name="Metrics", default=None)
    serial: str | None = field(name="SerialNumber", default=None)
    status: Status | None = field(name="Status", default=None)
    line: str | None = field(name="LineInputStatus", default=None)


class SupplyMetrics(Struct):
    """The measurements of a power supply."""

    watts: Reading | None = field(name="InputPowerWatts", default=None)
    kwh: Reading | None = field(name="EnergykWh", default=None)


class Environment(Struct):
    """The measurements of a chassis."""

    watts: Reading | None = field(name="PowerWatts", default=None)
    joules: Reading | None = field(name="EnergyJoules", default=None)
    kwh: Reading | None = field(name="EnergykWh", default=None)


class Control(Struct):
    """The power of a chassis or of one of its parts, in the older form."""

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
    """The power of a chassis in the older form, in one resource."""

    controls: list[Control] = field(name="PowerControl", default_factory=list)
    supplies: list[OldSupply] = field(name="PowerSupplies", default_factory=list)


class SensorResource(Struct):
    """The description of a sensor."""

    value: float | None = field(name="Reading", default=None)
    interval: str | None = field(name="SensingInterval", default=None)
    accuracy: float | None = field(name="ReadingAccuracy", default=None)  # maximum error, in the unit of the reading
    accuracy_percent: float | None = field(name="Accuracy", default=None)
