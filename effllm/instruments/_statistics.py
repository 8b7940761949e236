"""Statistics of one series of numbers in bounded memory: exact sums of all values, and the newest values."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from effllm.records.moments import Moments

#: The percentiles that the agent publishes (records.values).
PERCENTILES = (5, 25, 50, 75, 95, 99)

NAN = float("nan")
#: Number of newest values that are kept of each series: they take 320 kB, as a float in a deque takes 32 bytes.
MAX_RECENT = 10_000
#: Number of new values that are added to the moments together.  A larger number makes a longer pause of one iteration.
ADD_TOGETHER = 32
_adding_lock = threading.Lock()  # it is never waited for


class Statistics:
    """Counts, mean, deviation and range of all values, and percentiles of the newest values.

    `add` only appends, because in a training loop the caches are cold.  The moments are computed for `ADD_TOGETHER`
    values together, and before a result is read; so results include all values.  If a second thread reads a result at
    the time of this computation, the result may lack the newest values.
    """

    __slots__ = ("_moments", "_new", "_recent")

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        self._moments = Moments()
        self._recent: deque[float] = deque(maxlen=max_recent)
        self._new: list[float] = []  # values that are not in the other two yet

    def add(self, value: float) -> None:
        new = self._new
        new.append(value)
        if len(new) >= ADD_TOGETHER:
            self._add_new_values()

    def _add_new_values(self) -> None:
        if not _adding_lock.acquire(blocking=False):
            return  # the other thread's values are added at the next call
        try:
            values = self._new[:]
            del self._new[: len(values)]  # another thread may have appended meanwhile
            self._recent.extend(filter(self._moments.add_value, values))  # it returns whether the value is finite
        finally:
            _adding_lock.release()

    @property
    def moments(self) -> Moments:
        """The moments of all values."""
        if self._new:
            self._add_new_values()
        return self._moments

    @property
    def recent(self) -> deque[float]:
        """The newest finite values, oldest first."""
        if self._new:
            self._add_new_values()
        return self._recent

    def newest(self, window: int) -> list[float]:
        """Return the newest values, at most ``window`` of them.

        Raises:
            ValueError: ``window`` is below 1, or above the number of values that are kept.
        """
        recent = self.recent
        limit = recent.maxlen or MAX_RECENT
        if not 1 <= window <= limit:
            raise ValueError(f"window={window} must be 1 to {limit}, the number of newest values that are kept")
        return list(islice(recent, max(len(recent) - window, 0), None))


def _renew_lock() -> None:
    """In a forked child, no other thread can release the lock."""
    global _adding_lock
    _adding_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def moments_of(values: Sequence[float]) -> Moments:
    moments = Moments()
    for value in values:
        moments.add_value(value)
    return moments


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, interpolated linearly between values as in NumPy; NaN without values."""
    if not ordered:
        return NAN
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def percentiles_of(statistics: Statistics, name: str) -> dict[str, Any]:
    """Return percentiles for a summary: the agent's of the whole run, if they cover more values than are kept here."""
    recent, count = statistics.recent, statistics.moments.count
    num_in_run, of_run = (percentiles_of_run(name) if count > len(recent) else None) or (0, [])
    # If the run has more values than this instrument, another instrument of this process uses the same name.
    if len(recent) < num_in_run <= count:
        return _named_percentiles(of_run, num_in_run, "estimated")
    return exact_percentiles(recent, "exact" if count == len(recent) else "newest")


def percentiles_of_run(name: str) -> tuple[int, list[float]] | None:
    """Return the number of values in the run so far, and their percentiles, as the agent last published them."""
    module: Any = sys.modules.get("effllm.trainer.collector")
    of_run: tuple[int, list[float]] | None = module and module.get_metrics_collector().lifecycle.percentiles(name)
    return of_run


def exact_percentiles(values: Iterable[float], kind: str = "exact") -> dict[str, Any]:
    """Return the percentiles of values for a summary; NaN without values."""
    ordered = sorted(values)
    return _named_percentiles([percentile(ordered, percent) for percent in PERCENTILES], len(ordered), kind)


def _named_percentiles(percentiles: Sequence[float], num_values: int, kind: str) -> dict[str, Any]:
    named = {f"p{percent}": value for percent, value in zip(PERCENTILES, percentiles, strict=True)}
    return {**named, "percentiles_of": num_values, "percentiles_are": kind}
