"""Instruments for memory, time and throughput: ``from effllm.instruments.profiling import ComprehensiveProfiler``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from effllm.instruments._device import cuda_index, first_line, has_context, warn_of_other_device
from effllm.instruments._files import write_json
from effllm.instruments._number import MAX_WHOLE, UserWarnings, record, to_count
from effllm.instruments._statistics import MAX_RECENT, NAN, Statistics, percentiles_of
from effllm.instruments.memory import GPUMemoryProfiler
from effllm.memory.watch import MemoryTrend

__all__ = ["ComprehensiveProfiler", "GPUMemoryProfiler", "MemoryTrend", "ThroughputTracker", "TrainingTimer"]

#: After these iterations, memory is read at most once per `MEMORY_EVERY_S`: a read takes 40 us, in a loop up to 150 us.
ALL_MEMORY_ITERATIONS = 256
MEMORY_EVERY_S = 0.25
_UNREADABLE = "ThroughputTracker.update was given a count below 0 or a tensor on a GPU; rates with this count are NaN"
#: Timer of whole iterations; the shares of all other timers are shares of this timer.
ITERATION = "iteration"
#: If a timer has this many pairs of events that the device has not reached, its further times are not measured.
MAX_PENDING = 256
MAX_NAMES = 256


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
        self._next_memory_s = 0.0  # time of the next read of memory
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
        if self._iterations <= ALL_MEMORY_ITERATIONS or now_s >= self._next_memory_s:
            self._next_memory_s = now_s + MEMORY_EVERY_S
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
        self._first_s = 0.0  # start of the measured time
        self._samples = self._tokens = 0.0  # of all updates
        # The time of each update with its samples and tokens; NaN for a number that could not be read.
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=window_size + 1)
        self._warn_once = UserWarnings()

    def start(self) -> None:
        """Begin the time now, before the work of the first `update`."""
        self._begin_time(time.monotonic())

    def update(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count the work that has just ended."""
        now_s = time.monotonic()
        samples = num_samples if type(num_samples) is int and 0 <= num_samples < MAX_WHOLE else to_count(num_samples)
        tokens = num_tokens if type(num_tokens) is int and 0 <= num_tokens < MAX_WHOLE else to_count(num_tokens)
        if samples is None or tokens is None:
            self._warn_once(_UNREADABLE)
        if not self._recent:
            self._begin_time(now_s)
            return
        counts = NAN if samples is None else float(samples), NAN if tokens is None else float(tokens)
        record("throughput/update_seconds", now_s - self._recent[-1][0])
        record("throughput/samples", counts[0])
        record("throughput/tokens", counts[1])
        self._samples += counts[0]
        self._tokens += counts[1]
        self._recent.append((now_s, *counts))

    def _begin_time(self, now_s: float) -> None:
        self._first_s = self._first_s if self._recent else now_s
        self._recent.append((now_s, 0.0, 0.0))

    def get_current_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over the newest updates."""
        first, *later = self._recent or [(0.0, 0.0, 0.0)]
        return self._rates(first[0], sum(samples for _, samples, _ in later), sum(tokens for _, _, tokens in later))

    def get_average_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over all updates."""
        return self._rates(self._first_s, self._samples, self._tokens)

    def _rates(self, since_s: float, samples: float, tokens: float) -> dict[str, float]:
        """Return the counts per second; NaN if a count is unknown, or none was ever given."""
        time_s = self._recent[-1][0] - since_s if self._recent else 0.0
        return {
            "samples_per_sec": samples / time_s if self._samples and time_s > 0 else NAN,
            "tokens_per_sec": tokens / time_s if self._tokens and time_s > 0 else NAN,
        }


class _Timer:
    __slots__ = ("in_block", "is_started", "num_not_measured", "pending", "start", "statistics", "value_name")

    def __init__(self, name: str) -> None:
        self.statistics = Statistics(MAX_RECENT)
        self.value_name = f"timing/{name}_seconds"  # name of the times in the run folder
        self.is_started = self.in_block = False  # in_block: inside of `TrainingTimer.time`
        self.start: Any = None  # a time in ns, or an event
        self.pending: deque[tuple[Any, Any]] = deque()  # events of starts and stops that the device has not reached
        self.num_not_measured = 0

    def add(self, seconds: float) -> None:
        self.statistics.add(seconds)
        record(self.value_name, seconds)


class TrainingTimer:
    """Times named parts of an iteration, with calls, with ``with timer.time(name):``, or with ``@timer.time(name)``.

    On a GPU each start and stop records an event, whose time is read without a wait, after the GPU has reached it.
    Timers of different names may be nested.  Of nested blocks of one name, only the outermost block counts.  A second
    `start` before the stop replaces the first start, so that the time of a step that raised an exception is left out.

    Args:
        device: an index, ``"cuda:1"``, ``"cpu"``, or ``None`` for the only device that is used, else the current one.
        sync: wait for the GPU at each stop, so that `stop` returns the time; this slows the training.

    Raises:
        UnknownDevice: the device cannot exist.
    """

    def __init__(self, device: Any = 0, sync: bool = False) -> None:
        self.device = device
        self._index = cuda_index(device)
        self._sync = sync
        self._timers: dict[str, _Timer] = {}
        self._unused_events: list[Any] = []  # for further starts and stops
        self._warn_once = UserWarnings()
        self._is_device_checked = False  # see `warn_of_other_device`

    def start(self, name: str) -> None:
        """Begin a part."""
        timer = self._timers.get(name)
        if timer is None:
            if len(self._timers) >= MAX_NAMES:
                self._warn_once(f"more than {MAX_NAMES} timers: {name} is not measured")
                return
            timer = self._timers[name] = _Timer(name)
        if timer.is_started:
            self._warn_once(f"timer {name} was started twice without a stop; the first start does not count")
        timer.is_started = True
        timer.start = time.monotonic_ns() if self._index is None else self._record_event()

    def stop(self, name: str) -> float:
        """End a part; return its seconds, or NaN if they are not known yet, as on a GPU without ``sync``."""
        timer = self._timers.get(name)
        if timer is None or not timer.is_started:
            self._warn_once(f"timer {name} was stopped without a start; this stop is ignored")
            return NAN
        timer.is_started = False
        if self._index is None:
            seconds: float = (time.monotonic_ns() - timer.start) * 1e-9
            timer.add(seconds)
            return seconds
        return self._stop_on_device(timer)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time a block, or a function if used as a decorator; a part that raises an exception is measured too."""
        timer = self._timers.get(name)
        if timer is not None and timer.in_block:
            yield
            return
        self.start(name)  # replaces an earlier `start` without a stop, as after an exception
        timer = self._timers.get(name)
        if timer is None:
            yield
            return
        timer.in_block = True
        try:
            yield
        finally:
            timer.in_block = False
            self.stop(name)

    def get_summary(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each timer in seconds, and its share of the timer ``iteration``; NaN if not known.

        ``percentiles_of`` is the number of times from which the percentiles were computed.  ``percentiles_are`` is
        ``exact``, ``newest`` or ``estimated``, as in `MetricTracker.get_summary`.

        This call sorts the newest times of each timer on the calling thread: call it after an epoch, not in every step.
        """
        for timer in self._timers.values():
            self._add_reached_times(timer)
        iteration = self._timers.get(ITERATION)
        iterations_s = iteration.statistics.moments.total if iteration is not None else 0.0
        return {name: _summary(timer, iterations_s) for name, timer in self._timers.items()}

    # --- on a GPU ---

    def _record_event(self) -> Any:
        """Record an event on the device's stream; ``None`` without a context, in a capture, or after an error."""
        try:
            cuda: Any = sys.modules["torch"].cuda
            if not has_context(self._index or 0) or cuda.is_current_stream_capturing():
                return None
            event = self._unused_events.pop() if self._unused_events else cuda.Event(enable_timing=True)
            event.record(cuda.current_stream(self._index))
        except Exception as error:  # noqa: BLE001 - the loop must go on
            self._warn_of(error)
            return None
        return event

    def _stop_on_device(self, timer: _Timer) -> float:
        self._add_reached_times(timer)
        start, timer.start = timer.start, None
        end = self._record_event() if start is not None and len(timer.pending) < MAX_PENDING else None
        if not self._is_device_checked:
            self._is_device_checked = warn_of_other_device(self._index or 0)
        if end is None:
            timer.num_not_measured += 1
            return NAN
        timer.pending.append((start, end))
        if not self._sync:
            return NAN
        return timer.statistics.recent[-1] if self._add_reached_times(timer, wait_for=end) else NAN

    def _add_reached_times(self, timer: _Timer, wait_for: Any = None) -> bool:
        """Add the times whose events the device has reached; ``False`` if an event cannot be read."""
        try:
            if wait_for is not None:
                wait_for.synchronize()
            while timer.pending and timer.pending[0][1].query():
                start, end = timer.pending[0]
                timer.add(start.elapsed_time(end) * 1e-3)
                timer.pending.popleft()
                self._unused_events += (start, end)
        except Exception as error:  # noqa: BLE001 - the loop must go on
            timer.num_not_measured += len(timer.pending)
            timer.pending.clear()
            self._warn_of(error)
            return False
        return True

    def _warn_of(self, error: Exception) -> None:
        self._warn_once(f"times on cuda:{self._index} cannot be read and are not measured: {first_line(error)}")


def _summary(timer: _Timer, iterations_s: float) -> dict[str, Any]:
    moments, shown = timer.statistics.moments, percentiles_of(timer.statistics, timer.value_name)
    summary = {
        "count": moments.count,
        "mean_sec": moments.mean,
        "std_sec": moments.std,
        "min_sec": moments.minimum if moments.count else NAN,
        "max_sec": moments.maximum if moments.count else NAN,
        "p50_sec": shown["p50"],
        "p95_sec": shown["p95"],
        "percentiles_of": shown["percentiles_of"],
        "percentiles_are": shown["percentiles_are"],
        "total_sec": moments.total,
        "share_of_iteration": moments.total / iterations_s if iterations_s > 0 else NAN,
    }
    missing = timer.num_not_measured + len(timer.pending)
    return {**summary, "not_measured": missing} if missing else summary
