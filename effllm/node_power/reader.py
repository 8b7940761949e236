"""What the sensors of a node have in common: a device, and a reading that may fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from effllm.records.rank import AVERAGE, COUNTER, INSTANT, Device, Sample

#: Seconds between readings of the CPUs, and of the power supplies, whose controller is a slow computer with other work.
CPU_INTERVAL_S, PSU_INTERVAL_S = 1.0, 10.0

_FIELDS = {COUNTER: "energy_j", INSTANT: "power_w", AVERAGE: "power_average_w"}


class Measured(NamedTuple):
    """What one reading of a node's sensor tells."""

    power_w: float | None = None
    power_average_w: float | None = None
    energy_j: float | None = None


class NodeReader:
    """An open sensor of the node, which follows `effllm.devices.Reader`.

    Args:
        device: what is read; its energy method names the field that a failure is told of.
        interval_s: how often it is worth reading, at least the sensor's own period.
        measure: takes one reading; raises OSError or ValueError, whose text is the reason, where it cannot.
        close: gives back what is held; may be called twice.
    """

    def __init__(
        self, device: Device, interval_s: float, measure: Callable[[], Measured], close: Callable[[], None]
    ) -> None:
        self.device = device
        self.interval_s = interval_s
        self._measure = measure
        self._close = close

    def read(self) -> tuple[Sample, dict[str, str]]:
        """Return the values of this moment; where they cannot be read they are ``None``, with the reason beside."""
        failures: dict[str, str] = {}
        measured = Measured()
        before_ns = time.monotonic_ns()
        try:
            measured = self._measure()
        except (OSError, ValueError) as error:
            failures[_FIELDS[self.device.energy_method or INSTANT]] = f"{self.device.kind}: {error}"
        sample = Sample(
            time_ns=(before_ns + time.monotonic_ns()) // 2,
            power_w=measured.power_w,
            power_average_w=measured.power_average_w,
            energy_j=measured.energy_j,
        )
        return sample, failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return the same, for there is nothing else to leave out."""
        sample, failures = self.read()
        return replace(sample, energy_only=True), failures

    def close(self) -> None:
        """Give back what is held; may be called twice."""
        self._close()
