"""The common part of a node's sensors: a device, and a reading that may fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from effllm.records.rank import AVERAGE, COUNTER, CPU, INSTANT, Device, Sample

#: Seconds between readings of the CPUs, and between readings of the power supplies.  The controller of the power
#: supplies is slow and shared.
CPU_INTERVAL_S, PSU_INTERVAL_S = 1.0, 10.0

_FIELDS = {COUNTER: "energy_j", INSTANT: "power_w", AVERAGE: "power_average_w"}


def node_device(host: str, scope: str, **fields: Any) -> Device:
    """Return the device of a sensor, with further fields of `Device`."""
    key = f"{'cpu' if scope == CPU else 'psu'}:{host}"
    return Device(key=key, power_scope=scope, is_gpu=False, only_power=True, **fields)


class NodeReader:
    """An open sensor of the node, an `effllm.devices.Reader`.

    Args:
        device: the sensor's device; its energy method selects the field of the reading.
        interval_s: time between readings, at least the sensor's own period.
        measure: returns one reading in W or J, or raises OSError or ValueError with the reason.
        close: releases the sensor; may be called twice.
    """

    def __init__(
        self,
        device: Device,
        interval_s: float,
        measure: Callable[[], float],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.interval_s = device, interval_s
        self._measure, self.close = measure, close

    def read(self) -> tuple[Sample, dict[str, str]]:
        values: dict[str, float] = {}
        failures: dict[str, str] = {}
        field = _FIELDS[self.device.energy_method or INSTANT]
        before_ns = time.monotonic_ns()
        try:
            values[field] = self._measure()
        except (OSError, ValueError) as error:
            failures[field] = f"{self.device.kind}: {error}"
        return replace(Sample((before_ns + time.monotonic_ns()) // 2), **values), failures

    def read_energy(self) -> tuple[Sample, dict[str, str]]:
        """Return all values: these sensors have only energy and power."""
        sample, failures = self.read()
        return replace(sample, energy_only=True), failures
