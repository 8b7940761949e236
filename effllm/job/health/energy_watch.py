"""Reports errors of a job's energy, each kind once per job. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from effllm import metrics
from effllm.records.job import ClusterReport
from effllm.records.rank import Event, RankReport

#: Number of consecutive windows with synchronous iterations that cause an event.
HELD_WINDOWS = 3
#: Number of last windows that are judged for their length, and the minimum number for a judgement.
JUDGED_WINDOWS, MIN_JUDGED = 9, 5


class EnergyWatch:
    """Reports iterations that are synchronous with power sensors, and windows that are too short for the sensors.

    Args:
        is_reported: returns whether the job already has an event of this kind, also from an earlier aggregator.
        report: is called with each event.
    """

    def __init__(self, is_reported: Callable[[str], bool], report: Callable[[Event], None]) -> None:
        self._is_reported, self._report = is_reported, report
        self._held = 0
        self._unknown: deque[bool] = deque(maxlen=JUDGED_WINDOWS)

    def close(self, rows: Sequence[RankReport], report: ClusterReport) -> None:
        self._judge_rhythm(rows, report.time_s)
        if not report.final:
            self._judge_length(report)

    def _judge_rhythm(self, rows: Sequence[RankReport], time_s: float) -> None:
        errors = [row.aliasing_error for row in rows if row.aliasing_error is not None]
        self._held = self._held + 1 if errors else 0
        if self._held < HELD_WINDOWS or self._is_reported("energy_aliasing"):
            return
        percent = min(math.ceil(100 * max(errors)), 100)
        text = (
            f"on {len(errors)} of {len(rows)} ranks iterations are synchronous with the power sensor, which measures "
            f"only a part of each tick: the energy of a GPU may be wrong by up to {percent} % in the run to date; "
            "the error is the same in every window, and averages out over many GPUs"
        )
        self._report(Event(time_s, "energy_aliasing", text))

    def _judge_length(self, report: ClusterReport) -> None:
        if metrics.energy.timing_error_ratio(report.last) is None or self._is_reported("energy_doubtful"):
            return
        self._unknown.append(not metrics.ratios.is_energy_known(report.last))
        if len(self._unknown) < MIN_JUDGED or 2 * sum(self._unknown) <= len(self._unknown):
            return
        text = (
            f"most windows are too short for the power sensors: the error of their energy exceeds "
            f"±{100 * metrics.ratios.MAX_SHOWN_ERROR:.0f} %, so it is not shown; windows four times as long "
            "(EFFICIENTLLM_LOG_INTERVAL) have at most half of the error; values of the run to date are not affected"
        )
        self._report(Event(report.time_s, "energy_doubtful", text))
