"""Times of named parts of an iteration."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from effllm.instruments._device import cuda_index, first_line, has_context, is_checked
from effllm.instruments._number import UserWarnings, record
from effllm.instruments._statistics import MAX_RECENT, NAN, Statistics, percentiles_of

#: Timer of whole iterations; the shares of all other timers are shares of this timer.
ITERATION = "iteration"
#: If a timer has this many pairs of events that the device has not reached, its further times are not measured.
MAX_PENDING = 256
MAX_NAMES = 256


class _Timed:
    __slots__ = ("in_block", "is_open", "not_measured", "pending", "record_as", "start", "statistics")

    def __init__(self, name: str) -> None:
        self.statistics = Statistics(MAX_RECENT)
        self.record_as = f"timing/{name}_seconds"
        self.is_open = self.in_block = False
        self.start: Any = None  # a time in ns, or an event
        self.pending: deque[tuple[Any, Any]] = deque()
        self.not_measured = 0

    def add(self, seconds: float) -> None:
        self.statistics.add(seconds)
        record(self.record_as, seconds)


class TrainingTimer:
    """Times named parts of an iteration, with calls, with ``with timer.time(name):``, or with ``@timer.time(name)``.

    On a GPU each start and stop records an event. The time of an event is read after the GPU has reached it, without a
    wait.
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
        self._timers: dict[str, _Timed] = {}
        self._free: list[Any] = []
        self._warn_once = UserWarnings()
        self._is_checked = False

    def start(self, name: str) -> None:
        """Begin a part."""
        timed = self._timers.get(name)
        if timed is None:
            if len(self._timers) >= MAX_NAMES:
                self._warn_once(f"more than {MAX_NAMES} timers: {name} is not measured")
                return
            timed = self._timers[name] = _Timed(name)
        if timed.is_open:
            self._warn_once(f"timer {name} was started twice without a stop; the first start does not count")
        timed.is_open = True
        timed.start = time.monotonic_ns() if self._index is None else self._event()

    def stop(self, name: str) -> float:
        """End a part; return its seconds, or NaN if they are not known yet, as on a GPU without ``sync``."""
        timed = self._timers.get(name)
        if timed is None or not timed.is_open:
            self._warn_once(f"timer {name} was stopped without a start; this stop is ignored")
            return NAN
        timed.is_open = False
        if self._index is None:
            seconds: float = (time.monotonic_ns() - timed.start) * 1e-9
            timed.add(seconds)
            return seconds
        return self._stop_on_device(timed)

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Time a block, or a function if used as a decorator; a part that raises an exception is measured too."""
        timed = self._timers.get(name)
        if timed is not None and timed.in_block:
            yield
            return
        self.start(name)  # replaces an earlier `start` without a stop, as after an exception
        timed = self._timers.get(name)
        if timed is None:
            yield
            return
        timed.in_block = True
        try:
            yield
        finally:
            timed.in_block = False
            self.stop(name)

    def get_summary(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each timer in seconds, and its share of the timer ``iteration``; NaN if not known.

        ``percentiles_of`` is the number of times from which the percentiles were computed.  ``percentiles_are`` is
        ``exact``, ``newest`` or ``estimated``, as in `MetricTracker.get_summary`.

        This call sorts the newest times of each timer on the calling thread: call it after an epoch, not in every step.
        """
        for timed in self._timers.values():
            self._read_passed(timed)
        whole = self._timers.get(ITERATION)
        total_s = whole.statistics.moments.total if whole is not None else 0.0
        return {name: _summary(timed, total_s) for name, timed in self._timers.items()}

    # --- on a GPU ---

    def _event(self) -> Any:
        """Record an event on the device's stream; ``None`` without a context, in a capture, or after an error."""
        try:
            cuda: Any = sys.modules["torch"].cuda
            if not has_context(self._index or 0) or cuda.is_current_stream_capturing():
                return None
            event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
            event.record(cuda.current_stream(self._index))
        except Exception as error:  # noqa: BLE001 - the loop must go on
            self._warn_of(error)
            return None
        return event

    def _stop_on_device(self, timed: _Timed) -> float:
        self._read_passed(timed)
        start, timed.start = timed.start, None
        end = self._event() if start is not None and len(timed.pending) < MAX_PENDING else None
        if not self._is_checked:
            self._is_checked = is_checked(self._index or 0)
        if end is None:
            timed.not_measured += 1
            return NAN
        timed.pending.append((start, end))
        if not self._sync:
            return NAN
        return timed.statistics.recent[-1] if self._read_passed(timed, wait_for=end) else NAN

    def _read_passed(self, timed: _Timed, wait_for: Any = None) -> bool:
        """Add the times whose events the device has passed; ``False`` if an event cannot be read."""
        try:
            if wait_for is not None:
                wait_for.synchronize()
            while timed.pending and timed.pending[0][1].query():
                start, end = timed.pending[0]
                timed.add(start.elapsed_time(end) * 1e-3)
                timed.pending.popleft()
                self._free += (start, end)
        except Exception as error:  # noqa: BLE001 - the loop must go on
            timed.not_measured += len(timed.pending)
            timed.pending.clear()
            self._warn_of(error)
            return False
        return True

    def _warn_of(self, error: Exception) -> None:
        self._warn_once(f"times on cuda:{self._index} cannot be read and are not measured: {first_line(error)}")


def _summary(timed: _Timed, total_s: float) -> dict[str, Any]:
    known, shown = timed.statistics.moments, percentiles_of(timed.statistics, timed.record_as)
    found = {
        "count": known.count,
        "mean_sec": known.mean,
        "std_sec": known.std,
        "min_sec": known.minimum if known.count else NAN,
        "max_sec": known.maximum if known.count else NAN,
        "p50_sec": shown.values[50],
        "p95_sec": shown.values[95],
        **shown.coverage(),
        "total_sec": known.total,
        "share_of_iteration": known.total / total_s if total_s > 0 else NAN,
    }
    missing = timed.not_measured + len(timed.pending)
    return {**found, "not_measured": missing} if missing else found
