"""How a device's energy sensor behaves: measured at start in two seconds at most, kept per model and driver.

What standing still can show is measured here: how often the counter moves, whether the power reading
moves with it, what a call takes.  How far readings lag behind shows only under a changing load, which
``effllm profile`` applies; what it finds is kept in the same file.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from effllm import hardware
from effllm.schema import COUNTER, Device, Sample, Sensor

LONGEST_S = 2.0
#: Reads of one calibration are at least so far apart; and each call may take so much of the time.
LEAST_APART_S, MOST_BUSY = 0.002, 0.25
LEAST_MOVES = 4

_CACHE_DAYS = 90


class Calibration(msgspec.Struct, frozen=True):
    """A file of the cache: how the sensor of a model behaves under a driver."""

    name: str
    driver: str
    date: str
    sensor: Sensor
    measured_lag: bool = False  # under a load, not assumed


def calibrate(device: Device, read: Callable[[], Sample], folder: Path | None) -> Sensor:
    """Return how the device's sensor behaves: from the cache, else measured now and kept there.

    Args:
        device: as it was opened; its sensor says what is known before.
        read: takes one sample; each is also used as a measurement by whoever called.
        folder: the cache; ``None`` keeps nothing.
    """
    if device.energy_method != COUNTER or device.simulated or not device.is_gpu:
        return device.sensor
    known = load(folder, device.name, device.driver) if folder else None
    if known is not None:
        _watch(read, 1.3 * known.sensor.tick_s, known.sensor.tick_s / 24)
        return replace(known.sensor, source=f"measured {known.date}, kept in the cache")
    sensor = measure(assumed(device), read)
    if folder and sensor.source.startswith("measured"):
        store(folder, Calibration(device.name, device.driver, time.strftime("%Y-%m-%d"), sensor))
    return sensor


def assumed(device: Device) -> Sensor:
    """Return what the hardware table says of a device's sensor, over what the device file said."""
    row = hardware.find(device.name)
    if row is None or row.sensor is None:
        return device.sensor
    return _of_table(row.sensor, device.sensor)


def _of_table(row: hardware.KnownSensor, sensor: Sensor) -> Sensor:
    tick_s = row.update_s or sensor.tick_s
    return replace(
        sensor,
        tick_s=tick_s,
        duty=row.duty if row.duty is not None else sensor.duty,
        lag_s=row.lag_s or 0.0,
        lag_error_s=0.0 if row.lag_s is not None else tick_s,  # one board was seen to lag by a tick
        is_held=True,
        average_s=1.0,
        gain_error=row.gain_error,
        source="hardware table",
    )


def measure(sensor: Sensor, read: Callable[[], Sample]) -> Sensor:
    """Watch the counter and the power reading move for two seconds, and return what they show."""
    samples, call_s = _watch(read, LONGEST_S, LEAST_APART_S)
    tick = tick_of([(sample.time_ns, sample.energy_j) for sample in samples if sample.energy_j is not None])
    if tick is None:
        return replace(sensor, call_s=call_s, source=f"{sensor.source}: the counter moved too seldom to tell")
    tick_s, tick_error_s = tick
    return replace(
        sensor,
        tick_s=tick_s,
        tick_error_s=tick_error_s,
        is_held=sensor.is_held or is_held(samples),
        lag_error_s=sensor.lag_error_s or tick_s,
        call_s=call_s,
        source="measured here",
    )


def tick_of(readings: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the period of a counter and the half-width of what is open about it, from dense readings.

    Every move lies between two reads; the period is what explains all of them.  A counter that moved
    from almost every read to the next moves all the time: its tick is 0.

    Args:
        readings: monotonic time in ns and joules.
    """
    moves = [
        (first_ns, second_ns)
        for (first_ns, first_j), (second_ns, second_j) in pairwise(readings)
        if second_j != first_j
    ]
    if len(moves) < LEAST_MOVES:
        return None
    if len(moves) > 0.6 * (len(readings) - 1):
        return 0.0, 0.0
    middles = [(after + until) / 2 for after, until in moves]
    period = statistics.median(later - earlier for earlier, later in pairwise(middles))
    shortest, longest = 0.5 * period, 1.5 * period
    index = 0
    indices = [0]
    for earlier, later in pairwise(middles):
        index += max(round((later - earlier) / period), 1)
        indices.append(index)
    for i, (after_i, until_i) in enumerate(moves):
        for j in range(i + 1, len(moves)):
            ticks = indices[j] - indices[i]
            shortest = max(shortest, (moves[j][0] - until_i) / ticks)
            longest = min(longest, (moves[j][1] - after_i) / ticks)
    if shortest > longest:  # it jitters by more than reads are apart
        mean = (middles[-1] - middles[0]) / indices[-1]
        return mean / 1e9, max((shortest - longest) / 2, 0.002 * mean) / 1e9
    return (shortest + longest) / 2e9, max((longest - shortest) / 2e9, 1e-7)


def is_held(samples: Sequence[Sample]) -> bool:
    """Whether the power reading changes only when the counter does, as a sensor's that measures once per tick."""
    pairs = [
        (first, second)
        for first, second in pairwise(samples)
        if first.power_w is not None and second.power_w is not None
    ]
    changes = [(first, second) for first, second in pairs if first.power_w != second.power_w]
    if not changes:
        return True
    together = sum(first.energy_j != second.energy_j for first, second in changes)
    return together >= 0.8 * len(changes)


def load(folder: Path, name: str, driver: str) -> Calibration | None:
    """Return what is kept about a model and driver; ``None`` where nothing usable is."""
    try:
        kept = msgspec.json.decode(_path(folder, name, driver).read_bytes(), type=Calibration)
    except (OSError, msgspec.DecodeError):
        return None
    return kept if (kept.name, kept.driver) == (name, driver) and kept.sensor.tick_s >= 0 else None


def store(folder: Path, calibration: Calibration) -> None:
    """Keep a calibration; a folder that cannot be written costs the next start two seconds."""
    path = _path(folder, calibration.name, calibration.driver)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
        draft.replace(path)


def _path(folder: Path, name: str, driver: str) -> Path:
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{driver}").strip("-")[:120] + ".json")


def _watch(read: Callable[[], Sample], span_s: float, apart_s: float) -> tuple[list[Sample], float]:
    """Read densely; return the samples and what one read takes."""
    samples: list[Sample] = []
    calls_s: list[float] = []
    end_s = time.monotonic() + min(span_s, LONGEST_S)
    while True:
        began_s = time.monotonic()
        if began_s >= end_s:
            return samples, statistics.median(calls_s) if calls_s else 0.0
        samples.append(read())
        calls_s.append(time.monotonic() - began_s)
        time.sleep(max(apart_s - calls_s[-1], calls_s[-1] / MOST_BUSY, 0.0))
