"""The times of a window's iterations on all ranks: arrays of ranks x iterations, in seconds. No I/O.

The ranks of a job leave each iteration together, so one rank that waits makes all of them wait.  In iteration i, rank r
waits w for data, and works o until it waits for others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from effllm.records.columns import Array, Positions
from effllm.records.iteration_times import seconds_of_code
from effllm.records.rank import RankReport

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

    @classmethod
    def of(cls, rows: Sequence[RankReport]) -> IterationMatrix | None:
        """Return the times; ``None`` if most ranks did not report them, or have other iterations."""
        timed = [row for row in rows if row.times and row.times.is_of(row.iterations)]
        if not timed or 2 * len(timed) <= len(rows):
            return None
        spans = [(row.iteration_first, row.iteration_last) for row in timed]
        span = max(set(spans), key=spans.count)
        timed = [row for row, one in zip(timed, spans, strict=True) if one == span]
        times, count = [row.times for row in timed if row.times], span[1] - span[0] + 1
        none = bytes(2 * count)
        has_own = all(one.own for one in times)
        shown = timed[0].iteration_shown - count + 1
        return cls(
            window=timed[0].window,
            first=span[0],
            first_shown=shown,
            num_ranks=len(rows),
            rows=timed,
            steps=_seconds((one.steps for one in times), count),
            waits=_seconds((one.waits or none for one in times), count),
            own=_seconds((one.own for one in times), count) if has_own else None,
        )

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


def _seconds(codes: Iterable[bytes], count: int) -> Array:
    found: Array = _SECONDS[np.frombuffer(b"".join(codes), "<u2")].reshape(-1, count)
    return found
