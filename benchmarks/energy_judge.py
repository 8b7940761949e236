"""Compares the tools' window energies with the exact energy of the trace."""

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
    """Errors of one window of a GPU, or of the sum over a group's GPUs, relative to the true energy."""

    error: float  # signed error; infinite without a measurement
    min_error: float  # the smallest error over all possible edges within the tool's calls
    random: float | None = None  # half-width (95 %) that the tool reports for random errors
    whole: float | None = None  # half-width (95 %) that the tool reports for random and sensor errors


@dataclass(frozen=True)
class Errors:
    """The errors of many windows."""

    windows: int
    mean: float  # mean of the absolute errors
    p95: float
    worst: float
    bias: float
    least_mean: float
    random_mean: float | None  # mean half-width of the random interval
    in_random: float | None  # share of windows with the truth in this interval
    whole_mean: float | None
    in_whole: float | None


def errors(verdicts: Sequence[Verdict]) -> Errors:
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
    """Results and cost of one tool."""

    tool: str
    version: str
    verdicts: dict[tuple[str, str, str], list[Verdict]]  # verdicts by group, by EACH or SUM, by length
    cpu_shares: dict[str, float]  # CPU time of measuring one rank's GPUs as a share of a core, by length
    blocked_s: dict[str, list[float]]  # time in the two calls around a window, by length

    def errors(self, groups: Sequence[Group], whom: str, length: str) -> Errors:
        """Return the errors over each GPU (EACH) or each sum (SUM) of these groups."""
        return errors([verdict for group in groups for verdict in self.verdicts[group.name, whom, length]])


def judge(rows: Iterable[dict[str, Any]], groups: Sequence[Group]) -> dict[tuple[str, str], list[Verdict]]:
    """Return the verdicts by (group, EACH), one per GPU, and by (group, SUM), for the sum over the GPUs."""
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
        whole = random + sensors  # linear sum: a gain error is a bound, not random
    least = max(lowest - measured, measured - highest, 0.0) / truth
    return Verdict((measured - truth) / truth, least, random, whole)


def _truth(gpus: Sequence[Gpu], start_ns: int, end_ns: int) -> float:
    return sum(gpu.energy_j(start_ns * NS, end_ns * NS) for gpu in gpus)


def _mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) / len(known) if known else None
