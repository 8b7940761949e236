"""The calibration of a device's energy sensor: measured at each start in two seconds, cached per model and driver.

Three things are measured without a load: the counter's period, whether the power reading changes with the counter,
and the duration of a call.  The cached result of an earlier job is used until then.  The lag of readings can be
measured only under a changing load; ``effllm profile`` applies such a load and stores its results in the same file.
See docs/calibration.md.
"""

from __future__ import annotations

import datetime
import math
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

from effllm.devices.known import hardware
from effllm.devices.known.hardware import KnownSensor
from effllm.energy.tick_clock import MAX_POWER_TICK_S, USUAL_TICK_S, TickClock, hold_time_s, is_held, tick_and_error_s
from effllm.records.rank import COUNTER, INSTANT, Device, Sample, Sensor
from effllm.store import own_files

MAX_S = 2.0
#: Maximal age of a held power reading, in ticks: half a tick of averaging, and one tick in which the value is held.
MAX_AGE_TICKS = 1.5
#: In a calibration: minimal time between two reads, and maximal share of time in calls of the driver, which may hold a
#: lock that the training needs.
MIN_APART_S, MAX_BUSY = 0.002, 0.02
#: If even reads would be farther apart than the first value, half of the time may be spent at once: first on reads
#: every 4 ms for 80 ms, if calls are fast enough, then on reads every 20 ms or more for 450 ms.
SPARSE_S, BURST_APART_S, BURST_S, SPREAD_S, SPREAD_FOR_S = 0.008, 0.004, 0.08, 0.02, 0.45
#: Maximal relative difference of a measured tick from the cached tick.
SAME_TICK = 0.02
#: A measured tick with a larger relative error, caused by delayed reads, is not compared with the cached tick.
LOOSE_TICK = 0.05
_UNKNOWN_TICK = 0.0, math.inf  # a period with an error above every limit


class Calibration(msgspec.Struct, frozen=True):
    """A file of the cache: the sensor of one model with one driver version."""

    name: str
    driver: str
    date: str
    sensor: Sensor
    measured_lag: bool = False  # whether the lag was measured under a load

    def sensor_with_source(self) -> Sensor:
        verb = "profiled" if self.measured_lag else "measured"
        return replace(self.sensor, source=f"{verb} {self.date}, kept in the cache")


class SensorMeasurement(msgspec.Struct, frozen=True):
    """The results of the reads of a device without a load."""

    call_s: float
    tick_and_error_s: tuple[float, float] | None  # the tick and the half-width of the tick's error
    is_held: bool | None


def calibrate(
    device: Device,
    read: Callable[[], Sample],
    folder: Path | None,
    *,
    wait: Callable[[float], None] | None = None,
    keep: bool = True,
    report: Callable[[str], None] | None = None,
) -> Sensor:
    """Return the device's sensor, measured now; a profile in the cache that the measurement confirms is used, too.

    Args:
        device: the opened device, with the sensor before calibration.
        read: returns a new sample; the caller keeps these samples as measurements, too.
        folder: the cache; ``None`` disables the cache.
        wait: waits until a monotonic time; by default without any other work.
        keep: whether new measurements are cached, and contradicted calibrations removed.
        report: receives one line if a cached calibration is dropped because the device contradicts it.
    """
    if device.simulated or not device.is_gpu:
        return device.sensor
    wait = wait or _sleep_until
    cached = load(folder, device.name, device.driver) if folder else None
    if device.energy_method != COUNTER and cached is not None and cached.measured_lag:
        return cached.sensor_with_source()
    if device.energy_method == INSTANT and not device.only_power:
        samples, call_s = _read_often(read, wait)
        return replace(with_power_measurement(assumed_sensor(device), samples), call_s=call_s)
    if device.energy_method != COUNTER:
        return device.sensor
    measured = _measure_counter(read, wait)
    if cached is not None and (why := _contradiction(cached.sensor, measured)):
        if folder and keep:
            with suppress(OSError):
                own_files.remove_file(_cache_path(folder, _model_without_slice(device.name), device.driver))
        if report is not None:
            removed = f"the calibration of {cached.date} was removed from the cache"
            report(f"{removed}, and the sensor was measured again: {why}")
    elif cached is not None and (cached.measured_lag or measured.tick_and_error_s is None):
        return with_measured_tick(cached.sensor_with_source(), measured)
    sensor = with_measurement(assumed_sensor(device), measured)
    if folder and keep and sensor.source.startswith("measured"):
        today = datetime.date.today().isoformat()
        store(folder, Calibration(device.name, device.driver, today, sensor))
    return sensor


def cached_or_assumed(device: Device, folder: Path) -> Sensor:
    """Return the sensor before its calibration: from the cache, else from the hardware table."""
    has_cache = device.is_gpu and not device.simulated and device.energy_method == COUNTER
    cached = load(folder, device.name, device.driver) if has_cache else None
    return cached.sensor_with_source() if cached is not None else assumed_sensor(device)


def calibration_delay_s(local_rank: int) -> float:
    """Return the seconds from a rank's first iteration to its calibration: the ranks of a node take turns."""
    return local_rank * MAX_S


def assumed_sensor(device: Device) -> Sensor:
    """Return the sensor from the hardware table; values that the table does not have are from ``device.sensor``.

    A GPU outside the table has the usual tick.  The phase of the ticks is always unknown.
    """
    if device.simulated or not device.is_gpu or device.only_power:
        return device.sensor
    if device.energy_method == INSTANT:
        # A reading may be instant power, or a mean over one tick that is held for the next tick.
        return replace(device.sensor, lag_error_s=MAX_AGE_TICKS * USUAL_TICK_S)
    if device.energy_method != COUNTER:
        return device.sensor
    row = hardware.find_by_driver_name(device.name)
    sensor = _with_table_row(row.sensor, device.sensor) if row is not None and row.sensor is not None else device.sensor
    tick_s = sensor.tick_s or USUAL_TICK_S
    return replace(sensor, tick_s=tick_s, tick_error_s=sensor.tick_error_s or tick_s)


def _with_table_row(row: KnownSensor, sensor: Sensor) -> Sensor:
    """Return a sensor with the values of its model in the hardware table."""
    tick_s = row.update_s or sensor.tick_s
    return replace(
        sensor,
        tick_s=tick_s,
        duty=row.duty if row.duty is not None else sensor.duty,
        lag_s=row.lag_s or 0.0,
        lag_error_s=0.0 if row.lag_s is not None else tick_s,  # on one tested board the lag was a tick
        is_held=True,
        average_s=1.0,
        gain_error=row.gain_error,
        source="hardware table",
    )


# --- measuring -----------------------------------------------------------------------------------


def _measure_counter(read: Callable[[], Sample], wait: Callable[[float], None]) -> SensorMeasurement:
    samples, call_s = _read_often(read, wait)
    readings = [(sample.time_ns, sample.energy_j) for sample in samples if sample.energy_j is not None]
    return SensorMeasurement(call_s, tick_and_error_s(readings), is_held(samples))


def with_measurement(sensor: Sensor, measured: SensorMeasurement) -> Sensor:
    """Return a sensor with the measured values; without a measured tick, only with the duration of a call."""
    if measured.tick_and_error_s is None:
        return replace(sensor, call_s=measured.call_s, source=f"{sensor.source}: the reads found no tick")
    tick_s, tick_error_s = measured.tick_and_error_s
    is_lag_unknown = not sensor.lag_error_s or sensor.lag_error_s == sensor.tick_s  # then it is between 0 and a tick
    return replace(
        sensor,
        tick_s=tick_s,
        tick_error_s=tick_error_s,
        is_held=sensor.is_held if measured.is_held is None else measured.is_held,
        lag_error_s=tick_s if is_lag_unknown else sensor.lag_error_s,
        call_s=measured.call_s,
        source="measured here",
    )


def with_measured_tick(sensor: Sensor, measured: SensorMeasurement) -> Sensor:
    """Return a sensor of the cache with the tick that was measured now, if reads were frequent enough to measure it."""
    tick_s, tick_error_s = measured.tick_and_error_s or _UNKNOWN_TICK
    return replace(sensor, tick_s=tick_s, tick_error_s=tick_error_s) if tick_error_s <= SAME_TICK * tick_s else sensor


def with_power_measurement(sensor: Sensor, samples: Sequence[Sample]) -> Sensor:
    """Return the sensor of a device without a counter; its lag is measured if the readings changed often enough."""
    readings = [(sample.time_ns, sample.power_w) for sample in samples if sample.power_w is not None]
    tick_s, tick_error_s = tick_and_error_s(readings) or _UNKNOWN_TICK
    if tick_error_s <= SAME_TICK * tick_s and tick_s <= MAX_POWER_TICK_S:
        # A reading is instant power, or a mean over one tick that is held for the next tick.
        lag_s = error_s = MAX_AGE_TICKS / 2 * tick_s
    elif (held_s := hold_time_s(readings)) is not None:
        lag_s, error_s = held_s, held_s / 2
    else:
        return sensor
    return replace(sensor, lag_s=lag_s, lag_error_s=max(error_s, MIN_APART_S), source="measured here")


def _contradiction(sensor: Sensor, measured: SensorMeasurement) -> str:
    """Return the contradiction between measurements and a cached sensor as text; empty if they agree."""
    tick_s, error_s = measured.tick_and_error_s or _UNKNOWN_TICK
    if error_s > LOOSE_TICK * tick_s:
        return ""
    if abs(tick_s - sensor.tick_s) > SAME_TICK * sensor.tick_s + error_s + sensor.tick_error_s:
        return f"the counter changes {_period_text(tick_s)}, not {_period_text(sensor.tick_s)}"
    if sensor.is_held and measured.is_held is False:
        return "the power reading changes between the counter's ticks, not at the ticks"
    return ""


def _period_text(tick_s: float) -> str:
    return f"every {1e3 * tick_s:.3g} ms" if tick_s else "all the time"


def _read_often(read: Callable[[], Sample], wait: Callable[[float], None]) -> tuple[list[Sample], float]:
    """Read at short intervals; return the samples and the median duration of a read.

    If calls are slow, the reads are few.  Then each is made where it helps most: at the bounds and in the middle of the
    time in which the counter's next change is expected.
    """
    samples: list[Sample] = []
    calls_s: list[float] = []  # durations
    planned_s: list[float] = []  # times of the next reads
    start_s = time.monotonic()
    end_s = start_s + MAX_S
    while (now_s := time.monotonic()) < end_s:
        samples.append(read())
        calls_s.append(time.monotonic() - now_s)
        call_s = statistics.median(calls_s)
        even_gap_s = call_s / MAX_BUSY  # time between even reads that take the allowed share of time
        if even_gap_s <= SPARSE_S or samples[-1].energy_j is None:
            next_s = now_s + max(MIN_APART_S, even_gap_s)
        else:
            allowed_s = start_s + 2 * sum(calls_s) / MAX_BUSY - MAX_S  # half of the calls' time may be spent at once
            readings = [(sample.time_ns, sample.energy_j) for sample in samples if sample.energy_j is not None]
            tick = tick_and_error_s(readings) if not planned_s else None
            if tick is not None and tick[0] == 0 and now_s - start_s > BURST_S:
                break  # the counter is continuous
            if tick is not None and tick[0] > 0:
                planned_s = _times_near_next_tick(readings, TickClock(*tick), max(now_s, allowed_s + 4 * even_gap_s))
            gap_s = _first_reads_gap_s(call_s, now_s - start_s)
            next_s = planned_s.pop(0) if planned_s else max(now_s + gap_s, allowed_s)
        wait(min(next_s, end_s))
    return samples, statistics.median(calls_s) if calls_s else 0.0


def _sleep_until(until_s: float) -> None:
    time.sleep(max(until_s - time.monotonic(), 0.0))


def _first_reads_gap_s(call_s: float, elapsed_s: float) -> float:
    """Return the seconds to the next read while the tick is unknown: dense reads find short ticks if calls are fast."""
    allowed_calls_s = MAX_BUSY * MAX_S
    if elapsed_s < BURST_S and call_s * BURST_S / BURST_APART_S <= allowed_calls_s / 4:
        return BURST_APART_S
    return max(SPREAD_S, call_s * SPREAD_FOR_S / (allowed_calls_s / 2))


def _times_near_next_tick(readings: Sequence[tuple[int, float]], clock: TickClock, from_s: float) -> list[float]:
    """Return the times at both bounds and in the middle of the expected time of the first tick after ``from_s``."""
    for (after_ns, before_j), (until_ns, joules) in pairwise(readings):
        (clock.add_no_change if before_j == joules else clock.add_change)(after_ns, until_ns)
    due = clock.last_tick_before(from_s * 1e9 + clock.tick_ns)
    if due is None:
        return []
    middle_s, half_s = due[0] / 1e9, max((due[1] + clock.spread_ns) / 1e9, MIN_APART_S)
    return [middle_s - half_s, middle_s, middle_s + half_s]


# --- the cache -----------------------------------------------------------------------------------


def load(folder: Path, name: str, driver: str) -> Calibration | None:
    name = _model_without_slice(name)
    try:
        cached = msgspec.json.decode(own_files.read_file(_cache_path(folder, name, driver)), type=Calibration)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return None
    return cached if (cached.name, cached.driver) == (name, driver) else None


def store(folder: Path, calibration: Calibration) -> None:
    """Store a calibration if the folder is writable; a profile is replaced only by a profile."""
    cached = load(folder, calibration.name, calibration.driver)
    if cached is not None and cached.measured_lag and not calibration.measured_lag:
        return
    calibration = replace(calibration, name=_model_without_slice(calibration.name))
    path = _cache_path(folder, calibration.name, calibration.driver)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        own_files.make_folder(folder)
        content = msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"
        own_files.replace_file(draft, content, durable=False)
        own_files.rename_file(draft, path.name)


def _model_without_slice(name: str) -> str:
    return re.sub(r"\s+MIG\b.*$", "", name)


def _cache_path(folder: Path, name: str, driver: str) -> Path:
    return folder / (re.sub(r"[^A-Za-z0-9.]+", "-", f"{name}-{driver}").strip("-")[:120] + ".json")
