"""Detection of a change of iteration times: two cumulative sums over the medians of windows. No I/O.

Page's CUSUM (Biometrika 41, 1954) sums the deviations of windows from the level, in robust standard deviations, each
minus an allowance.  If a sum exceeds the threshold, the level changed at the window where the sum began to grow.
With an allowance of 0.75 and a threshold of 6, normal windows cause one false alarm in 41,000 windows per direction.
This number is Siegmund's approximation (exp(b) - b - 1) / 1.125, with b = 1.5 * (6 + 1.166).  A window counts as at
most 2 deviations.  So an alarm takes five windows, and rare long windows cause no alarm.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from effllm.job.health.robust import MAD_SIGMA

ALLOWANCE = 0.75
THRESHOLD = 6.0
MAX_DEVIATIONS = 2.0
#: Number of windows whose median is the level.
LEVEL_WINDOWS = 16
#: Minimum of the standard deviation, as a share of the level.
FLOOR = 0.01
#: Smallest reported change, as a share of the last reported level.
MIN_CHANGE = 0.05


class Change(NamedTuple):
    """A change of the level."""

    since: int  # mark of the first window at the new level
    before_s: float
    after_s: float

    @property
    def ratio(self) -> float:
        """Relative change: 0.1 is an increase of ten percent."""
        return self.after_s / self.before_s - 1


class WindowLevel:
    """The level of a series of window medians."""

    def __init__(self) -> None:
        self._windows_s: list[float] = []
        self._reported_s: float | None = None
        self._sums = [0.0, 0.0]  # sums of deviations above and below the level
        self._runs: list[list[tuple[int, float]]] = [[], []]  # for each sum: windows since the sum was zero

    def add(self, mark: int, value_s: float) -> Change | None:
        """Add the next window's median; return a change if this window confirms it.

        Args:
            mark: first iteration of the window.
            value_s: median of the window.
        """
        if len(self._windows_s) < LEVEL_WINDOWS:
            self._windows_s.append(value_s)
            return None
        level_s = statistics.median(self._windows_s)
        distances = [abs(one - level_s) for one in self._windows_s]
        scale_s = max(MAD_SIGMA * statistics.median(distances), FLOOR * level_s)
        if scale_s <= 0:
            return None
        far = min(max((value_s - level_s) / scale_s, -MAX_DEVIATIONS), MAX_DEVIATIONS)
        for side, sign in enumerate((1.0, -1.0)):
            self._sums[side] = max(self._sums[side] + sign * far - ALLOWANCE, 0.0)
            self._runs[side] = [*self._runs[side], (mark, value_s)] if self._sums[side] else []
        for side in (0, 1):
            if self._sums[side] > THRESHOLD:
                return self._change(self._runs[side], level_s)
        return None

    def _change(self, run: list[tuple[int, float]], level_s: float) -> Change | None:
        values = [value_s for _, value_s in run]
        after_s, before_s = statistics.median(values), self._reported_s or level_s
        self._windows_s = values[-LEVEL_WINDOWS:]
        self._sums, self._runs = [0.0, 0.0], [[], []]
        if abs(after_s / before_s - 1) < MIN_CHANGE:
            self._reported_s = before_s  # slow changes accumulate until `MIN_CHANGE`
            return None
        self._reported_s = after_s
        return Change(run[0][0], before_s, after_s)
