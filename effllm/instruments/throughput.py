"""Samples and tokens per second of a training loop."""

from __future__ import annotations

import time
import warnings
from collections import deque
from typing import Any

from effllm.instruments._number import whole
from effllm.instruments._statistics import NAN


class ThroughputTracker:
    """Counts samples and tokens between calls of `update`.

    The time begins at the first `update`, whose own counts do not enter: their work was done before it.  `start` lets
    it begin earlier.  What is not measured is NaN.

    Args:
        window_size: number of newest updates for `get_current_throughput`.
    """

    def __init__(self, window_size: int = 100) -> None:
        if window_size < 1:
            raise ValueError(f"window_size={window_size} must be at least 1")
        self._first: tuple[float, int, int] | None = None
        self._samples = self._tokens = 0
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=window_size + 1)  # time, total samples and tokens
        self._has_tokens = False

    def start(self) -> None:
        """Begin the time now, before the work of the first `update`."""
        self._mark(time.monotonic())

    def update(self, num_samples: int = 0, num_tokens: int = 0) -> None:
        """Count the work that has just ended."""
        now_s = time.monotonic()
        counts = [whole(one) for one in (num_samples, num_tokens)]
        if None in counts:
            warnings.warn("ThroughputTracker.update takes counts of at least 0; others are not counted", stacklevel=2)
        if self._first is not None:
            self._samples += counts[0] or 0
            self._tokens += counts[1] or 0
        self._has_tokens = self._has_tokens or bool(counts[1])
        self._mark(now_s)

    def _mark(self, now_s: float) -> None:
        mark = (now_s, self._samples, self._tokens)
        self._first = self._first or mark
        self._recent.append(mark)

    def get_current_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over the newest updates."""
        return self._rates(self._recent[0] if self._recent else None)

    def get_average_throughput(self) -> dict[str, float]:
        """Return samples and tokens per second over all updates."""
        return self._rates(self._first)

    def _rates(self, first: Any) -> dict[str, float]:
        seconds = self._recent[-1][0] - first[0] if first is not None else 0.0
        if seconds <= 0:
            return {"samples_per_sec": NAN, "tokens_per_sec": NAN}
        _, samples, tokens = self._recent[-1]
        per_token = (tokens - first[2]) / seconds if self._has_tokens else NAN
        return {"samples_per_sec": (samples - first[1]) / seconds, "tokens_per_sec": per_token}
