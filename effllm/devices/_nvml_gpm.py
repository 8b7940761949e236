"""GPM: how busy SMs, tensor cores and memory of a Hopper or later GPU are, from pairs of NVML's samples.

It is a unit of its own in the GPU and takes no lock that a profiler needs.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pynvml

#: Samples nearer than this tell nothing (NVML documentation of nvmlGpmMetricsGet).
LEAST_APART_S = 0.1

_METRICS = {
    pynvml.NVML_GPM_METRIC_SM_UTIL: "sm_activity_ratio",
    pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL: "tensor_activity_ratio",
    pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL: "dram_activity_ratio",
}


class Gpm:
    """The activity of a GPU, or of one GPU instance of it, since the read before.

    Args:
        handle: the GPU's.
        instance: id of the GPU instance, for a MIG slice.
    """

    def __init__(self, handle: Any, instance: int | None) -> None:
        self._handle, self._instance = handle, instance
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self._last_s: float | None = None

    def read(self) -> dict[str, float]:
        """Return the activities since the read before; nothing at the first read or too soon after one.

        Raises:
            pynvml.NVMLError: the sample cannot be taken.
        """
        now_s = time.monotonic()
        if self._last_s is not None and now_s - self._last_s < LEAST_APART_S:
            return {}
        before, now = self._samples
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self._handle, now)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, now)
        is_first, self._last_s = self._last_s is None, now_s
        self._samples = [now, before]
        return {} if is_first else self._between(before, now)

    def close(self) -> None:
        """Let the samples go."""
        for sample in self._samples:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []

    def _between(self, before: Any, now: Any) -> dict[str, float]:
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(_METRICS)
        asked.sample1, asked.sample2 = before, now
        for place, metric in enumerate(_METRICS):
            asked.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(asked)
        told = {}
        for place, name in enumerate(_METRICS.values()):
            metric = asked.metrics[place]
            if metric.nvmlReturn == pynvml.NVML_SUCCESS and 0.0 <= metric.value <= 100.0:
                told[name] = metric.value / 100
        return told


def open_gpm(handle: Any, instance: int | None) -> Gpm | None:
    """Return the activity counters of a GPU, or ``None`` where it has none."""
    try:
        if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return None
        return Gpm(handle, instance)
    except pynvml.NVMLError:
        return None
