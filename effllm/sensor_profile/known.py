"""The sensor of this machine's GPU, from the cache or measured now."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pynvml
from msgspec import Struct

from effllm.devices import Reader
from effllm.energy.calibration import calibrate
from effllm.records.rank import Sensor
from effllm.sensor_profile.nvml_facts import Facts


class Known(Struct, frozen=True):
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


def known(reader: Reader, folder: Path) -> Known | None:
    """Return a GPU's sensor: from the cache, else measured now in two seconds and not cached.

    The result is ``None`` if the device is no GPU, or has no energy sensor.
    """
    device = reader.device
    if not device.is_gpu or device.simulated or device.energy_method is None:
        return None
    read = getattr(reader, "read_energy", reader.read)
    sensor = calibrate(device, lambda: read()[0], folder, keep=False)
    same = {name: getattr(sensor, name) for name in Known.__struct_fields__ if name in Sensor.__struct_fields__}
    scopes = _scopes(device.key) if device.kind == "nvml" else {}
    return Known(**same, measured_lag=sensor.source.startswith("profiled"), scopes=scopes)


def _scopes(uuid: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with suppress(pynvml.NVMLError):
        facts = Facts(uuid)
        for field in facts.fields():
            if field.answer == "ok":
                found.setdefault(field.name, []).append(field.scope)
        facts.close()
    return found


def as_text(sensor: Known) -> list[tuple[str, list[str]]]:
    """Return the sensor as text: rows, each with a name and its lines."""
    moves = f"a tick every {1e3 * sensor.tick_s:.1f} ms" if sensor.tick_s else "no tick is known"
    held = "power is held for a tick" if sensor.is_held else "power is not held"
    call = f"; a read takes {1e3 * sensor.call_s:.2f} ms" if sensor.call_s else ""
    how = "both measured" if sensor.measured_lag else "both assumed"
    rows = [
        ("energy sensor", [
            f"{moves}, {held}{call}",
            f"lag {1e3 * sensor.lag_s:.1f} ± {1e3 * sensor.lag_error_s:.0f} ms, "
            f"measures {100 * sensor.duty:.0f} % of the time: {how}",
            f"gain ± {100 * sensor.gain_error:.0f} %",
            f"{sensor.source}" + ("" if sensor.measured_lag else "; effllm profile measures the lag"),
        ]),
    ]  # fmt: skip
    if sensor.scopes:
        rows.append(("scopes", ["; ".join(f"{name}: {', '.join(scopes)}" for name, scopes in sensor.scopes.items())]))
    return rows
