"""GPM: the activity of SMs, tensor cores and memory of a Hopper or later GPU, from pairs of NVML samples.

GPM is a separate unit in the GPU and takes no lock that a profiler needs.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pynvml

NS = 1e-9

#: Minimal time between the two samples of a pair (NVML documentation of nvmlGpmMetricsGet).
MIN_APART_S = 0.1

_METRICS = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: "sm_activity_ratio",
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_activity_ratio",
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_activity_ratio",
}


class Gpm:
    """The activity of a GPU, or of one of its GPU instances, since the last read.

    Args:
        handle: the handle of the GPU.
        instance: id of the GPU instance of a MIG slice; its compute instances have no activity of their own.
    """

    def __init__(self, handle: Any, instance: int | None) -> None:
        self._handle, self._instance = handle, instance
        self._samples: list[Any] = []
        self._last_s: float | None = None
        self._asked = pynvml.c_nvmlGpmMetricsGet_t(
            version=pynvml.NVML_GPM_METRICS_GET_VERSION, numMetrics=len(_METRICS)
        )
        for place, metric in enumerate(_METRICS):
            self._asked.metrics[place].metricId = metric
        self._answers = [(self._asked.metrics[place], name) for place, name in enumerate(_METRICS.values())]

    def open(self) -> None:
        self._last_s = None
        with suppress(pynvml.NVMLError):
            self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]

    def enter(self, gauges: dict[str, float], failures: dict[str, str], time_ns: int) -> None:
        """Add the activities since the last read to ``gauges``; the first read, and a read too soon, add nothing."""
        now_s = time_ns * NS
        if not self._samples or (self._last_s is not None and now_s - self._last_s < MIN_APART_S):
            return
        before, now = self._samples
        try:
            if self._instance is None:
                pynvml.nvmlGpmSampleGet(self._handle, now)
            else:
                pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, now)
            is_first, self._last_s = self._last_s is None, now_s
            self._samples = [now, before]
            if not is_first:
                self._asked.sample1, self._asked.sample2 = before, now
                pynvml.nvmlGpmMetricsGet(self._asked)
                self._take(gauges)
        except pynvml.NVMLError as error:
            failures["gpm"] = str(error)

    def close(self) -> None:
        for sample in self._samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []

    def _take(self, gauges: dict[str, float]) -> None:
        for answer, name in self._answers:
            percent = answer.value
            if answer.nvmlReturn == pynvml.NVML_SUCCESS and 0.0 <= percent <= 100.0:  # false for nan
                gauges[name] = percent / 100


def open_gpm(handle: Any, instance: int | None) -> Gpm | None:
    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
    except pynvml.NVMLError:
        return None
    gpm = Gpm(handle, instance)
    gpm.open()
    return gpm
