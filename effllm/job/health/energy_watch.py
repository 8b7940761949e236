"""Errors of the energy of a whole job: reported once for the job. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from effllm import metrics
from effllm.records.job import ClusterReport
from effllm.records.rank import Event, RankReport

#: An event needs this many windows in a row in which iterations keep step with a sensor.
HELD_WINDOWS = 3
#: Windows are judged too short by this many of the last ones, and by the second number of them at least.
JUDGED_WINDOWS, MIN_JUDGED = 9, 5


class EnergyWatch:
    """Reports that iterations keep step with power sensors, and that windows are too short for them.

    Args:
        is_reported: whether the job has an event of this kind already, from an aggregator before this one too.
        report: takes an event.
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
            f"on {len(errors)} of {len(rows)} ranks iterations keep step with the power sensor, which measures a part "
            f"of each of its ticks: the energy of a GPU may be off by up to {percent} % in the run to date, "
            "in the same way in every window; over many GPUs it averages out"
        )
        self._report(Event(time_s, "energy_aliasing", text))

    def _judge_length(self, report: ClusterReport) -> None:
        if metrics.energy.timing_error_ratio(report.last) is None or self._is_reported("energy_doubtful"):
            return
        self._unknown.append(not metrics.ratios.is_energy_known(report.last))
        if len(self._unknown) < MIN_JUDGED or 2 * sum(self._unknown) <= len(self._unknown):
            return
        text = (
            f"most windows are too short for the power sensors: their energy is known to worse than "
            f"±{100 * metrics.ratios.MAX_SHOWN_ERROR:.0f} % and not shown; windows four times as long "
            "(EFFICIENTLLM_LOG_INTERVAL) have half of that error or less; values of the run to date are not affected"
        )
        self._report(Event(report.time_s, "energy_doubtful", text))
