"""Published data of power sensors by GPU architecture, used until a device's own sensor is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class KnownSensor:
    """The published data of an architecture's power sensor; ``None`` means unknown."""

    update_s: float | None  # period of new values
    window_s: float | None  # part of each period in which power is measured
    power_usage: Literal["instant", "1-s mean"] | None  # kind of power that nvmlDeviceGetPowerUsage returns
    counter: bool  # whether the driver counts energy
    rise_s: tuple[float, float] | None = None  # delay until the instant power shows a change of power
    lag_s: float | None = None  # constant delay of the energy counter
    gain_error: float = 0.05  # relative error at 95 %; common to all readings of a board, so it does not average out
    source: str = ""
    note: str = ""

    @property
    def duty(self) -> float | None:
        """Return the share of time in which power is measured."""
        return None if self.update_s is None or self.window_s is None else self.window_s / self.update_s


# fmt: off
_PAPER = "Yang, Adamek and Armour, arXiv 2312.02741 (SC24)"
_PAPER_NVML = f"{_PAPER}; NVML's page of nvmlDeviceGetPowerUsage"
_OLD = KnownSensor(
    update_s=None, window_s=None, power_usage="instant", counter=False, source=_PAPER,
    note="The sensor has a new value every 15 to 100 ms. Its response is slow and logarithmic: ignore the first second "
    "after a change. Readings are up to 9 % too low, and even lower on small cards.",
)
_RADEON = KnownSensor(
    update_s=None, window_s=None, power_usage=None, counter=True, source="ROCm/amdsmi issues 38 and 115",
    note="Under some ROCm releases the counter had a wrong rate, stopped or decreased: compare it with integrated "
    "power. In a module with two dies, one die reports the power of both dies.",
)

SENSORS: Mapping[str, KnownSensor] = MappingProxyType({
    "Kepler": _OLD,
    "Maxwell": _OLD,
    "Pascal": KnownSensor(
        update_s=0.020, window_s=0.010, power_usage="instant", counter=False, source=_PAPER,
        note="There is no counter: integrate power readings at 50 Hz or more, or the readings in NVML's buffer.",
    ),
    "Volta": KnownSensor(
        update_s=0.020, window_s=0.010, power_usage="instant", counter=True, rise_s=(0.060, 0.085),
        source=f"{_PAPER}; gpuopenanalytics/pynvml pull 18", note="The counter ticks every 10 to 20 ms.",
    ),
    "Turing": KnownSensor(
        update_s=0.100, window_s=0.100, power_usage="instant", counter=True, source=_PAPER,
        note="Averaged power is not supported.",
    ),
    "Ampere GA100": KnownSensor(
        update_s=0.100, window_s=0.025, power_usage="instant", counter=True, rise_s=(0.015, 0.110), source=_PAPER_NVML,
        note="Averaged power is not supported. No document states whether the counter also measures only 25 of 100 ms.",
    ),
    "Ampere GA10x": KnownSensor(
        update_s=0.100, window_s=0.100, power_usage="1-s mean", counter=True, source=_PAPER_NVML,
        note="Only with driver 530, nvmlDeviceGetPowerUsage returned the value of the last 100 ms.",
    ),
    "Ada Lovelace": KnownSensor(
        update_s=0.100, window_s=0.100, power_usage="1-s mean", counter=True, source=_PAPER_NVML,
        note="Only with driver 530, nvmlDeviceGetPowerUsage returned the value of the last 100 ms.",
    ),
    "Hopper": KnownSensor(
        update_s=0.100, window_s=0.025, power_usage="1-s mean", counter=True, rise_s=(0.075, 0.120),
        source=f"{_PAPER_NVML}; ml-energy/zeus pull 172",
        note="These values were measured on the H100 PCIe. No document states whether the counter also measures only "
        "25 of 100 ms. On GH200 the counter measures the whole module with its CPU and memory.",
    ),
    "Blackwell": KnownSensor(
        update_s=None, window_s=None, power_usage="1-s mean", counter=True,
        source="NVML's page of nvmlDeviceGetPowerUsage; NVIDIA/k8s-test-infra issue 676; no published measurement",
        note="The scopes GPU, module and memory must be tested on the device. A read of the energy may take "
        "milliseconds. On GB200 and GB300 the reading of a module must be counted once, not once per GPU.",
    ),
    "CDNA": _RADEON,
    "CDNA 2": _RADEON,
    "CDNA 3": _RADEON,
    "CDNA 4": _RADEON,
})
