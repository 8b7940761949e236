"""Instruments for memory and time: ``from effllm.instruments.profiling import ComprehensiveProfiler``."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from effllm.instruments._files import write_json
from effllm.instruments.memory import GPUMemoryProfiler
from effllm.instruments.throughput import ThroughputTracker
from effllm.instruments.timer import ITERATION, TrainingTimer
from effllm.memory.trend import MemoryTrend

__all__ = ["ComprehensiveProfiler", "GPUMemoryProfiler", "MemoryTrend", "ThroughputTracker", "TrainingTimer"]

#: After these iterations, memory is read at most once per `MEMORY_EVERY_S`: a read takes 40 us, in a loop up to 150 us.
ALL_MEMORY_ITERATIONS = 256
MEMORY_EVERY_S = 0.25


class ComprehensiveProfiler:
    """Measures memory, time and throughput of each iteration between `start_iteration` and `end_iteration`.

    The attributes ``memory``, ``timer`` and ``throughput`` are its instruments, to which tags and timers can be added.

    Args:
        device: an index, ``"cuda:1"``, ``"cpu"``, or ``None`` for the only device that is used, else the current one.
        window_size: number of newest iterations for the throughput.
        sync: wait for the GPU at each stop of a timer; this slows the training.

    Raises:
        UnknownDevice: the device cannot exist.
    """

    def __init__(self, device: Any = 0, window_size: int = 100, sync: bool = False) -> None:
        self.device = device
        self.memory = GPUMemoryProfiler(device)
        self.timer = TrainingTimer(device, sync)
        self.throughput = ThroughputTracker(window_size)
        self._iterations = 0
        self._memory_at_s = 0.0  # time of the next read of memory
        self._has_begun = False

    def start_iteration(self) -> None:
        """Begin an iteration."""
        if not self._has_begun:
            self._has_begun = True
            self.throughput.start()
        self.timer.start(ITERATION)

    def end_iteration(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """End an iteration with its samples and tokens; its memory is not read in every iteration."""
        self.timer.stop(ITERATION)
        self.throughput.update(num_samples, num_tokens)
        self._iterations += 1
        now_s = time.monotonic()
        if self._iterations <= ALL_MEMORY_ITERATIONS or now_s >= self._memory_at_s:
            self._memory_at_s = now_s + MEMORY_EVERY_S
            self.memory.measure(ITERATION, self._iterations)

    def get_summary(self) -> dict[str, Any]:
        """Return the statistics of all three instruments; takes milliseconds, as `TrainingTimer.get_summary`."""
        return {
            "timestamp": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": self.device if isinstance(self.device, int | str | None) else str(self.device),
            "memory": self.memory.get_summary(),
            "timing": self.timer.get_summary(),
            "throughput": self.throughput.get_average_throughput(),
        }

    def export_to_json(self, path: str | Path) -> Path:
        """Write the statistics as JSON, with ``null`` for unmeasured values; return the path.

        The calling thread computes the statistics and writes the file: call it after an epoch, not in every step.

        Raises:
            OSError: the file cannot be written.
        """
        return write_json(path, self.get_summary())
