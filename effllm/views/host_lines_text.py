"""The lines of code in which the host was, as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from effllm.job.host_lines import KINDS, MIN_SAMPLES, lines_of
from effllm.records.host_lines import HostTime
from effllm.records.plain_text import one_line

MAX_SHOWN = 5
_Z = 1.96  # of a 95 % interval


def share_interval(count: int, of: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of samples (Wilson, J. Am. Stat. Assoc. 22, 1927).

    >>> [round(one, 3) for one in share_interval(5, 10)]
    [0.237, 0.763]
    """
    center, square = (count + _Z**2 / 2) / (of + _Z**2), count * (of - count) / of + _Z**2 / 4
    half = _Z * math.sqrt(square) / (of + _Z**2)
    return center - half, center + half


def host_lines(found: HostTime, cause: str) -> Iterator[str]:
    """Yield the first lines of a loss; those of the whole job for a loss to which no samples belong.

    Args:
        found: the samples.
        cause: the cause of the verdict.
    """
    samples, lines = lines_of(found, cause if cause in KINDS else "")
    if samples < MIN_SAMPLES:
        return
    of = f" of {found.samples:,}" if samples < found.samples else ""
    torn = f" ({found.torn:,} torn)" if found.torn else ""
    yield f"where the host was, in {samples:,}{of} samples of {_ranks(found.ranks)}{torn}:"
    for line, function, count in lines[:MAX_SHOWN]:
        least, most = (100 * one for one in share_interval(count, samples))
        place = f"{function}, called in {line}" if function else line
        yield f"{100 * count / samples:4.0f} % ({least:.0f} to {most:.0f})  {one_line(place)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
