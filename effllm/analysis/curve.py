"""A curve of many points, thinned so that extremes are kept."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np

from effllm.records.values import MAX_VALUE

#: A curve with more points in memory is thinned to half of them.
MAX_POINTS = 2**17
_FOLDED = 4  # so many neighbours become two: the smallest and the largest


class Curve:
    """Points in the order of recording. The smallest and the largest value and their places are exact.

    A value that was not measured is nan, and one above `MAX_VALUE` counts as nan: the curve has a gap there.
    """

    def __init__(self) -> None:
        self.count = 0  # number of measured values
        self.last = math.nan
        self._x, self._y = array("d"), array("d")

    def add(self, x: float, y: float) -> None:
        """Add a point; of two nan in succession, only the first is kept."""
        if abs(y) <= MAX_VALUE:
            self.count += 1
            self.last = y
        elif not self._y or math.isnan(self._y[-1]):
            return
        else:
            y = math.nan
        self._x.append(x)
        self._y.append(y)
        if len(self._y) >= MAX_POINTS:
            self._fold()

    def thinned(self, buckets: int) -> tuple[list[float], list[float]]:
        """Return the first and the last point, and of each bucket the smallest and the largest value, and the gaps."""
        x, y = np.frombuffer(self._x), np.frombuffer(self._y)
        if len(x) <= 2 * buckets:
            return x.tolist(), y.tolist()
        kept = {0, len(x) - 1}
        edges = _edges(x, buckets)
        for begin, end in zip(edges, [*edges[1:], len(x)], strict=True):
            part = y[begin:end]
            if np.isnan(part).all():
                kept.add(begin)
                continue
            if begin and np.isnan(part[0]):  # the gap before the first value of this bucket
                kept.add(begin)
            kept |= {begin + int(np.nanargmin(part)), begin + int(np.nanargmax(part))}
        order = sorted(kept)
        return x[order].tolist(), y[order].tolist()

    def _fold(self) -> None:
        whole = (len(self._y) - 1) // _FOLDED * _FOLDED  # without the last point
        x, y = (np.frombuffer(one)[:whole].reshape(-1, _FOLDED) for one in (self._x, self._y))
        missing = np.isnan(y)
        least = np.where(missing, np.inf, y).argmin(axis=1)
        most = np.where(missing, -np.inf, y).argmax(axis=1)
        # A group without a value keeps one nan twice; a group with one value keeps this value and a neighbour.
        both = np.sort(np.stack([least, most], axis=1), axis=1)
        folded = [np.take_along_axis(one, both, axis=1).ravel() for one in (x, y)]
        rest = [one[whole:] for one in (self._x, self._y)]
        self._x, self._y = (array("d", kept.tobytes()) + end for kept, end in zip(folded, rest, strict=True))


def _edges(x: Any, buckets: int) -> list[int]:
    """Return the first index of each bucket: equal widths of x, because a folded curve is not even.

    After a restart x goes back, so a run of many attempts has more buckets: then the buckets have equal counts.
    """
    low, high = float(x.min()), float(x.max())
    place = np.minimum(np.floor((x - low) / ((high - low) or 1.0) * buckets), buckets - 1)
    edges = np.flatnonzero(np.diff(place, prepend=-1.0))
    if len(edges) > 2 * buckets:
        edges = np.linspace(0, len(x), buckets, endpoint=False).astype(int)
    return [int(edge) for edge in edges]
