"""Medians of sorted values, and median distances of sorted values from a centre. No I/O.

The caller sorts the values once for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ordered = Sequence[float] | NDArray[np.float64]

#: Ratio of the standard deviation to the median absolute deviation (MAD) of a normal distribution.
MAD_SIGMA = 1.4826

#: Further factors for 2 to 9 values, whose MAD is too small (Croux and Rousseeuw, 1992).
_OF_FEW = (1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)


def of_few(count: int) -> float:
    """Return the correction factor for a deviation that was computed from the MAD of ``count`` values."""
    return _OF_FEW[count - 2] if count < 10 else count / (count - 0.8)


def median(ordered: Ordered) -> float:
    """Return the median of values in ascending order.

    >>> median([1, 2, 4, 8])
    3.0
    """
    middle = len(ordered) // 2
    return float(ordered[middle]) if len(ordered) % 2 else float(ordered[middle - 1] + ordered[middle]) / 2


def median_distance(ordered: Ordered, centre: float) -> float:
    """Return the median distance of sorted values from a centre (the MAD if the centre is the median).

    The nearest half of the values is contiguous, so a binary search finds this half.

    >>> median_distance([1, 2, 3, 4, 100], 3)
    1.0
    """
    count = len(ordered)
    wanted = count // 2 + 1
    distance = _kth_distance(ordered, centre, wanted)
    if count % 2:
        return distance
    return (distance + _kth_distance(ordered, centre, wanted - 1)) / 2


def _kth_distance(ordered: Ordered, centre: float, k: int) -> float:
    """Return the k-th smallest distance from the centre, which is at an end of the k nearest values."""
    low, high = 0, len(ordered) - k
    while low < high:
        first = (low + high) // 2
        if centre - ordered[first] > ordered[first + k] - centre:
            low = first + 1
        else:
            high = first
    return float(max(abs(centre - ordered[low]), abs(ordered[low + k - 1] - centre)))
