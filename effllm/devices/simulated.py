"""A simulated GPU: its power, memory and utilization are known functions of the monotonic clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from effllm.devices import Site
from effllm.records.rank import Device, Sample

_GIB = 2**30
MAX_CLOCK_HZ = 1.98e9


@dataclass(frozen=True)
class Waveform:
    """Four sine waves with one period: each value is ``mean + amplitude * sin(2 pi t / period + phase)``.

    Utilization and clock have the phase 0 on all GPUs: a difference would be a reason for a slow rank.  Times are
    seconds of the host's monotonic clock, so every process on the host can compute the exact values.
    """

    period_s: float = 10.0
    phase: float = 0.0
    power_mean_w: float = 450.0
    power_amplitude_w: float = 200.0
    memory_mean_bytes: float = 48.0 * _GIB
    memory_amplitude_bytes: float = 8.0 * _GIB
    utilization_mean: float = 0.8
    utilization_amplitude: float = 0.15
    clock_mean_hz: float = 1.7e9
    clock_amplitude_hz: float = -0.1e9

    def power_w(self, t: float) -> float:
        return self.power_mean_w + self.power_amplitude_w * self._sine(t)

    def energy_j(self, t0: float, t1: float) -> float:
        return self.power_mean_w * (t1 - t0) + self.power_amplitude_w * self._sine_integral_s(t0, t1)

    def memory_bytes(self, t: float) -> float:
        return self.memory_mean_bytes + self.memory_amplitude_bytes * self._sine(t)

    def memory_byte_seconds(self, t0: float, t1: float) -> float:
        return self.memory_mean_bytes * (t1 - t0) + self.memory_amplitude_bytes * self._sine_integral_s(t0, t1)

    def utilization(self, t: float) -> float:
        return self.utilization_mean + self.utilization_amplitude * self._sine(t, 0.0)

    def utilization_seconds(self, t0: float, t1: float) -> float:
        return self.utilization_mean * (t1 - t0) + self.utilization_amplitude * self._sine_integral_s(t0, t1, 0.0)

    def clock_hz(self, t: float) -> float:
        return self.clock_mean_hz + self.clock_amplitude_hz * self._sine(t, 0.0)

    def _sine(self, t: float, phase: float | None = None) -> float:
        return math.sin(2 * math.pi * t / self.period_s + (self.phase if phase is None else phase))

    def _sine_integral_s(self, t0: float, t1: float, phase: float | None = None) -> float:
        # A product is used because the difference of two cosines loses precision for short times.
        middle, half_turn = (t0 + t1) / 2, math.pi * (t1 - t0) / self.period_s
        return self.period_s / math.pi * self._sine(middle, phase) * math.sin(half_turn)


def waveform_of(local_rank: int) -> Waveform:
    """Return the waveform of a local rank; its phase differs by an eighth of a turn from the preceding rank's."""
    return Waveform(phase=-local_rank * math.pi / 4)


class SimulatedReader:
    """An open simulated GPU; its energy counter is zero at the origin of the monotonic clock."""

    def __init__(self, device: Device, waveform: Waveform, clock_ns: Callable[[], int]) -> None:
        self.device = device
        self.waveform = waveform
        self._clock_ns = clock_ns
        self._last_s: float | None = None

    def read(self) -> tuple[Sample, dict[str, str]]:
        time_ns = self._clock_ns()
        now_s, last_s = time_ns / 1e9, self._last_s
        self._last_s = now_s
        sample = Sample(
            time_ns=time_ns,
            memory_bytes=self.waveform.memory_bytes(now_s),
            utilization=None if last_s is None else self._mean_utilization(last_s, now_s),
            power_w=self.waveform.power_w(now_s),
            energy_j=self.waveform.energy_j(0.0, now_s),
            gauges={"sm_clock_hz": self.waveform.clock_hz(now_s)},
        )
        return sample, {}

    def close(self) -> None: ...

    def _mean_utilization(self, last_s: float, now_s: float) -> float:
        if now_s <= last_s:
            return self.waveform.utilization(now_s)
        return self.waveform.utilization_seconds(last_s, now_s) / (now_s - last_s)


def open_device(site: Site, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> SimulatedReader:
    waveform = waveform_of(site.local_rank)
    device = Device(
        key=f"SIM-{site.host}-{site.local_rank}",
        kind="simulated",
        name="simulated GPU",
        simulated=True,
        memory_total_bytes=80 * _GIB,
        power_limit_w=waveform.power_mean_w + waveform.power_amplitude_w,
        energy_method="counter",
        power_scope="gpu",
        sm_clock_max_hz=MAX_CLOCK_HZ,
        sm_clock_reference_hz=MAX_CLOCK_HZ,
        power_limit_default_w=waveform.power_mean_w + waveform.power_amplitude_w,
    )
    return SimulatedReader(device, waveform, clock_ns)
