"""Compares a counter with integrated power, once a minute. No I/O."""

from __future__ import annotations

import math

from effllm.energy.power_spread import PowerSpread
from effllm.energy.readings import NS

CROSS_CHECK_S = 60.0
#: Maximal relative difference of counter and power, unless the sampling error is larger.
DISAGREEMENT = 0.03


class CrossCheck:
    """Compares the counter with integrated power, and reports when a disagreement begins and ends."""

    def __init__(self) -> None:
        self._start: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None  # time and power
        self._power_j = self._variance_j2 = 0.0
        self._is_suspect = False

    def reset(self) -> None:
        """Restart the comparison, because the counter was not read or is not used."""
        self._start = self._last = None

    def add(self, time_ns: int, total_j: float, power_w: float, powers: PowerSpread) -> str | None:
        """Add a reading of counter and power.  After each minute, return a text if a disagreement began or ended.

        Args:
            time_ns: time of the reading.
            total_j: the counter's total.
            power_w: the power reading.
            powers: the variation of power, for the sampling error.
        """
        if self._start is None or self._last is None:
            self._start, self._last = (time_ns, total_j), (time_ns, power_w)
            self._power_j = self._variance_j2 = 0.0
            return None
        span_s = (time_ns - self._last[0]) * NS
        self._power_j += (self._last[1] + power_w) / 2 * span_s
        self._variance_j2 += powers.variance_w2 * span_s * max(span_s, 0.2)
        self._last = (time_ns, power_w)
        whole_s = (time_ns - self._start[0]) * NS
        if whole_s < CROSS_CHECK_S:
            return None
        text = self._compare(total_j - self._start[1], whole_s)
        self._start, self._power_j, self._variance_j2 = (time_ns, total_j), 0.0, 0.0
        return text

    def _compare(self, counter_j: float, span_s: float) -> str | None:
        allowed_j = max(3 * math.sqrt(self._variance_j2), DISAGREEMENT * self._power_j)
        was_suspect, self._is_suspect = self._is_suspect, abs(counter_j - self._power_j) > allowed_j
        if self._is_suspect == was_suspect:
            return None
        if was_suspect:
            return "the energy counter and integrated power agree again"
        percent = 100 * (counter_j / self._power_j - 1) if self._power_j else math.inf
        return (
            f"over {span_s:.0f} s the energy counter shows {counter_j:.0f} J and integrated power is "
            f"{self._power_j:.0f} J ({percent:+.1f} %): the counter is used"
        )
