"""CodeCarbon: `OfflineEmissionsTracker.start_task` and `stop_task`, which read the counters at the edges.

A task's energy is one sum over all GPUs.  The energy of each GPU is read from CodeCarbon's devices; the sum of these
energies must equal the task's result.
"""

from __future__ import annotations

from importlib.metadata import version

from codecarbon import OfflineEmissionsTracker
from codecarbon.external.hardware import GPU

from benchmarks.energy_driver import Calls, Reading, Tool, drive

JOULES_PER_KWH = 3.6e6


class CodeCarbon(Tool):
    """One tracker of all GPUs, the CPU and the memory, which is CodeCarbon's default; it writes no files."""

    name = "CodeCarbon"
    version = version("codecarbon")

    def __init__(self, gpus: int) -> None:
        self._tracker = OfflineEmissionsTracker(
            country_iso_code="USA", save_to_file=False, log_level="critical", allow_multiple_runs=True
        )
        self._tracker.start_task("warm-up")  # the first task searches for hardware, which takes seconds
        self._tracker.stop_task()
        (self._devices,) = [
            hardware.devices.devices for hardware in self._tracker._hardware if isinstance(hardware, GPU)
        ]
        assert len(self._devices) == gpus
        self._joules: dict[int, list[float]] = {}
        self._edges_ns: dict[int, tuple[int, int]] = {}

    def begin(self, key: int) -> None:
        self._tracker.start_task(str(key))

    def end(self, key: int) -> None:
        """Stop the task, and record the energy of each GPU."""
        said = self._tracker.stop_task()
        self._joules[key] = [device.energy_delta.kWh * JOULES_PER_KWH for device in self._devices]
        # The task's clock is perf_counter, which on Linux is the monotonic clock.
        start_s = self._tracker._tasks[str(key)].start_time
        self._edges_ns[key] = int(start_s * 1e9), int((start_s + said.duration) * 1e9)
        assert abs(sum(self._joules[key]) - said.gpu_energy * JOULES_PER_KWH) < 0.1

    def reading(self, key: int, calls: Calls) -> Reading:
        """Return the energies, with the task's own start and end."""
        assert calls.begin_ns <= self._edges_ns[key][0] and self._edges_ns[key][1] <= calls.ended_ns
        return Reading(*self._edges_ns[key], list(self._joules[key]))

    def close(self) -> None:
        self._tracker.stop()


if __name__ == "__main__":
    drive(CodeCarbon)
