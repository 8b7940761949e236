"""The results of tools for windows, compared with the exact energy of the trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.energy_traces import Group
from tests.nvml_library import Gpu

NS = 1e-9
EACH, SUM = "each", "sum"  # GPU of a group
HALF_WIDTHS_95 = 1.96


@dataclass(frozen=True)
class Verdict:
    """One window of one GPU, or of the sum of a group's; all relative to the truth."""

    error: float  # signed; infinite without a measurement
    min_error: float  # the smallest error for edges anywhere inside the tool's calls
    random: float | None = None  # half-width (95 %) of the random errors as stated by the tool
    whole: float | None = None  # ... and of the sensor's as well


@dataclass(frozen=True)
class Errors:
    """The errors of many windows."""

    windows: int
    mean: float  # of the sizes
    p95: float
    worst: float
    bias: float
    least_mean: float
    random_mean: float | None  # half-width of the stated interval
    in_random: float | None  # share of windows in it
    whole_mean: float | None
    in_whole: float | None


def errors(verdicts: Sequence[Verdict]) -> Errors:
    """Return the errors of these windows."""
    sizes = sorted(abs(verdict.error) for verdict in verdicts)
    random = [(verdict.error, verdict.random) for verdict in verdicts if verdict.random is not None]
    whole = [(verdict.error, verdict.whole) for verdict in verdicts if verdict.whole is not None]
    return Errors(
        windows=len(sizes),
        mean=sum(sizes) / len(sizes),
        p95=sizes[math.ceil(0.95 * len(sizes)) - 1],
        worst=sizes[-1],
        bias=sum(verdict.error for verdict in verdicts) / len(verdicts),
        least_mean=sum(verdict.min_error for verdict in verdicts) / len(verdicts),
        random_mean=_mean(width for _, width in random),
        in_random=_mean(abs(error) <= width for error, width in random),
        whole_mean=_mean(width for _, width in whole),
        in_whole=_mean(abs(error) <= width for error, width in whole),
    )


@dataclass(frozen=True)
class Measured:
    """The results of one tool, and its cost."""

    tool: str
    version: str
    verdicts: dict[tuple[str, str, str], list[Verdict]]  # by group, EACH or SUM, and length
    cpu_shares: dict[str, float]  # of a core, by length, of all that measures one rank's GPUs
    blocked_s: dict[str, list[float]]  # by length: how long both calls around a window kept the caller

    def errors(self, groups: Sequence[Group], whom: str, length: str) -> Errors:
        """Return the errors over all GPUs, or all sums, of these groups."""
        return errors([verdict for group in groups for verdict in self.verdicts[group.name, whom, length]])


def judge(rows: Iterable[dict[str, Any]], groups: Sequence[Group]) -> dict[tuple[str, str], list[Verdict]]:
    """Return the verdicts on a tool's windows by group, on each GPU and on their sum."""
    made: dict[tuple[str, str], list[Verdict]] = {}
    for row in rows:
        position = 0
        for group in groups:
            places = range(position, position + len(group.gpus))
            position += len(group.gpus)
            for place, gpu in zip(places, group.gpus, strict=True):
                made.setdefault((group.name, EACH), []).append(_verdict(row, [place], [gpu]))
            if len(group.gpus) > 1:
                made.setdefault((group.name, SUM), []).append(_verdict(row, places, group.gpus))
    return made


def _verdict(row: dict[str, Any], places: Sequence[int], gpus: Sequence[Gpu]) -> Verdict:
    begin_ns, begun_ns, end_ns, ended_ns = row["calls"]
    truth = _truth(gpus, row["start_ns"], row["end_ns"])
    parts = [row["joules"][place] for place in places]
    if any(part is None for part in parts):
        return Verdict(math.inf, math.inf, 0.0, 0.0)
    measured = sum(parts)
    lowest, highest = _truth(gpus, begun_ns, end_ns), _truth(gpus, begin_ns, ended_ns)
    random = whole = None
    if row["random_j2"] is not None:
        random = HALF_WIDTHS_95 * math.sqrt(sum(row["random_j2"][place] for place in places)) / truth
        # The gains of different boards are independent.
        sensors = math.hypot(*(row["gain_error"][place] * row["joules"][place] for place in places)) / truth
        whole = random + sensors  # a gain is a bound and no draw: where it is at that bound, random errors come on top
    least = max(lowest - measured, measured - highest, 0.0) / truth
    return Verdict((measured - truth) / truth, least, random, whole)


def _truth(gpus: Sequence[Gpu], start_ns: int, end_ns: int) -> float:
    return sum(gpu.energy_j(start_ns * NS, end_ns * NS) for gpu in gpus)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
