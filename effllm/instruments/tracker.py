"""Named metrics of training, with their statistics."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from effllm.instruments._active_run import percentiles_of_run, record
from effllm.instruments._number import number, whole
from effllm.instruments._statistics import MAX_RECENT, NAN, Statistics, mean, percentile, std

PERCENTILES = (5, 25, 50, 75, 95, 99)
#: Maximum number of names in one tracker; a loop that always uses new names would fill the memory.
MAX_NAMES = 1000


class MetricTracker:
    """Statistics of named values, in bounded memory.

    Counts, mean, deviation and range cover all values.  Percentiles and statistics of a window cover the newest values.
    In an active run, the agent returns percentiles of more values, and the run folder covers all values.

    Args:
        max_recent: number of newest values that are kept of each metric.
    """

    def __init__(self, max_recent: int = MAX_RECENT) -> None:
        if max_recent < 1:
            raise ValueError(f"max_recent={max_recent} must be at least 1")
        self._max_recent = max_recent
        self._metrics: dict[str, Statistics] = {}
        self._warned: set[str] = set()
        self.last_step: int | None = None

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    def update(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a value: a number, or a tensor of one number in the host's memory.

        NaN and infinite values are counted and left out of all statistics.  A tensor on a GPU is not read.
        """
        read = number(value)
        if read is None:
            self._warn_once(
                name, f"metric {name}: {type(value).__name__} is not a number in CPU memory; pass loss.item()"
            )
            return
        found = self._metrics.get(name)
        if found is None:
            if len(self._metrics) >= MAX_NAMES:
                self._warn_once("", f"more than {MAX_NAMES} names of metrics: {name} and later names are left out")
                return
            found = self._metrics[name] = Statistics(self._max_recent)
        found.add(read)
        record(name, read)
        self.last_step = self.last_step if (known := whole(step)) is None else known

    def update_batch(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a value of each metric."""
        if not isinstance(metrics, Mapping):
            self._warn_once("batch", f"metrics must be a dictionary, not {type(metrics).__name__}; nothing is added")
            return
        for name, value in metrics.items():
            self.update(name, value, step)

    def get_mean(self, name: str, window: int | None = None) -> float:
        """Return the mean of all values, or of the newest ``window``; NaN without values."""
        found = self._metrics.get(name)
        if found is None:
            return NAN
        return found.mean if window is None else mean(found.newest(window))

    def get_std(self, name: str, window: int | None = None) -> float:
        """Return the sample standard deviation of all values, or of the newest ``window``; NaN below two values."""
        found = self._metrics.get(name)
        if found is None:
            return NAN
        return found.std if window is None else std(found.newest(window))

    def get_summary(self, name: str, window: int | None = None) -> dict[str, Any]:
        """Return count, mean, std, min, max and percentiles; without values, a count of 0 and NaN.

        ``percentiles_of`` is the number of values from which the percentiles were computed. Percentiles of the newest
        values are exact; if a run was active and had more values than are kept here, the percentiles are the agent's
        estimates. ``not_finite`` has the numbers of NaN and infinite values, which no other result includes.
        """
        found = self._metrics.get(name) or Statistics(self._max_recent)
        values = found.newest(window)
        is_all = window is None
        ordered = sorted(values)
        num, shown = len(ordered), [percentile(ordered, percent) for percent in PERCENTILES]
        if is_all and found.count > num and (run := percentiles_of_run(name)) is not None and run[0] > num:
            num, shown = run
        return {
            "count": found.count if is_all else len(values),
            "mean": found.mean if is_all else mean(values),
            "std": found.std if is_all else std(values),
            "min": (found.minimum if is_all else ordered[0]) if values else NAN,
            "max": (found.maximum if is_all else ordered[-1]) if values else NAN,
            **{f"p{percent}": value for percent, value in zip(PERCENTILES, shown, strict=True)},
            "percentiles_of": num,
            "not_finite": dict(found.not_finite),
        }

    def get_recent(self, name: str) -> list[float]:
        """Return the newest finite values, oldest first."""
        found = self._metrics.get(name)
        return [] if found is None else list(found.recent)

    def _warn_once(self, key: str, line: str) -> None:
        if key not in self._warned and len(self._warned) <= MAX_NAMES:
            self._warned.add(key)
            warnings.warn(line, stacklevel=3)
