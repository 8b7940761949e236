"""The difference of NVML's energy counter between the edges of a window."""

from __future__ import annotations

from importlib.metadata import version

import pynvml

from benchmarks.energy_driver import Calls, Reading, Tool, drive


class Counter(Tool):
    """Two readings of each GPU's counter."""

    name = "counter"
    version = f"nvidia-ml-py {version('nvidia-ml-py')}"

    def __init__(self, gpus: int) -> None:
        pynvml.nvmlInit()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(gpus)]
        self._at_begin: dict[int, list[int]] = {}
        self._at_end: dict[int, list[int]] = {}

    def begin(self, key: int) -> None:
        self._at_begin[key] = self._read()

    def end(self, key: int) -> None:
        self._at_end[key] = self._read()

    def reading(self, key: int, calls: Calls) -> Reading:
        """Return the differences of the counters; start and end are the middles of the two calls."""
        joules = [(late - early) / 1e3 for early, late in zip(self._at_begin[key], self._at_end[key], strict=True)]
        return Reading((calls.begin_ns + calls.begun_ns) // 2, (calls.end_ns + calls.ended_ns) // 2, joules)

    def close(self) -> None:
        pynvml.nvmlShutdown()

    def _read(self) -> list[int]:
        return [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in self._handles]


if __name__ == "__main__":
    drive(Counter)
