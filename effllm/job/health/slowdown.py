"""Detection of slower iterations, and of slower own times of ranks. No I/O."""

from __future__ import annotations

import statistics

from effllm.job.health.change_point import Change, WindowLevel
from effllm.records.rank import Event, RankReport

#: Windows shorter than this are judged together. The load of a host changes about every second, and affects many short
#: windows alike: a loop that only slept had 314 false changes in 73,009 windows of 13 ms.
JUDGED_S = 5.0
#: Number of windows before an unexplained change is reported: a rank may be named in this time.
PATIENCE = 2


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
