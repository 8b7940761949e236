"""Sources of a node's power in a Redfish service: the power supplies, or the chassis."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from effllm.devices.node.https import NotFound, Service
from effllm.devices.node.redfish_records import Control, Environment, OldPower, Status, Supply, SupplyMetrics

#: Relative error of a supply's meter above a fifth of the full load; at a lower load 15 % are allowed.
SUPPLY_ERROR = 0.05
_SUPPLY_SOURCE = (
    "an error of 5 % is assumed, the limit for meters of server power supplies (Intel E72797-009, table 17)"
)
CHASSIS_ERROR = 0.10
_CHASSIS_SOURCE = "an error of 10 % is assumed, because the service does not state how it measures power"

_VENDORS = "the vendor chooses the measured parts"

_MAX_W = 1e6
_MAX_COUNT = 1e15
_KWH_J = 3.6e6

Resource = TypeVar("Resource", bound=Struct)


class Get:
    """Requests resources from a service, with one deadline for all requests."""

    def __init__(self, service: Service, limit_s: float) -> None:
        self._service = service
        self._until_s = time.monotonic() + limit_s
        self._limit_s = limit_s

    def __call__(self, path: str, kind: type[Resource]) -> Resource:
        """Return a resource.

        Raises:
            OSError, ValueError: the resource does not exist, or is of another kind.
        """
        if time.monotonic() > self._until_s:
            raise TimeoutError(f"the service took more than {self._limit_s:g} s for all its answers")
        content = self._service.get(path)
        try:
            return msgspec.json.decode(content, type=kind)
        except (msgspec.MsgspecError, RecursionError, ArithmeticError, ValueError) as error:
            raise ValueError(f"{path} is not a valid Redfish resource: {str(error)[:150]}") from None


def optional(get: Get, path: str, kind: type[Resource]) -> Resource | None:
    try:
        return get(path, kind)
    except NotFound:
        return None


class Power(NamedTuple):
    """One reading of a source."""

    watts: float
    joules: float | None = None  # running total, if there is a counter
    step_j: float = 0.0  # resolution of the counter
    sensors: tuple[str | None, ...] = (None,)  # path of each summand's sensor; None if not known


class Source(Protocol):
    """A source of the power of a node."""

    note: str
    gain_error: float
    error_source: str

    def read(self, get: Get) -> Power:
        """Return the power; raises OSError or ValueError if a part of the power cannot be read."""


class SupplyPath(NamedTuple):
    """The paths of a supply and its metrics."""

    name: str
    supply: str
    metrics: str


class SupplyInputs:
    """The sum of the line inputs of the power supplies."""

    gain_error = SUPPLY_ERROR
    error_source = _SUPPLY_SOURCE

    def __init__(self, supplies: Sequence[SupplyPath]) -> None:
        self._supplies = supplies
        self._joules: dict[str, float] = {}  # energy by supply; a removed supply keeps its last value
        self._has_energy = True
        self.note = f"sum of the inputs of {len(supplies)} power supplies"

    def read(self, get: Get) -> Power:
        """Return the sum; a removed or unplugged supply counts as 0 W, any other missing reading is an error."""
        watts, step_j, sensors = 0.0, 0.0, []
        for one in self._supplies:
            metrics = optional(get, one.metrics, SupplyMetrics)
            if metrics is None or metrics.watts is None or metrics.watts.value is None:
                self._check_off(get, one)
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

    def _check_off(self, get: Get, one: SupplyPath) -> None:
        supply = optional(get, one.supply, Supply)
        if supply is not None and not is_off(supply.status, supply.line == "LossOfInput"):
            raise ValueError(f"power supply {one.name} is present but reports no input power")


class OldSupplyInputs:
    """The sum of the line inputs in the older form, in which one resource has all supplies of a chassis."""

    gain_error = SUPPLY_ERROR
    error_source = _SUPPLY_SOURCE

    def __init__(self, paths: Sequence[str], num_supplies: int) -> None:
        self._paths = paths
        self.note = f"sum of the inputs of {num_supplies} power supplies"

    def read(self, get: Get) -> Power:
        return Power(_drawn(sum(sum(_old_inputs(get(path, OldPower))) for path in self._paths)))


class ChassisPower:
    """The power that a chassis reports."""

    gain_error = CHASSIS_ERROR
    error_source = _CHASSIS_SOURCE

    def __init__(self, path: str, chassis: str) -> None:
        self._path = path
        self.note = f"EnvironmentMetrics of chassis {chassis}: {_VENDORS}"

    def read(self, get: Get) -> Power:
        metrics = get(self._path, Environment)
        if metrics.watts is None or metrics.watts.value is None:
            raise ValueError("the chassis reports no power")
        watts = _drawn(_watts(metrics.watts.value))
        for reading, unit_j in ((metrics.joules, 1.0), (metrics.kwh, _KWH_J)):
            if reading is not None and reading.value is not None:
                return Power(watts, *_energy(reading.value, unit_j), (metrics.watts.sensor,))
        return Power(watts, sensors=(metrics.watts.sensor,))


class ControlPower:
    """The power that a chassis reports, in the older form."""

    gain_error = CHASSIS_ERROR
    error_source = _CHASSIS_SOURCE

    def __init__(self, path: str, chassis: str, controls: Sequence[Control]) -> None:
        self._path = path
        # Some services list the whole chassis and also its parts (CPU, memory); parts are not added.
        named = [control for control in controls if control.context == "Chassis"] or controls
        self._place, chosen = max(
            ((place, control) for place, control in enumerate(controls) if control in named),
            key=lambda pair: pair[1].watts or 0.0,
        )
        self._member = chosen.member
        of = f", the largest of {len(controls)}" if len(controls) > 1 else ""
        self.note = f"PowerControl {chosen.name or chosen.member or '0'!r}{of}, of chassis {chassis}: {_VENDORS}"

    def read(self, get: Get) -> Power:
        controls = get(self._path, OldPower).controls
        for place, control in enumerate(controls):
            chosen = control.member == self._member if self._member is not None else place == self._place
            if chosen and control.watts is not None:
                return Power(_drawn(_watts(control.watts)))
        raise ValueError("the chassis reports no power")


def _watts(value: Decimal | float) -> float:
    if not math.isfinite(value) or not 0 <= value < _MAX_W:
        raise ValueError(f"{value} W is not a possible power")
    return float(value)


def _drawn(watts: float) -> float:
    if watts <= 0:
        raise ValueError("the service shows 0 W, which a running node cannot draw")
    return watts


def _energy(value: Decimal, unit_j: float) -> tuple[float, float]:
    """Return a counter's joules, and its resolution in joules."""
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{value} is not a possible energy")
    return float(value) * unit_j, 10.0**exponent * unit_j


def is_off(status: Status | None, has_no_line: bool) -> bool:
    """Whether a supply draws no power and so needs no reading."""
    return has_no_line or (status is not None and status.state == "Absent")


def _old_inputs(power: OldPower) -> Iterator[float]:
    for supply in power.supplies:
        if supply.watts is not None:
            yield _watts(supply.watts)
        elif not is_off(supply.status, supply.volts == 0):
            raise ValueError(f"power supply {supply.name or supply.member} is present but reports no input power")
