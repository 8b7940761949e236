"""How late a counter is against the power reading, from ticks of a run in which the load changed; pure.

A held power reading is the mean of the tick before. If the counter is on time, its step over that tick says the same,
and both change at one moment: a reading just before the counter moves still shows the power of the tick before. If
the counter is late by a part of a tick, no reading in that last part does. A delay that counter and power have in
common does not show.
"""

from __future__ import annotations

import math

from effllm import hardware
from effllm.schema import COUNTER, NORMAL_95, Device

#: A change of power from tick to tick tells of the lag from this share of the power on.
MIN_CHANGE = 0.1
#: So many changes are needed; then the lag is believed if it is at most so large a share of a tick.
MIN_CHANGES, MAX_LAG = 12, 0.02
#: Nothing is claimed to be known better than this.
MIN_ERROR_S = 0.001

#: A counter that moves more often than this has no tick of which a part could matter.
MIN_SHARE_TICK_S = 0.005


def measures_whole_tick(device: Device) -> bool:
    """Return whether it is known of this model that its sensor measures all of each tick."""
    row = hardware.find(device.name)
    return row is not None and row.sensor.duty == 1.0


def is_share_open(device: Device) -> bool:
    """Return whether it is unknown what share of a tick the counter measures, which `effllm profile` measures."""
    sensor = device.sensor
    has_ticks = device.energy_method == COUNTER and sensor.tick_s >= MIN_SHARE_TICK_S
    is_board = device.kind == "nvml" and device.is_gpu and not device.simulated
    return is_board and has_ticks and not measures_whole_tick(device) and not sensor.source.startswith("profiled")


class LagEvidence:
    """The part of a tick by which a counter is late, as far as changes of the load have shown it."""

    def __init__(self) -> None:
        self._count = 0
        self._sum = self._squares = 0.0
        self._latest_s = (0.0, 0.0)  # the latest moments in a tick at which power was still that of the tick before

    def add(self, step_w: float, power_w: float, before_w: float, since_s: float) -> None:
        """Take one tick.

        Args:
            step_w: its mean power by the counter.
            power_w: ... by the power reading.
            before_w: that of the tick before.
            since_s: when in its tick that was read.
        """
        change_w = before_w - power_w
        if abs(change_w) < MIN_CHANGE * max(power_w, before_w) or not change_w:
            return
        part = (step_w - power_w) / change_w
        self._count += 1
        self._sum += part
        self._squares += part * part
        self._latest_s = (max(self._latest_s[0], min(self._latest_s[1], since_s)), max(self._latest_s[1], since_s))

    def error_s(self, tick_s: float) -> float | None:
        """Return the half-width of what is open about the lag where it is found to be none; else ``None``."""
        if self._count < MIN_CHANGES:
            return None
        mean = self._sum / self._count
        variance = max(self._squares / self._count - mean * mean, 0.0) / (self._count - 1)
        open_part = abs(mean) + NORMAL_95 * math.sqrt(variance)
        if open_part > MAX_LAG:
            return None
        # The last but one, for power that comes and goes may once look like that by chance.
        return max(open_part * tick_s, tick_s - self._latest_s[0], MIN_ERROR_S)
