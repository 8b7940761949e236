"""Instruments for memory, time and throughput: ``from effllm.instruments.profiling import ComprehensiveProfiler``."""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from effllm.instruments._files import write_json
from effllm.instruments._number import MAX_WHOLE, UserWarnings, record, whole
from effllm.instruments._statistics import NAN
from effllm.instruments.memory import GPUMemoryProfiler
from effllm.instruments.timer import ITERATION, TrainingTimer
from effllm.memory.trend import MemoryTrend

__all__ = ["ComprehensiveProfiler", "GPUMemoryProfiler", "MemoryTrend", "ThroughputTracker", "TrainingTimer"]

#: After these iterations, memory is read at most once per `MEMORY_EVERY_S`: a read takes 40 us, in a loop up to 150 us.
ALL_MEMORY_ITERATIONS = 256
MEMORY_EVERY_S = 0.25
#: A time in seconds, with the totals of all updates until then: samples, updates with an unreadable number of samples,
#: tokens, updates with an unreadable number of tokens.  A plain tuple, because `update` is called with cold caches.
_Mark = tuple[float, int, int, int, int]
_UNREADABLE = "ThroughputTracker.update was given a count below 0 or a tensor on a GPU; rates with this count are NaN"


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


class ThroughputTracker:
    """Counts samples and tokens between calls of `update`.

    The time begins at the first `update`, whose counts are left out, because the work was done earlier.  If
    `start` is called earlier, the time begins at this call.  Unmeasured values are NaN, for example a rate over an
    update with an unreadable count.

    Args:
        window_size: number of newest updates for `get_current_throughput`.
    """

    def __init__(self, window_size: int = 100) -> None:
        if window_size < 1:
            raise ValueError(f"window_size={window_size} must be at least 1")
        self._first: _Mark | None = None
        self._recent: deque[_Mark] = deque(maxlen=window_size + 1)
        self._warn_once = UserWarnings()

    def start(self) -> None:
        """Begin the time now, before the work of the first `update`."""
        self._begin(time.monotonic())

    def update(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count the work that has just ended."""
        now_s = time.monotonic()
        samples = num_samples if type(num_samples) is int and 0 <= num_samples < MAX_WHOLE else whole(num_samples)
        tokens = num_tokens if type(num_tokens) is int and 0 <= num_tokens < MAX_WHOLE else whole(num_tokens)
        if samples is None or tokens is None:
            self._warn_once(_UNREADABLE)
        if self._first is None:
            self._begin(now_s)
            return
        before_s, all_samples, samples_unknown, all_tokens, tokens_unknown = self._recent[-1]
        self._recent.append(
            (
                now_s,
                all_samples + (samples or 0),
                samples_unknown + (samples is None),
                all_tokens + (tokens or 0),
                tokens_unknown + (tokens is None),
            )
        )
        record("throughput/update_seconds", now_s - before_s)
        record("throughput/samples", NAN if samples is None else float(samples))
        record("throughput/tokens", NAN if tokens is None else float(tokens))

    def _begin(self, now_s: float) -> None:
        _, *totals = self._recent[-1] if self._recent else (0.0, 0, 0, 0, 0)
        mark: _Mark = (now_s, totals[0], totals[1], totals[2], totals[3])
        self._first = self._first or mark
        self._recent.append(mark)

    def get_current_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over the newest updates."""
        return self._rates(self._recent[0] if self._recent else None)

    def get_average_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over all updates."""
        return self._rates(self._first)

    def _rates(self, first: _Mark | None) -> dict[str, float]:
        if first is None:
            return {"samples_per_sec": NAN, "tokens_per_sec": NAN}
        last = self._recent[-1]
        time_s = last[0] - first[0]
        return {
            "samples_per_sec": _rate(first[1:3], last[1:3], time_s),
            "tokens_per_sec": _rate(first[3:], last[3:], time_s),
        }


def _rate(first: tuple[int, ...], last: tuple[int, ...], time_s: float) -> float:
    """Return the count per second between two totals; NaN if a count between them is unknown, or none was given."""
    (count_before, unknown_before), (count, unknown) = first, last
    if time_s <= 0 or not (count or unknown) or unknown != unknown_before:
        return NAN
    return (count - count_before) / time_s
