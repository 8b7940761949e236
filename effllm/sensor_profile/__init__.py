"""Measures the sensors of one GPU that has no other work: idle, then under a known load.

Reads are as frequent as the driver allows and would disturb a job, so no other program should use the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pynvml
from msgspec import Struct

from effllm.devices import Reader
from effllm.energy.calibration import Calibration, calibrate
from effllm.records.rank import Sensor
from effllm.sensor_profile.finding import MEASURED, PROFILED, SensorEvidence, Timer, call_durations, record_readings
from effllm.sensor_profile.load import LoadUnavailable, TorchLoad, load_pattern_s
from effllm.sensor_profile.nvml_facts import Facts
from effllm.sensor_profile.record import SensorProfile

IDLE_SHARE, MIN_IDLE_S = 0.15, 2.5  # the idle GPU's share of the time of all measurements

Progress = Callable[[str, float], None]


def profile(
    reader: Reader,
    open_load: Callable[[], TorchLoad],
    seconds: float,
    *,
    facts: Facts | None = None,
    progress: Progress = lambda _stage, _share: None,
    clock: Timer = time,
) -> SensorProfile:
    """Measure the behaviour of the sensors of a GPU, in ``seconds`` in all.

    ``open_load`` is called only after the idle GPU was measured, because a CUDA context raises power.  ``progress`` is
    called with the name of a stage and with the part of the stage that is done, 0..1.
    """
    num_processes = facts.num_processes() if facts else None
    idle_s = max(IDLE_SHARE * seconds, MIN_IDLE_S)
    idle = record_readings(reader, clock, lambda share: progress("idle", share), idle_s)
    progress("calls", 0.0)
    calls = call_durations(reader, facts, clock)
    evidence = SensorEvidence(reader.device, idle, num_processes)
    loader: TorchLoad | None = None
    try:
        progress("load", 0.0)
        loader = open_load()
        stretches_s = load_pattern_s((1 - IDLE_SHARE) * seconds, evidence.tick_s or 0.1)
        loader.start_stretches(stretches_s)
        loaded = record_readings(reader, clock, lambda share: progress("load", share), sum(stretches_s), loader)
        progress("estimates", 0.0)
        evidence.add_load_record(loaded, loader.name)
    except LoadUnavailable as error:
        evidence.unmeasured.append(f"lag, windows and the loaded GPU: {error}")
    finally:
        if loader is not None:
            loader.close()
    progress("estimates", 1.0)
    return evidence.profile(seconds, calls, facts)


def to_calibration(result: SensorProfile) -> Calibration | None:
    """Return the sensor as a file of the cache; ``None`` if nothing of the sensor was measured."""
    if result.sensor.source not in (PROFILED, MEASURED):
        return None
    return Calibration(result.board.name, result.board.driver, result.date, result.sensor, result.measured_lag)


class SensorSummary(Struct, frozen=True):
    """A GPU's energy sensor, and the source of its values."""

    source: str
    tick_s: float  # 0 if the sensor is continuous, or if the tick is unknown
    tick_error_s: float
    is_held: bool
    lag_s: float
    lag_error_s: float
    measured_lag: bool  # whether the lag was measured, not assumed
    duty: float
    gain_error: float
    call_s: float
    scopes: dict[str, list[str]] = {}  # scopes that the driver supports, by field


def measured_or_cached_sensor(reader: Reader, folder: Path) -> SensorSummary | None:
    """Return a GPU's sensor from the cache, else measured in two seconds and not cached; ``None`` without a sensor."""
    device = reader.device
    if not device.is_gpu or device.simulated or device.energy_method is None:
        return None
    read = getattr(reader, "read_energy", reader.read)
    sensor = calibrate(device, lambda: read()[0], folder, keep=False)
    shared_fields = [name for name in SensorSummary.__struct_fields__ if name in Sensor.__struct_fields__]
    scopes = _supported_scopes(device.key) if device.kind == "nvml" else {}
    values = {name: getattr(sensor, name) for name in shared_fields}
    return SensorSummary(**values, measured_lag=sensor.source.startswith("profiled"), scopes=scopes)


def _supported_scopes(uuid: str) -> dict[str, list[str]]:
    scopes: dict[str, list[str]] = {}
    with suppress(pynvml.NVMLError):
        facts = Facts(uuid)
        for field in facts.field_answers():
            if field.answer == "ok":
                scopes.setdefault(field.name, []).append(field.scope)
        facts.close()
    return scopes


def as_text(sensor: SensorSummary) -> list[tuple[str, list[str]]]:
    """Return the sensor as text: rows, each with a name and its lines."""
    tick_text = f"a tick every {1e3 * sensor.tick_s:.1f} ms" if sensor.tick_s else "no tick is known"
    held_text = "power is held for a tick" if sensor.is_held else "power is not held"
    call_text = f"; a read takes {1e3 * sensor.call_s:.2f} ms" if sensor.call_s else ""
    evidence_text = "both measured" if sensor.measured_lag else "both assumed"
    rows = [
        ("energy sensor", [
            f"{tick_text}, {held_text}{call_text}",
            f"lag {1e3 * sensor.lag_s:.1f} ± {1e3 * sensor.lag_error_s:.0f} ms, "
            f"measures {100 * sensor.duty:.0f} % of the time: {evidence_text}",
            f"gain ± {100 * sensor.gain_error:.0f} %",
            f"{sensor.source}" + ("" if sensor.measured_lag else "; effllm profile measures the lag"),
        ]),
    ]  # fmt: skip
    if sensor.scopes:
        rows.append(("scopes", ["; ".join(f"{name}: {', '.join(scopes)}" for name, scopes in sensor.scopes.items())]))
    return rows
