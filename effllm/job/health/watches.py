"""What closed windows show: idle GPUs, and errors of the energy. No I/O."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from effllm import metrics
from effllm.records.job import ClusterReport, ClusterTotals
from effllm.records.rank import Event, RankReport

#: GPUs are idle below the first share of busy time, and busy from the second share on.
IDLE_BELOW, BUSY_FROM = 0.2, 0.25
#: A change of state needs this many windows in a row, and this many seconds.
MIN_WINDOWS, MIN_S = 5, 60.0
#: Data wait is evidence if it takes at least this share of the iteration time.
DATA_WAIT_FROM = 0.2

#: Number of consecutive windows with synchronous iterations that cause an event.
MIN_SYNCHRONOUS = 3
#: Number of last windows that are judged for their length, and the minimum number for a judgement.
JUDGED_WINDOWS, MIN_JUDGED = 9, 5

IDLE, BUSY = "gpus_idle", "gpus_busy"


class WasteWatch:
    """Reports when GPUs become idle and when they work again; the first, the last and warm-up windows do not count.

    The time of phases (evaluation, checkpoint, generation) is not judged.  A restarted aggregator restores the state
    from ``events``, the numbers of earlier events by kind.
    """

    def __init__(self, events: Mapping[str, int], report: Callable[[Event], None]) -> None:
        self._report = report
        self._is_idle = events.get(IDLE, 0) > events.get(BUSY, 0)
        self._contrary: deque[ClusterTotals] = deque(maxlen=1000)  # windows in a row that contradict the current state

    def judge_window(self, report: ClusterReport) -> None:
        window = report.last
        is_start = report.iteration_first <= 1 or report.warming_up
        if is_start or report.final or window.counts.iterations <= 0 or window.loop.generation_s > 0:
            return
        busy = window.devices.utilization_mean
        if not report.coverage.gpus_measured or busy is None:
            return
        is_contrary = busy >= BUSY_FROM if self._is_idle else busy < IDLE_BELOW
        if not is_contrary:
            self._contrary.clear()
            return
        self._contrary.append(window)
        total_s = sum(window.loop.time_s for window in self._contrary)
        if len(self._contrary) < MIN_WINDOWS or total_s < MIN_S:
            return
        self._is_idle = not self._is_idle
        busy_s = sum((window.devices.utilization_mean or 0.0) * window.loop.time_s for window in self._contrary)
        percent, num_windows = 100 * (busy_s / total_s), len(self._contrary)
        span = f"{percent:.0f} % of the last {num_windows} windows ({total_s:.0f} s of iterations)"
        if self._is_idle:
            evidence = " and ".join(_evidence(window))
            text = f"the GPUs are idle: busy for {span}" + (f"; in the last window {evidence}" if evidence else "")
            self._report(Event(report.time_s, IDLE, text))
        else:
            self._report(Event(report.time_s, BUSY, f"the GPUs work again: busy for {span}"))
        self._contrary.clear()


def _evidence(window: ClusterTotals) -> list[str]:
    """Return further evidence of idle GPUs: the power per GPU with its limit, and a long data wait."""
    texts = []
    watts = metrics.energy.watts_per_gpu(window)
    if watts is not None:
        limit_w, gpus = window.constants.power_limit_w, window.constants.gpus
        limit = f" of {limit_w / gpus:.0f} W" if limit_w and gpus else " W"
        texts.append(f"{watts:.0f}{limit} per GPU")
    wait = metrics.throughput.data_wait_ratio(window)
    if wait is not None and wait >= DATA_WAIT_FROM:
        texts.append(f"{100 * wait:.0f} % of the time waiting for data")
    return texts


class EnergyWatch:
    """Reports iterations that are synchronous with power sensors, and windows that are too short for the sensors.

    Each kind of event is reported once per job, also by a restarted aggregator.
    """

    def __init__(self, is_reported: Callable[[str], bool], report: Callable[[Event], None]) -> None:
        self._is_reported, self._report = is_reported, report
        self._num_synchronous = 0  # number of consecutive windows with synchronous iterations
        self._were_imprecise: deque[bool] = deque(maxlen=JUDGED_WINDOWS)  # the energy of the last windows

    def judge_window(self, rows: Sequence[RankReport], report: ClusterReport) -> None:
        self._judge_synchrony(rows, report.time_s)
        if not report.final:
            self._judge_length(report)

    def _judge_synchrony(self, rows: Sequence[RankReport], time_s: float) -> None:
        errors = [row.aliasing_error for row in rows if row.aliasing_error is not None]
        self._num_synchronous = self._num_synchronous + 1 if errors else 0
        if self._num_synchronous < MIN_SYNCHRONOUS or self._is_reported("energy_aliasing"):
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
        self._were_imprecise.append(not metrics.table.is_energy_precise(report.last))
        if len(self._were_imprecise) < MIN_JUDGED or 2 * sum(self._were_imprecise) <= len(self._were_imprecise):
            return
        text = (
            f"most windows are too short for the power sensors: the error of their energy exceeds "
            f"±{100 * metrics.table.MAX_SHOWN_ERROR:.0f} %, so it is not shown; windows four times as long "
            "(EFFICIENTLLM_LOG_INTERVAL) have at most half of the error; values of the run to date are not affected"
        )
        self._report(Event(report.time_s, "energy_doubtful", text))
