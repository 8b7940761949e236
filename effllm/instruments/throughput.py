"""Samples and tokens per second of a training loop."""

from __future__ import annotations

import time
from collections import deque

from effllm.instruments._number import MAX_WHOLE, UserWarnings, record, whole
from effllm.instruments._statistics import NAN

#: A time in seconds, with the totals of all updates until then: samples, updates with an unreadable number of samples,
#: tokens, updates with an unreadable number of tokens.  A plain tuple, because `update` is called with cold caches.
_Mark = tuple[float, int, int, int, int]
_UNREADABLE = "ThroughputTracker.update was given a count below 0 or a tensor on a GPU; rates with this count are NaN"


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
