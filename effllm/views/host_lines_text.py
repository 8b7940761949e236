"""The lines of code in which the host was, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from effllm.job.host_lines import KINDS, MIN_SAMPLES, is_of_worker, lines_of, share_interval
from effllm.records.host_lines import HostTime
from effllm.records.plain_text import one_line

MAX_SHOWN = 5


def host_lines(found: HostTime, cause: str, data_share: float = 0.0) -> Iterator[str]:
    """Yield the first lines of a loss; nothing for a loss to which no samples belong, or a healthy job.

    Args:
        found: the samples.
        cause: the cause of the verdict.
        data_share: share of the time that is a wait for data.
    """
    samples, lines = lines_of(found, cause, data_share) if cause in KINDS else (0, [])
    if samples < MIN_SAMPLES:
        return
    is_worker = is_of_worker(found, cause)
    of = f" of {found.samples:,}" if samples < found.samples and not is_worker else ""
    torn = f" ({found.torn:,} torn)" if found.torn and not is_worker else ""
    who = "a DataLoader worker" if is_worker else "the host"
    yield f"where {who} was, in {samples:,}{of} samples of {_ranks(tuple(found.by_rank))}{torn}:"
    for line, function, count in lines[:MAX_SHOWN]:
        least, most = (100 * one for one in share_interval(count, samples))
        place = f"{function}, called in {line}" if function else line
        yield f"{100 * count / samples:4.0f} % ({least:.0f} to {most:.0f})  {one_line(place)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
