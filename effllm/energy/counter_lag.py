"""The lag of a counter behind the power reading, from the reads around the edges of windows. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable

from effllm.energy.readings import NS, Point
from effllm.records.rank import COUNTER

#: The largest possible lag, in ticks: a tick, and an allowance for the error of its end.
MAX_TICKS = 1.05
#: A power reading and the mean power of a counter's tick are different if they differ by more than this share.
DIFFERENT = 0.02
#: Minimal number of edges with a change of power before the bounds are used; after each contradiction twice as many.
MIN_CHANGES = 8
#: Time between a read and the next tick: the read shows whether the counter is late by more than this.
NEAR_S = 0.0003
#: Number of edges with a read that narrows the bounds.
MAX_PROBES = 256


class CounterLag:
    """All lags that explain the reads, as bounds in ticks.

    A held power reading is the mean power of the last tick.  A late counter adds the energy of this tick later.  A
    power reading that differs from the mean power of a counter's tick is not the reading of this tick; this excludes
    the lags with which it would be.  Reads that no lag explains are not of a held reading, and the bounds start again.
    A delay that is common to counter and power is not found.
    """

    def __init__(self) -> None:
        self._low, self._high = 0.0, MAX_TICKS
        self._changes, self._needed = 0, MIN_CHANGES
        self._probes = 0

    @property
    def ticks(self) -> tuple[float, float] | None:
        """The lag and the half-width of its error, in ticks; ``None`` after too few changes of power."""
        if self._changes < self._needed:
            return None
        if self._low <= 0:
            return 0.0, self._high  # most counters are not late
        return (self._low + self._high) / 2, (self._high - self._low) / 2

    def add(self, points: Iterable[Point], last_ns: float, tick_ns: float, open_ns: float) -> None:
        """Narrow the bounds by the reads around one edge.

        Args:
            points: the readings.
            last_ns: time of a tick.
            tick_ns: the counter's period.
            open_ns: half-width of the error of tick times.
        """
        tick_s, error = tick_ns * NS, open_ns / tick_ns
        reads = [
            ((point.time_ns - last_ns) / tick_ns, point.total_j, point.power_w)
            for point in points
            if point.method == COUNTER and point.power_w is not None
        ]
        levels = {math.floor(at): total_j for at, total_j, _ in reads if error < at % 1 < 1 - error}
        means_w = {tick: (levels[tick] - levels[tick - 1]) / tick_s for tick in levels if tick - 1 in levels}
        starts = [
            tick - at  # with a lag from here to one tick more, the power reading would be of this tick
            for at, _, power_w in reads
            for tick, mean_w in means_w.items()
            if abs(power_w - mean_w) > DIFFERENT * power_w
        ]
        for start in starts:
            self._exclude(start + error, start + 1 - error)
        self._changes += bool(starts)

    def _exclude(self, low: float, high: float) -> None:
        if low <= self._low and self._high <= high:
            self._low, self._high = 0.0, MAX_TICKS
            self._changes, self._needed = 0, 2 * self._needed
        elif low <= self._low < high:
            self._low = high
        elif low < self._high <= high:
            self._high = low

    def probe(self, tick_s: float, error_s: float) -> float | None:
        """Return the time of a read that narrows the bounds, in ticks after a tick; ``None`` if none is needed."""
        self._probes += 1
        if self._probes > MAX_PROBES:
            return None
        return -(self._low + self._high) / 2 % 1 if self._low > 0 else 1 - (NEAR_S + error_s) / tick_s
