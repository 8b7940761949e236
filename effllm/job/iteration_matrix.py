"""The times of a window's iterations on all ranks: arrays of ranks x columns, in seconds. No I/O.

A column is an iteration; in reports of many iterations, and in large jobs, it is the mean of consecutive ones.

The ranks of a job leave each iteration together, so one rank that waits makes all of them wait.  In iteration i, rank r
waits w for data, and works o until it waits for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from effllm.records.columns import Array, Positions
from effllm.records.iteration_times import seconds_of_code
from effllm.records.rank import RankReport

#: Maximum number of values of an array, 64 MiB; more columns are joined.
MAX_VALUES = 1 << 23
_TIMES, _SPAN = attrgetter("times"), attrgetter("iteration_first", "iteration_last", "times.each")
_CODES = attrgetter("steps"), attrgetter("waits"), attrgetter("own")
_SECONDS: Array = np.array([seconds_of_code(code) for code in range(65536)])


class IterationMatrix(NamedTuple):
    """The times of the iterations that most ranks of a window have reported."""

    window: int
    first: int  # ordinal of the first iteration
    first_shown: int
    num_ranks: int  # of the window; a rank without these iterations is not in `rows`
    rows: Sequence[RankReport]  # the ranks of the arrays, in their order
    steps: Array  # from the start of an iteration to its end
    waits: Array  # for data, before the start
    own: Array | None  # from the start to the first wait for other ranks; None if it is not known on a rank
    weights: Array  # number of iterations of each column

    @classmethod
    def of(cls, rows: Sequence[RankReport]) -> IterationMatrix | None:
        """Return the times; ``None`` if most ranks did not report them, or have other iterations."""
        # Of ten thousand rows: only loops in C, if all rows are alike.
        timed = [row for row in rows if row.times is not None] if None in map(_TIMES, rows) else rows
        if 2 * len(timed) <= len(rows):
            return None
        spans = Counter(map(_SPAN, timed))
        first, last, each = span = max(spans, key=spans.__getitem__)
        count, size = last - first + 1, 2 * -(-(last - first + 1) // each)
        times = list(map(_TIMES, timed))
        sizes = set(zip(*(map(len, map(codes, times)) for codes in _CODES), strict=True))
        if len(spans) > 1 or not sizes <= {(size, waits, own) for waits in (0, size) for own in (0, size)}:
            timed = [row for row in timed if _SPAN(row) == span and row.times is not None and row.times.is_of(count)]
            times = list(map(_TIMES, timed))
        if not times or count < 1:
            return None
        none, has_own = bytes(size), all(map(_CODES[2], times))
        shown = timed[0].iteration_shown - count + 1
        weights = np.full(-(-count // each), float(each))
        weights[-1] = count - each * (len(weights) - 1)
        starts = np.arange(0, len(weights), -(-len(times) * len(weights) // MAX_VALUES))
        return cls(
            window=timed[0].window,
            first=first,
            first_shown=shown,
            num_ranks=len(rows),
            rows=timed,
            steps=_seconds(map(_CODES[0], times), weights, starts),
            waits=_seconds([codes or none for codes in map(_CODES[1], times)], weights, starts),
            own=_seconds(map(_CODES[2], times), weights, starts) if has_own else None,
            weights=np.add.reduceat(weights, starts),
        )

    @property
    def has_means(self) -> bool:
        """Whether a column has several iterations: then losses are lower bounds."""
        return bool(self.weights[0] > 1)

    def lost_to_data(self, removed: Positions | None = None) -> Array:
        """Return by how much each iteration is longer because ranks wait for data.

        Args:
            removed: the ranks whose waits are counted, by their places in the arrays; all ranks without it.
        """
        waits, kept = self.waits, np.zeros_like(self.waits)
        if removed is not None:
            kept = waits.copy()
            kept[removed] = 0.0
        own = 0.0 if self.own is None else self.own
        lost: Array = (waits + own).max(axis=0) - (kept + own).max(axis=0)
        return lost


def _seconds(codes: Iterable[bytes], weights: Array, starts: Positions) -> Array:
    """Return the times of ranks; columns from a start to the next one are joined."""
    if len(starts) == len(weights):
        found: Array = _SECONDS[np.frombuffer(b"".join(codes), "<u2")].reshape(-1, len(weights))
        return found
    sums = [np.add.reduceat(_SECONDS[np.frombuffer(one, "<u2")] * weights, starts) for one in codes]
    return np.stack(sums) / np.add.reduceat(weights, starts)
