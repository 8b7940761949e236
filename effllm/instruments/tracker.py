"""Named metrics of training, with their statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from effllm.instruments._number import MAX_WHOLE, UserWarnings, number, record, to_count
from effllm.instruments._statistics import MAX_RECENT, NAN, Statistics, exact_percentiles, moments_of, percentiles_of
from effllm.records.moments import Moments

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
        self._warn_once = UserWarnings()
        self.last_step: int | None = None

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    def update(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a value: a number, or a tensor of one number in the host's memory.

        NaN and infinite values are counted and left out of all statistics.  A tensor on a GPU is not read.
        """
        as_float = value if type(value) is float else number(value)
        statistics = self._metrics.get(name)
        if as_float is None or statistics is None:
            statistics = self._add_metric(name, value, as_float)
            if as_float is None or statistics is None:
                return
        statistics.add(as_float)
        record(name, as_float)
        if step is not None:
            new_step = step if type(step) is int and 0 <= step < MAX_WHOLE else to_count(step)
            self.last_step = self.last_step if new_step is None else new_step

    def _add_metric(self, name: str, value: Any, as_float: float | None) -> Statistics | None:
        """Return the statistics of a new name; ``None``, with a warning, for no number or too many names."""
        if as_float is None:
            line = f"metric {name}: {type(value).__name__} is not a number in CPU memory; pass loss.item()"
            self._warn_once(line, f"no number: {name}")
            return None
        if len(self._metrics) >= MAX_NAMES:
            self._warn_once(f"more than {MAX_NAMES} names of metrics: {name} and later names are left out", "names")
            return None
        return self._metrics.setdefault(name, Statistics(self._max_recent))  # a second thread may add the name too

    def update_batch(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a value of each metric."""
        if type(metrics) is not dict and not isinstance(metrics, Mapping):  # the second check takes 15 us
            self._warn_once(f"metrics must be a dictionary, not {type(metrics).__name__}; nothing is added", "batch")
            return
        for name, value in metrics.items():
            self.update(name, value, step)

    def get_mean(self, name: str, window: int | None = None) -> float:
        """Return the mean of all values, or of the newest ``window``; NaN without values."""
        return self._moments(name, window).mean

    def get_std(self, name: str, window: int | None = None) -> float:
        """Return the sample standard deviation of all values, or of the newest ``window``; NaN below two values."""
        return self._moments(name, window).std

    def _moments(self, name: str, window: int | None) -> Moments:
        statistics = self._metrics.get(name)
        if statistics is None:
            return Moments()
        return statistics.moments if window is None else moments_of(statistics.newest(window))

    def get_summary(self, name: str, window: int | None = None) -> dict[str, Any]:
        """Return count, mean, std, min, max and percentiles; without values, a count of 0 and NaN.

        ``percentiles_of`` is the number of values from which the percentiles were computed.  ``percentiles_are`` is
        ``exact`` if these are all values, or all values of the window; ``newest`` if these are only the newest values;
        and ``estimated`` if effllm's agent estimated the percentiles of all values of the run that it had read.
        ``not_finite`` has the numbers of NaN and infinite values, which no other result includes.

        This call sorts the newest values on the calling thread: call it after an epoch, not in every step.
        """
        statistics = self._metrics.get(name) or Statistics(self._max_recent)
        moments = self._moments(name, window)
        return {
            "count": moments.count,
            "mean": moments.mean,
            "std": moments.std,
            "min": moments.minimum if moments.count else NAN,
            "max": moments.maximum if moments.count else NAN,
            **(percentiles_of(statistics, name) if window is None else exact_percentiles(statistics.newest(window))),
            "not_finite": dict(statistics.moments.not_finite),
        }

    def get_recent(self, name: str) -> list[float]:
        """Return the newest finite values, oldest first."""
        statistics = self._metrics.get(name)
        return [] if statistics is None else list(statistics.recent)
