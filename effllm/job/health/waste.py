"""Reports the start and the end of a time with idle GPUs, or without counted tokens. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from effllm import metrics
from effllm.records.job import ClusterReport, ClusterTotals
from effllm.records.rank import Event

#: GPUs are idle below the first share of busy time, and busy from the second share on.
IDLE_BELOW, BUSY_FROM = 0.2, 0.25
#: A change of state needs this many windows in a row, and this many seconds.
MIN_WINDOWS, MIN_S = 5, 60.0
#: If tokens are counted in bursts, tokens are missing after this many times the longest earlier gap.
BURST_GAPS = 3
#: If no tokens were ever counted, tokens are missing after this many windows.
NEVER_WINDOWS = 100
#: Data wait is evidence if it takes at least this share of the iteration time.
DATA_WAIT_FROM = 0.2

IDLE, BUSY, NO_TOKENS, TOKENS = "gpus_idle", "gpus_busy", "no_tokens", "tokens_again"


class WasteWatch:
    """Judges closed windows, except the first window, the last window and windows in warm-up.

    The time of phases (evaluation, checkpoint, generation) is not judged.

    Args:
        events: number of earlier events by kind; a restarted aggregator restores its state from these numbers.
        report: is called with each event.
    """

    def __init__(self, events: Mapping[str, int], report: Callable[[Event], None]) -> None:
        self._report = report
        self._is_idle = events.get(IDLE, 0) > events.get(BUSY, 0)
        self._lacks_tokens = events.get(NO_TOKENS, 0) > events.get(TOKENS, 0)
        self._others: deque[ClusterTotals] = deque(maxlen=1000)  # windows in a row that contradict the current state
        self._without_tokens = self._max_gap = 0  # numbers of windows
        self._without_tokens_s = 0.0

    def close(self, report: ClusterReport) -> None:
        window = report.last
        is_start = report.iteration_first <= 1 or report.warming_up
        if is_start or report.final or window.counts.iterations <= 0 or window.loop.generation_s > 0:
            return
        self._judge_gpus(report, window)
        self._judge_tokens(report, window)

    def _judge_gpus(self, report: ClusterReport, window: ClusterTotals) -> None:
        busy = window.devices.utilization_mean
        if not report.coverage.gpus_measured or busy is None:
            return
        is_other = busy >= BUSY_FROM if self._is_idle else busy < IDLE_BELOW
        if not is_other:
            self._others.clear()
            return
        self._others.append(window)
        seconds = sum(one.loop.time_s for one in self._others)
        if len(self._others) < MIN_WINDOWS or seconds < MIN_S:
            return
        self._is_idle = not self._is_idle
        mean = sum((one.devices.utilization_mean or 0.0) * one.loop.time_s for one in self._others) / seconds
        span = f"{100 * mean:.0f} % of the last {len(self._others)} windows ({seconds:.0f} s of iterations)"
        if self._is_idle:
            evidence = " and ".join(_evidence(window))
            text = f"the GPUs are idle: busy for {span}" + (f"; in the last window {evidence}" if evidence else "")
            self._report(Event(report.time_s, IDLE, text))
        else:
            self._report(Event(report.time_s, BUSY, f"the GPUs work again: busy for {span}"))
        self._others.clear()

    def _judge_tokens(self, report: ClusterReport, window: ClusterTotals) -> None:
        if window.counts.tokens or window.counts.prompt_tokens:
            self._max_gap = max(self._max_gap, self._without_tokens)
            self._without_tokens, self._without_tokens_s = 0, 0.0
            if self._lacks_tokens:
                self._lacks_tokens = False
                text = f"tokens are counted again at iteration {report.iteration}"
                self._report(Event(report.time_s, TOKENS, text))
            return
        self._without_tokens += 1
        self._without_tokens_s += window.loop.time_s
        counted = report.job.counts.tokens
        needed = max(MIN_WINDOWS, BURST_GAPS * self._max_gap + 1) if counted else NEVER_WINDOWS
        if self._lacks_tokens or self._without_tokens < needed or self._without_tokens_s < MIN_S:
            return
        if counted or window.constants.flops_per_token:
            self._lacks_tokens = True
            since = f"no tokens were counted in the last {self._without_tokens} windows"
            why = f"after {counted:,} tokens" if counted else "though the FLOPs of a token are known"
            self._report(Event(report.time_s, NO_TOKENS, f"{since}, {why}: no tokens/s, MFU and J/token"))


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
