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
from effllm.records.rank import Event, RankReport

#: Windows shorter than this are judged together. The load of a host changes about every second, and affects many short
#: windows alike: a loop that only slept had 314 false changes in 73,009 windows of 13 ms.
JUDGED_S = 5.0
#: Number of windows before an unexplained change is reported: a rank may be named in this time.
PATIENCE = 2

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


class Slowdown:
    """Detects slower iterations, and longer own times of the ranks."""

    def __init__(self) -> None:
        self._whole, self._own = WindowLevel(), WindowLevel()
        self._change: Change | None = None  # a change that is not reported yet
        self._own_rose = 0  # iteration since which own times are longer, or 0
        self._patience = 0
        self._windows: list[
            tuple[int, float, float | None]
        ] = []  # first iteration, median iteration time, median own time
        self._windows_s = 0.0

    def add(self, row: RankReport, whole_s: float, own_s: float | None, is_explained: bool) -> Event | None:
        """Add the medians of a window; return an event if the job became slower or faster.

        Args:
            row: any report of the window.
            whole_s: median iteration time.
            own_s: median own time of the ranks, if known.
            is_explained: whether a named straggler explains slower iterations.
        """
        self._windows.append((row.iteration_shown - row.iterations + 1, whole_s, own_s))
        self._windows_s += whole_s * row.iterations
        if self._windows_s < JUDGED_S:
            return None
        shown = self._windows[0][0]
        whole_s = statistics.median(whole_s for _, whole_s, _ in self._windows)
        own_s = None if own_s is None else statistics.median(one for _, _, one in self._windows if one is not None)
        self._windows, self._windows_s = [], 0.0
        if own_s is not None and (own := self._own.add(shown, own_s)) is not None:
            self._own_rose = own.since if own.ratio > 0 else 0
        change = self._whole.add(shown, whole_s)
        if change is not None and change.ratio < 0:
            self._change = None
            return Event(row.end_time_s, "faster", f"faster: {_change_text(change)}")
        if change is not None:
            self._change, self._patience = change, PATIENCE
        elif self._change is not None:
            self._patience -= 1
        if self._change is None or (self._patience > 0 and not is_explained):
            return None
        change, self._change = self._change, None
        if is_explained:
            return None
        return Event(row.end_time_s, "slower", f"slower: {_change_text(change)}; {self._who(own_s)}")

    def _who(self, own_s: float | None) -> str:
        if own_s is None:
            return "ranks cannot be compared: no rank has a sync point (effllm.sync_point)"
        if self._own_rose:
            return "no rank is slower than others: own times are longer on all ranks"
        return (
            "no rank is slower than others: own times did not change, so communication, or work after the sync point, "
            "is slower"
        )


def _change_text(change: Change) -> str:
    return (
        f"iterations have taken {change.after_s:.3g} s since iteration {change.since}, and took "
        f"{change.before_s:.3g} s before ({100 * change.ratio:+.0f} %)"
    )
