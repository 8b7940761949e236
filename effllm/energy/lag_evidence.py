"""How late a counter is against the power reading, from ticks of a run in which the load changed; pure.

A held power reading is the mean of the tick before. If the counter is on time, its step over that tick says the same,
and both change at one moment: a reading just before the counter moves still shows the power of the tick before. If
the counter is late by a part of a tick, no reading in that last part does. A delay that counter and power have in
common does not show.
"""

from __future__ import annotations

import bisect
import math

from effllm import hardware
from effllm.schema import COUNTER, NORMAL_95, Device

#: A change of power from tick to tick tells of the lag from this share of the power on.
MIN_CHANGE = 0.1
#: So many changes are needed; then the lag is believed if it is at most so large a share of a tick.
MIN_CHANGES, MAX_LAG = 12, 0.02
#: Nothing is claimed to be known better than this.
MIN_ERROR_S = 0.001

#: A tick of which a larger part differs was read while the counter was late: its reading shows the tick after.
MAX_STILL_PART = 0.2
#: So many readings must agree on a moment in the tick, for power that comes and goes may look like that by chance.
AGREEING = 3
#: So many of the readings that are latest in their tick are kept.
MAX_KEPT = 256
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
        self._still_s: list[float] = []  # the latest moments in a tick at which power was still that of the tick before
        self._moved_s: list[float] = []  # the earliest of such moments that the tick after, read late, makes doubtful

    def add(self, step_w: float, power_w: float, before_w: float, since_s: float) -> None:
        """Take one tick.

        Args:
            step_w: its mean power by the counter.
            power_w: ... by the power reading.
            before_w: that of the tick before.
            since_s: when in its own tick that power was read.
        """
        change_w = before_w - power_w
        if abs(change_w) < MIN_CHANGE * max(power_w, before_w) or not change_w:
            return
        part = (step_w - power_w) / change_w
        self._count += 1
        self._sum += part
        self._squares += part * part
        if abs(part) <= MAX_STILL_PART:
            bisect.insort(self._still_s, since_s)
            del self._still_s[:-MAX_KEPT]
        else:
            bisect.insort(self._moved_s, since_s)
            del self._moved_s[AGREEING:]

    def error_s(self, tick_s: float) -> float | None:
        """Return the half-width of what is open about the lag where it is found to be none; else ``None``."""
        mean, half_width = self._part()
        if mean + half_width > MAX_LAG:
            return None
        still_s = self._still_s[: bisect.bisect_left(self._still_s, self._moves_at_s(tick_s))]
        latest_s = still_s[-AGREEING] if len(still_s) >= AGREEING else 0.0
        return max((mean + half_width) * tick_s, tick_s - latest_s, MIN_ERROR_S)

    def contradicts(self, error_s: float, tick_s: float) -> bool:
        """Return whether the counter is later than by so much."""
        mean, half_width = self._part()
        return self._moves_at_s(tick_s) < tick_s - error_s or mean - half_width > max(MAX_LAG, error_s / tick_s)

    def _part(self) -> tuple[float, float]:
        """Return the mean part, without its sign, and its half-width; 0 and infinite where changes are too few."""
        if self._count < MIN_CHANGES:
            return 0.0, math.inf
        mean = self._sum / self._count
        variance = max(self._squares / self._count - mean * mean, 0.0) / (self._count - 1)
        return abs(mean), NORMAL_95 * math.sqrt(variance)

    def _moves_at_s(self, tick_s: float) -> float:
        """Return from when in a tick on no moment is believed; the tick's end where none is doubtful."""
        return self._moved_s[-1] if len(self._moved_s) == AGREEING else tick_s
