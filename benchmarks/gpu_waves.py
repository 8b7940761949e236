"""The energy counter compared with integrated power under square waves, from dense and from polled readings."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from benchmarks.figure import Figure
from effllm.devices import Reader
from effllm.sensor_profile.estimates import Load, Tick, ticks_of
from effllm.sensor_profile.finding import Record, Timer, record_readings
from effllm.sensor_profile.load import TorchLoad
from effllm.sensor_profile.record import SensorProfile

PERIODS_S = (0.2, 2.0, 10.0)
MIN_S, MAX_S = 12.0, 120.0
POLLED_EVERY_S = (0.1, 1.0)
#: After this time, an average over 1 s contains no power from before the load.
SETTLE_S = 2.0


def waves(reader: Reader, loader: TorchLoad, found: SensorProfile, cycles: int, clock: Timer = time) -> list[Figure]:
    """Return the ratio of integrated power to the counter's energy for each period, from dense and polled readings."""
    figures = []
    for period_s in PERIODS_S:
        seconds = SETTLE_S + min(max(cycles * period_s, MIN_S if cycles > 3 else 0.0), MAX_S)
        stretches = [period_s / 2] * round(2 * seconds / period_s)
        loader.start_stretches(stretches)
        record = record_readings(reader, clock, lambda _share: None, sum(stretches), loader)
        figures += _compared(record, Load(record.edges, record.origin_ns), found, period_s)
    return figures


def _compared(record: Record, load: Load, found: SensorProfile, period_s: float) -> list[Figure]:
    """Compare over whole periods: from one start of load to a later start."""
    begins = [time_s for number, time_s in enumerate(load.times_s) if number % 2 == 0]
    inside = [time_s for time_s in begins if begins[0] + SETTLE_S <= time_s <= record.end_s]
    counted, powers = ticks_of(record.series("energy_j")), record.series("power_w")
    if len(inside) < 2 or counted is None:
        return []
    figures = []
    for every_s in (0.0, *POLLED_EVERY_S):
        ticks = [tick for tick in counted[1] if inside[0] <= tick.at_s <= inside[-1]]
        value = _power_over_counter(ticks, _polled(powers, every_s), _shift_s(found))
        how = f"polled every {every_s:g} s" if every_s else f"read every {1e3 * record.mean_apart_s:.0f} ms"
        name = f"square wave of {period_s:g} s: power {how}, over the counter"
        figures.append(Figure(name, value, "ratio", detail={"seconds": ticks[-1].at_s - ticks[0].at_s}))
    return figures


def _power_over_counter(ticks: Sequence[Tick], powers: Sequence[tuple[float, float]], shift_s: float) -> float:
    """Return integrated power over the counter's energy between two ticks; power is late by `shift_s`."""
    at_s, watts = np.array(powers).T
    start_s, end_s = ticks[0].at_s + shift_s, ticks[-1].at_s + shift_s
    times_s = np.unique(np.append(at_s[(at_s > start_s) & (at_s < end_s)], [start_s, end_s]))
    middles_w = np.interp((times_s[1:] + times_s[:-1]) / 2, at_s, watts)
    return float(middles_w @ np.diff(times_s)) / (ticks[-1].value - ticks[0].value)


def _shift_s(found: SensorProfile) -> float:
    """Return the delay of power relative to the counter in s, from the profile."""
    if found.power_response is None or not found.measured_lag:
        return 0.0
    held_s = found.power.period_s / 2 if found.power else 0.0
    return found.power_response.middle_s + held_s - found.sensor.lag_s


def _polled(powers: Sequence[tuple[float, float]], every_s: float) -> list[tuple[float, float]]:
    """Return the power readings that are at least `every_s` apart."""
    taken: list[tuple[float, float]] = []
    for time_s, power_w in powers:
        if not taken or time_s >= taken[-1][0] + every_s:
            taken.append((time_s, power_w))
    return taken
