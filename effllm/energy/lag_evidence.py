"""The lag of a counter behind the power reading, from reads of a run in which power changed. No I/O.

A held power reading is the mean of the last tick, and changes once in each tick.  Two reads with different power
bound the time of a change.  All bounds together give the part of a tick by which the counter is late.  The number
of whole ticks follows from the counter's step over a tick, because this step must equal the tick's power reading.
A delay that is common to counter and power is not found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from effllm.devices.known import hardware
from effllm.records.energy import NORMAL_95
from effllm.records.rank import COUNTER, Device

#: Minimal relative change of power between two ticks that is used to find the lag's number of whole ticks.
MIN_CHANGE = 0.1
#: To find the lag: minimal number of changes, and maximal error of the number of whole ticks, in ticks.
MIN_CHANGES, MAX_PART = 12, 0.02
#: To confirm the lag of an earlier run: minimal number of changes, and maximal difference from that lag.
MIN_CONFIRMING, SAME_S = 3, 0.001
#: The smallest error of a lag that is reported.
MIN_ERROR_S = 0.0002
#: Time between a tick and a read that probes the lag.
NEAR_S = 0.0003
#: After the lag was found, or MAX_PROBES reads have not found it, only every Nth edge has a probing read.
CHECK_EVERY, MAX_PROBES = 16, 256
#: If bounds contradict each other, they are widened by at least this time.
MIN_SPREAD_S = 0.0001
#: If a tick is shorter than this, it does not matter which share of the tick is measured.
MIN_SHARE_TICK_S = 0.005


def measures_whole_tick(device: Device) -> bool:
    """Return whether this model's sensor measures during the whole tick, according to the hardware table."""
    row = hardware.find(device.name)
    return row is not None and row.sensor.duty == 1.0


def is_share_open(device: Device) -> bool:
    """Return whether the share of a tick that the counter measures is unknown; `effllm profile` measures it."""
    sensor = device.sensor
    has_ticks = device.energy_method == COUNTER and sensor.tick_s >= MIN_SHARE_TICK_S
    is_board = device.kind == "nvml" and device.is_gpu and not device.simulated
    return is_board and has_ticks and not measures_whole_tick(device) and not sensor.source.startswith("profiled")


class TickRead(NamedTuple):
    """A reading of counter and power near an edge."""

    since_s: float  # time since the tick before the edge
    total_j: float
    power_w: float


class LagEvidence:
    """The lag of a counter, estimated from the readings of a run.

    Args:
        kept_s: the lag found in an earlier run; used after the readings of this run confirm this lag.
    """

    def __init__(self, kept_s: float | None = None) -> None:
        self._kept_s = kept_s
        self._bounds_s: tuple[float, float] | None = None  # bounds of the lag without its whole ticks
        self._spread_s = 0.0  # widening of new bounds, because earlier bounds contradicted each other
        self._probes = 0
        self._count = 0
        self._sum = self._squares = 0.0  # sums over the delays of the counter's steps, in ticks

    def add_reads(self, reads: Sequence[TickRead], tick_s: float, open_s: float) -> None:
        """Add the reads around one edge, oldest first.

        Args:
            reads: the reads, with times since the tick before the edge.
            tick_s: the counter's period.
            open_s: half-width of the error of tick times.
        """
        for first, second in pairwise(reads):
            if first.power_w != second.power_w:
                self._changed(first.since_s - open_s, second.since_s + open_s, tick_s)
        if self._bounds_s is None:
            return
        low_s, high_s = self._bounds_s
        levels: dict[int, float] = {}
        powers: dict[int, float] = {}  # mean power by tick
        for since_s, total_j, power_w in reads:
            tick = math.floor(since_s / tick_s)
            in_tick_s = since_s - tick * tick_s
            if open_s < in_tick_s < tick_s - open_s:
                levels[tick] = total_j
                later = math.floor((in_tick_s + low_s) / tick_s)
                if later == math.floor((in_tick_s + high_s) / tick_s):
                    powers[tick + later] = power_w
        for tick in (1, 2):
            if {tick - 1, tick} <= levels.keys() & powers.keys():
                self._add((levels[tick] - levels[tick - 1]) / tick_s, powers[tick], powers[tick - 1])

    def lag_s(self, tick_s: float) -> tuple[float, float] | None:
        """Return the lag and the half-width of its error; ``None`` if no lag is found."""
        mean, half_width = self._late_ticks()
        ticks = round(mean)
        part = abs(mean - ticks) + half_width
        if self._bounds_s is None or ticks not in (0, 1) or part > MAX_PART:
            return None  # after too few changes, `part` is infinite
        low_s, high_s = (bound_s + ticks * tick_s for bound_s in self._bounds_s)
        if high_s < 0:
            return None  # the power reading changes later than the counter
        lag_s = 0.0 if low_s <= 0 else (low_s + high_s) / 2
        error_s = max(high_s - lag_s, lag_s - low_s, part * tick_s, MIN_ERROR_S)
        is_kept = self._kept_s is not None and error_s <= SAME_S and abs(lag_s - self._kept_s) <= error_s + SAME_S
        return (lag_s, error_s) if self.is_shown or is_kept else None

    @property
    def is_shown(self) -> bool:
        return self._count >= MIN_CHANGES

    def probe_s(self, tick_s: float, open_s: float) -> float | None:
        """Return the most useful time of a read, in seconds after a tick; ``None`` if a read is not needed."""
        low_s, high_s = self._bounds_s or (-tick_s / 2, tick_s / 2)
        self._probes += 1
        is_found = max(high_s, -low_s) <= MIN_ERROR_S or high_s - low_s <= 2 * MIN_ERROR_S
        if (is_found or self._probes > MAX_PROBES) and self._probes % CHECK_EVERY:
            return None
        if low_s < 0 < high_s:
            near_s = NEAR_S + open_s
            return (tick_s - near_s) if high_s > -low_s else near_s
        return -(low_s + high_s) / 2 % tick_s

    def _changed(self, after_s: float, until_s: float, tick_s: float) -> None:
        """Bound the lag by the times of two reads with different power."""
        low_s, high_s = -until_s - self._spread_s, -after_s + self._spread_s
        if high_s - low_s >= tick_s:
            return  # the value may have changed twice in this time
        if self._bounds_s is None:
            self._restart(low_s, high_s, tick_s)
            return
        known_low_s, known_high_s = self._bounds_s
        nearest = round((known_low_s + known_high_s - low_s - high_s) / 2 / tick_s)
        both = [
            (max(low_s + turn * tick_s, known_low_s), min(high_s + turn * tick_s, known_high_s))
            for turn in (nearest - 1, nearest, nearest + 1)
        ]
        met = [(low, high) for low, high in both if low <= high]
        if len(met) == 1:
            self._bounds_s = met[0]
        elif not met:
            gap_s = min(low - high for low, high in both)
            self._spread_s = min(self._spread_s + max(gap_s, MIN_SPREAD_S), tick_s)
            self._restart(low_s - gap_s, high_s + gap_s, tick_s)
        low_s, high_s = self._bounds_s
        # A lag slightly below zero is more likely than a lag of almost a tick.
        if high_s - low_s < tick_s / 8 and low_s + high_s > 1.75 * tick_s:
            self._restart(low_s, high_s, tick_s)

    def _restart(self, low_s: float, high_s: float, tick_s: float) -> None:
        turns = math.floor((low_s + high_s) / 2 / tick_s + 1 / 8)
        self._bounds_s = low_s - turns * tick_s, high_s - turns * tick_s
        self._count, self._sum, self._squares = 0, 0.0, 0.0

    def _add(self, step_w: float, power_w: float, before_w: float) -> None:
        """Add the counter's delay in ticks: its mean power in a tick, compared with the power readings of two ticks."""
        change_w = before_w - power_w
        if abs(change_w) < MIN_CHANGE * max(power_w, before_w) or not change_w:
            return
        ticks = (step_w - power_w) / change_w
        self._count += 1
        self._sum += ticks
        self._squares += ticks * ticks

    def _late_ticks(self) -> tuple[float, float]:
        """Return the counter's mean delay in ticks, and its half-width; 0 and infinity after too few changes."""
        if self._count < MIN_CONFIRMING:
            return 0.0, math.inf
        mean = self._sum / self._count
        variance = max(self._squares / self._count - mean * mean, 0.0) / (self._count - 1)
        return mean, NORMAL_95 * math.sqrt(variance)
