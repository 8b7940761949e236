"""Checks that counts of tokens are possible: shape >= positions >= tokens and positions with a label. No I/O.

There may be more labels than tokens without padding: some data sets have labels on padding.

The totals of each rank are compared, not its windows: tokens and labels counted on a GPU arrive some iterations after
the positions of their batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from effllm.job.audit.figures import KnownJob
from effllm.job.rows import TOKEN_COUNTS, Rows
from effllm.records.columns import Array, Positions, Table

MAX_NAMED = 8


class CountSums(Table):
    """The totals of each rank."""

    NAMES = (*TOKEN_COUNTS, "iterations")

    def add(self, rows: Rows) -> None:
        """Add reports; each report may be added only once."""
        at = self.of(rows.ranks)
        counts = [_floats(rows.token_counts[name]) for name in TOKEN_COUNTS]
        self.values[at] += np.array([*counts, rows.numbers["iterations"]]).T

    def of(self, ranks: Sequence[int]) -> Positions | slice:
        """Return the rows of ranks; a slice, which needs no copy, if they are all rows in their order."""
        at = self.find(ranks)
        return slice(None) if len(at) == len(self) and (at[1:] > at[:-1]).all() else at


def _floats(counts: Sequence[int]) -> Array:
    """Return counts as an array, by way of machine integers, which takes a third of the time of `np.array`."""
    try:
        return np.frombuffer(array("q", counts), np.int64).astype(np.float64)
    except OverflowError:  # a forged report
        return np.array(counts, np.float64)


#: Smaller count, larger count, and what they are.
_ORDER = (
    ("tokens", "tokens_processed", "tokens without padding", "positions"),
    ("tokens_loss", "tokens_processed", "positions with a label", "positions"),
)


def broken_counts(sums: CountSums, rows: Rows, known: KnownJob, *, has_gaps: bool) -> str:
    """Return a sentence about the first count that is impossible; empty if all counts are possible.

    Args:
        sums: the totals, with the reports of the window.
        rows: the reports of the window.
        known: the constants of the job.
        has_gaps: whether reports were lost: then tokens of a batch may be here without its positions.
    """
    values = sums.values[sums.of(rows.ranks)]
    column = dict(zip(sums.NAMES, values.T, strict=True))
    spare = np.array(rows.token_counts["tokens_processed"], np.float64) if has_gaps else 0.0
    for small, large, small_text, large_text in _ORDER:
        wrong = column[small] > column[large] + spare
        if wrong.any() and (wrong := wrong & (column[large] > 0)).any():  # a total of 0 is not counted
            factor = float((column[small][wrong] / column[large][wrong]).max())
            totals = f"{column[small][wrong].sum():,.0f} {small_text} in {column[large][wrong].sum():,.0f} {large_text}"
            return _sentence(rows.ranks, wrong, totals, factor)
    if known.max_positions:
        most = column["iterations"] * known.max_positions
        wrong = column["tokens_processed"] > most + spare
        if wrong.any() and (wrong := wrong & (most > 0)).any():
            factor = float((column["tokens_processed"][wrong] / most[wrong]).max())
            totals = f"{column['tokens_processed'][wrong].sum():,.0f} positions in batches of {most[wrong].sum():,.0f}"
            return _sentence(rows.ranks, wrong, totals, factor)
    return ""


def _sentence(ranks: Sequence[int], wrong: NDArray[np.bool_], totals: str, factor: float) -> str:
    named = [rank for rank, is_wrong in zip(ranks, wrong, strict=True) if is_wrong]
    who = ", ".join(map(str, named[:MAX_NAMED])) + (f" and {len(named) - MAX_NAMED} more" * (len(named) > MAX_NAMED))
    return f"rank {who} counted {totals}: a factor of {factor:.3g}; the counts of tokens are wrong"
