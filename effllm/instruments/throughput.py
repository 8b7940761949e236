"""Samples and tokens per second of a training loop."""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Any

from effllm.instruments._active_run import record
from effllm.instruments._number import whole
from effllm.instruments._statistics import NAN


class _Total:
    """Samples or tokens so far."""

    __slots__ = ("count", "is_given", "num_unknown")

    def __init__(self) -> None:
        self.count = self.num_unknown = 0
        self.is_given = False

    def add(self, count: int | None) -> None:
        self.count += count or 0
        self.num_unknown += count is None
        self.is_given = self.is_given or count != 0

    def mark(self) -> tuple[int, int]:
        return self.count, self.num_unknown

    def rate(self, first: tuple[int, int], last: tuple[int, int], seconds: float) -> float:
        """Return the count per second between two marks; NaN if a count between them is unknown, or none was given."""
        if seconds <= 0 or not self.is_given or first[1] != last[1]:
            return NAN
        return (last[0] - first[0]) / seconds


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
        self._first: tuple[float, Any, Any] | None = None
        self._samples, self._tokens = _Total(), _Total()
        self._recent: deque[tuple[float, Any, Any]] = deque(maxlen=window_size + 1)  # time, totals then
        self._has_warned = False

    def start(self) -> None:
        """Begin the time now, before the work of the first `update`."""
        self._mark(time.monotonic())

    def update(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count the work that has just ended."""
        now_s = time.monotonic()
        samples, tokens = whole(num_samples), whole(num_tokens)
        if None in (samples, tokens) and not self._has_warned:
            self._has_warned = True
            line = (
                "ThroughputTracker.update was given a count below 0 or a tensor on a GPU; rates with this count are NaN"
            )
            warnings.warn(line, stacklevel=2)
        if self._first is not None:
            self._samples.add(samples)
            self._tokens.add(tokens)
            record("throughput/update_seconds", now_s - self._recent[-1][0])
            record("throughput/samples", NAN if samples is None else float(samples))
            record("throughput/tokens", NAN if tokens is None else float(tokens))
        self._mark(now_s)

    def _mark(self, now_s: float) -> None:
        mark = (now_s, self._samples.mark(), self._tokens.mark())
        self._first = self._first or mark
        self._recent.append(mark)

    def get_current_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over the newest updates."""
        return self._rates(self._recent[0] if self._recent else None)

    def get_average_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over all updates."""
        return self._rates(self._first)

    def _rates(self, first: Any) -> dict[str, float]:
        if first is None:
            return {"samples_per_sec": NAN, "tokens_per_sec": NAN}
        now_s, samples, tokens = self._recent[-1]
        return {
            "samples_per_sec": self._samples.rate(first[1], samples, now_s - first[0]),
            "tokens_per_sec": self._tokens.rate(first[2], tokens, now_s - first[0]),
        }
