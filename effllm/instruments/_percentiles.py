"""Percentiles of all values of an instrument, if they are known, and otherwise of the newest values."""

from __future__ import annotations

from typing import NamedTuple

from effllm.instruments._active_run import percentiles_of_run
from effllm.instruments._statistics import Statistics, percentile

#: The percentiles that the agent publishes (records.values).
PERCENTILES = (5, 25, 50, 75, 95, 99)
#: Percentiles of all values; only of the newest values, if others are not kept; or the agent's estimates (a t-digest).
EXACT, NEWEST, ESTIMATED = "exact", "newest", "estimated"


class Percentiles(NamedTuple):
    """Percentiles, with the values that they cover."""

    values: dict[int, float]  # by percent
    num: int  # number of values from which the percentiles are computed
    kind: str  # EXACT, NEWEST or ESTIMATED

    def coverage(self) -> dict[str, int | str]:
        """Return the fields of a summary about the covered values."""
        return {"percentiles_of": self.num, "percentiles_are": self.kind}


def percentiles_of(statistics: Statistics, name: str) -> Percentiles:
    """Return the percentiles that cover most values.

    Args:
        statistics: the values in this process.
        name: name of the values in the run folder.
    """
    ordered, count = sorted(statistics.recent), statistics.moments.count
    num = len(ordered)
    if count > num:
        run = percentiles_of_run(name)
        # If the run has more values than this instrument, another instrument of this process uses the same name.
        if run is not None and num < run[0] <= count:
            return Percentiles(dict(zip(PERCENTILES, run[1], strict=True)), run[0], ESTIMATED)
    return exact_percentiles(ordered, EXACT if count == num else NEWEST)


def exact_percentiles(ordered: list[float], kind: str = EXACT) -> Percentiles:
    """Return percentiles of sorted values; NaN without values."""
    return Percentiles({percent: percentile(ordered, percent) for percent in PERCENTILES}, len(ordered), kind)
