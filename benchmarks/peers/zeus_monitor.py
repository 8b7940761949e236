"""Zeus: `ZeusMonitor.begin_window` and `end_window`, as in its documentation.

Both calls read the clock before the counters, so the starts of the calls are the edges of Zeus's window.
``sync_execution`` is off, because this process does not use torch and starts no work on a GPU.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version

from zeus.monitor import ZeusMonitor

from benchmarks.energy_driver import Calls, Reading, Tool, drive


class Zeus(Tool):
    """One monitor of all GPUs."""

    name = "Zeus"
    version = version("zeus")

    def __init__(self, gpus: int) -> None:
        warnings.simplefilter("ignore")  # Zeus warns of windows shorter than the counter's tick
        self._gpus = range(gpus)
        self._monitor = ZeusMonitor(gpu_indices=list(self._gpus))
        assert self._monitor.power_monitor is None, "Zeus takes these GPUs for older than Volta"
        self._joules: dict[int, dict[int, float]] = {}

    def begin(self, key: int) -> None:
        self._monitor.begin_window(str(key), sync_execution=False)

    def end(self, key: int) -> None:
        self._joules[key] = self._monitor.end_window(str(key), sync_execution=False).gpu_energy

    def reading(self, key: int, calls: Calls) -> Reading:
        """Return the energies from the start of `begin` to the start of `end`."""
        return Reading(calls.begin_ns, calls.end_ns, [self._joules[key][index] for index in self._gpus])


if __name__ == "__main__":
    drive(Zeus)
