"""A load for tests of sensor profiles: a trace has the power of this load, so its edges are exact and no GPU runs."""

import os
import time
from pathlib import Path

from nvml_library import Curve

from effllm.sensor_profile.record import LoadEdge

NS = 1_000_000_000


class KnownLoad:
    """Returns the times of the bursts in the power of a trace."""

    name = "the trace"

    def __init__(self, curve):
        self._curve = curve
        self._start_s = self._end_s = 0.0

    def start_stretches(self, stretches_s):
        self._start_s = time.monotonic()
        self._end_s = self._start_s + sum(stretches_s)

    def take_edges(self):
        curve = self._curve
        if time.monotonic() < self._end_s:
            return None
        edges = []
        for number in range(int(self._start_s / curve.period_s), int(self._end_s / curve.period_s) + 3):
            on_s = number * curve.period_s + curve._burst_start(number)
            edges += [
                LoadEdge(round(on_s * NS), True),
                LoadEdge(round((on_s + curve.duty * curve.period_s) * NS), False),
            ]
        return edges

    def close(self):
        pass


def of_trace():
    """Return the load of the first GPU in the trace that the variable NVML_TRACE names."""
    words = Path(os.environ["NVML_TRACE"]).read_text().split()
    [power] = [word.removeprefix("power=") for word in words if word.startswith("power=")]
    shape, low, high, period_s, duty, seed = power.split(":")
    return KnownLoad(Curve(shape, float(low), float(high), float(period_s), float(duty), int(seed)))
