"""The values of instruments: statistics of one name that can be added over ranks and windows.

Percentiles are from a t-digest (Dunning and Ertl, arXiv 1902.04023) of the library fastdigest, which the extra
``instruments`` installs. Without the library there are no percentiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from msgspec import Struct

from effllm.records.rank import MAX_COUNT, MAX_NAMES, SUM_CENTROIDS, ValueStatistics

#: A larger value counts as infinite, so that sums of values cannot overflow.
MAX_VALUE = 1e30
_MAX_FINITE = 1.7e308
PERCENTILES = (5, 25, 50, 75, 95, 99)


class ValueSummary(Struct, frozen=True, omit_defaults=True):
    """The values of one name, in windows-*.jsonl and in summary.json; a missing field was not measured."""

    count: int  # number of finite values of all ranks
    unit: str = ""
    total: float | None = None
    mean: float | None = None
    std: float | None = None  # sample standard deviation
    least: float | None = None
    most: float | None = None
    percentiles: dict[str, float] = {}  # estimates: p5, p25, ...
    not_finite: dict[str, int] = {}  # numbers of nan, inf and -inf, which no other field includes


@cache
def digest_type() -> Any:
    """Return the class of digests, or ``None`` if the library is not installed."""
    try:
        from fastdigest import TDigest
    except ImportError:
        return None
    return TDigest


def centroids_of(digest: Any) -> tuple[tuple[float, int], ...]:
    """Return the centroids of a digest as (mean, number of values)."""
    return tuple((mean, round(weight)) for mean, weight in digest.centroids)


def merge_statistics(parts: Sequence[ValueStatistics]) -> ValueStatistics:
    """Return the statistics of all values of the parts."""
    if len(parts) == 1:
        return parts[0]
    filled = [part for part in parts if part.count]
    count, total, squares = 0, 0.0, 0.0
    for part in filled:
        if count:
            difference = part.total / part.count - total / count  # of the means: Chan's sum of squared differences
            squares += difference * difference * count * (part.count / (count + part.count))
        squares, total, count = squares + part.squares, total + part.total, count + part.count
    counts_by_kind = zip(*(part.not_finite for part in parts), strict=True)  # of NaN, and of both infinities
    return ValueStatistics(
        count=min(count, MAX_COUNT),
        total=_clamped(total),
        squares=_clamped(squares),
        least=min((part.least for part in filled), default=0.0),
        most=max((part.most for part in filled), default=0.0),
        not_finite=tuple(min(sum(counts), MAX_COUNT) for counts in counts_by_kind),
        centroids=_merged_centroids(filled),
    )


def _merged_centroids(parts: Sequence[ValueStatistics]) -> tuple[tuple[float, int], ...]:
    """Return the centroids of all parts; empty if a part has no centroids, because then percentiles would be wrong."""
    if not all(part.centroids for part in parts):
        return ()
    centroids = [centroid for part in parts for centroid in part.centroids]
    if len(centroids) <= SUM_CENTROIDS:
        return tuple(centroids)
    digest = _make_digest(centroids)
    return centroids_of(digest) if digest is not None else ()


def _make_digest(centroids: Sequence[tuple[float, int]]) -> Any:
    if (digest_class := digest_type()) is None or not centroids:
        return None
    means, weights = zip(*centroids, strict=True)
    return digest_class.from_values(means, [float(weight) for weight in weights], max_centroids=SUM_CENTROIDS)


def merge_by_name(parts: Iterable[Mapping[str, ValueStatistics]]) -> dict[str, ValueStatistics]:
    """Return the statistics of all values by name, for the first `MAX_NAMES` names."""
    by_name: dict[str, list[ValueStatistics]] = {}
    for part in parts:
        for name, added in part.items():
            if name in by_name:
                by_name[name].append(added)
            elif len(by_name) < MAX_NAMES:
                by_name[name] = [added]
    return {name: merge_statistics(statistics) for name, statistics in by_name.items()}


def summaries(values: Mapping[str, ValueStatistics]) -> dict[str, ValueSummary]:
    """Return the statistics in the form of the files of a run."""
    return {name: _summary_of(name, statistics) for name, statistics in sorted(values.items())}


def percentiles(centroids: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Return estimates of the `PERCENTILES`; empty without centroids or without the library."""
    digest = _make_digest(centroids)
    return {} if digest is None else {f"p{percent}": digest.percentile(percent) for percent in PERCENTILES}


def _summary_of(name: str, statistics: ValueStatistics) -> ValueSummary:
    numbers = zip(("nan", "inf", "-inf"), statistics.not_finite, strict=True)
    not_finite = {kind: number for kind, number in numbers if number}
    unit = next((unit for end, unit in UNITS_BY_SUFFIX.items() if name.endswith(end)), "")
    if not statistics.count:
        return ValueSummary(0, unit, not_finite=not_finite)
    return ValueSummary(
        count=statistics.count,
        unit=unit,
        total=statistics.total,
        mean=statistics.total / statistics.count,
        std=math.sqrt(max(statistics.squares, 0.0) / (statistics.count - 1)) if statistics.count > 1 else None,
        least=statistics.least,
        most=statistics.most,
        percentiles=percentiles(statistics.centroids),
        not_finite=not_finite,
    )


#: End of a value's name -> unit of the value.
UNITS_BY_SUFFIX = {"_seconds": "s", "_bytes": "bytes", "_joules": "J"}


def _clamped(value: float) -> float:
    return min(max(value, -_MAX_FINITE), _MAX_FINITE)
