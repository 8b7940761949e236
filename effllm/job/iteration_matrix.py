"""The times of a window's iterations on all ranks: arrays of ranks x columns, in seconds. No I/O.

A column is an iteration; in reports of many iterations, and in large jobs, it is the mean of consecutive ones.

The ranks of a job leave each iteration together, so one rank that waits makes all of them wait.  In iteration i, rank r
waits w for data, and works o until it waits for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from effllm.records.columns import Array, Positions
from effllm.records.iteration_times import seconds_of_code
from effllm.records.rank import RankReport

#: Maximum number of values of an array, 64 MiB; more columns are joined.
MAX_VALUES = 1 << 23
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
        timed = [row for row in rows if row.times and row.times.is_of(row.iterations)]
        if not timed or 2 * len(timed) <= len(rows):
            return None
        spans = [(row.iteration_first, row.iteration_last, row.times.each if row.times else 1) for row in timed]
        span = max(set(spans), key=spans.count)
        timed = [row for row, one in zip(timed, spans, strict=True) if one == span]
        times, count, each = [row.times for row in timed if row.times], span[1] - span[0] + 1, span[2]
        none = bytes(len(times[0].steps))
        has_own = all(one.own for one in times)
        shown = timed[0].iteration_shown - count + 1
        weights = np.full(-(-count // each), float(each))
        weights[-1] = count - each * (len(weights) - 1)
        starts = np.arange(0, len(weights), -(-len(times) * len(weights) // MAX_VALUES))
        return cls(
            window=timed[0].window,
            first=span[0],
            first_shown=shown,
            num_ranks=len(rows),
            rows=timed,
            steps=_seconds([one.steps for one in times], weights, starts),
            waits=_seconds([one.waits or none for one in times], weights, starts),
            own=_seconds([one.own for one in times], weights, starts) if has_own else None,
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


def _seconds(codes: Sequence[bytes], weights: Array, starts: Positions) -> Array:
    """Return the times of ranks; columns from a start to the next one are joined."""
    if len(starts) == len(weights):
        found: Array = _SECONDS[np.frombuffer(b"".join(codes), "<u2")].reshape(-1, len(weights))
        return found
    sums = [np.add.reduceat(_SECONDS[np.frombuffer(one, "<u2")] * weights, starts) for one in codes]
    return np.stack(sums) / np.add.reduceat(weights, starts)
