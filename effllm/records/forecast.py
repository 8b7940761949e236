"""The foretold end of a running job, from its windows so far."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

REMAINING_S, JOULES, CO2_KG = "remaining_seconds", "end_energy_joules", "end_co2_kg"
ELECTRICITY, GPUS = "end_electricity_cost", "end_gpu_cost"
#: Name in a forecast -> meaning.
FORECAST = {
    REMAINING_S: "Time until the last iteration",
    JOULES: "Energy of the whole run at its end",
    CO2_KG: "CO2 emissions of the whole run at its end, in kg",
    ELECTRICITY: "Cost of the energy of the whole run at its end",
    GPUS: "Cost of rented GPUs of the whole run at its end",
}


class Foretold(Struct, frozen=True):
    """A value at the rate so far, and an interval; ``None``: there are too few windows for an interval."""

    value: float
    low: float | None = None
    high: float | None = None


Forecast = dict[str, Foretold]


def foretold_values(forecast: Mapping[str, Foretold], prefix: str = "") -> dict[str, float]:
    """Return the known values with the ends of their intervals, as flat names that begin with ``prefix``."""
    ends = (("", "value"), ("_low", "low"), ("_high", "high"))
    values = {f"{prefix}{name}{end}": getattr(value, field) for name, value in forecast.items() for end, field in ends}
    return {name: value for name, value in values.items() if value is not None}
