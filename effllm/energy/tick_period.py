"""The period at which a counter or a power reading changes, from reads at short intervals. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

from effllm.records.rank import Sample

#: Minimal number of changes from which a period is derived.
MIN_MOVES = 4
#: A counter that changes between almost all reads is continuous only if the reads are at most this far apart.
DENSE_S = 0.006
#: Minimal number of changes that show whether the power reading is held; with fewer, the hardware table decides.
MIN_CHANGES = 8
#: Longest time for which a GPU holds a power reading; slower changes come from the load.
MAX_POWER_TICK_S = 0.12


def tick_of(readings: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the period of a counter and the half-width of the period's error; ``None`` if no period is found.

    Each change is bounded by two reads, and the period must explain all changes.  A counter that changed between almost
    all reads is continuous and has the period 0.

    Args:
        readings: monotonic times in ns, and joules.
    """
    reads = [(first[0], second[0], first[1] != second[1]) for first, second in pairwise(readings)]
    moves = [(after, until) for after, until, has_moved in reads if has_moved]
    if len(moves) < MIN_MOVES:
        return None
    apart_ns = statistics.median(until - after for after, until, _ in reads)
    if len(moves) > 0.6 * len(reads):
        return (0.0, 0.0) if apart_ns <= DENSE_S * 1e9 else None
    roughly_ns = statistics.median(later - earlier for (earlier, _), (later, _) in pairwise(moves))
    runs = _runs(reads, max(1.5 * apart_ns, 0.5 * roughly_ns))
    steps = [(after + until - since - before) / 2 for run in runs for (since, before), (after, until) in pairwise(run)]
    if not steps:
        return None
    period = statistics.fmean(steps)
    shortest, longest = 0.5 * period, 1.5 * period
    for run in runs:
        for i, (since, before) in enumerate(run):
            for ticks, (after, until) in enumerate(run[i + 1 :], 1):
                shortest = max(shortest, (after - before) / ticks)
                longest = min(longest, (until - since) / ticks)
    if shortest > longest:  # the ticks' jitter is larger than the time between reads
        return period / 1e9, max((shortest - longest) / 2, 0.002 * period) / 1e9
    return (shortest + longest) / 2e9, max((longest - shortest) / 2e9, 1e-7)


def _runs(reads: Sequence[tuple[int, int, bool]], max_ns: float) -> list[list[tuple[int, int]]]:
    """Return the changes in parts: a delayed read begins a new part, so the changes of a part are one tick apart."""
    runs: list[list[tuple[int, int]]] = [[]]
    for after, until, has_moved in reads:
        if until - after > max_ns:  # more than one change is possible
            runs.append([])
        elif has_moved:
            runs[-1].append((after, until))
    return runs


def is_held(samples: Sequence[Sample]) -> bool | None:
    """Whether the power reading changes only with the counter, because the sensor measures once per tick.

    The result is ``None`` if the power reading changed too rarely.
    """
    pairs = [
        (first, second)
        for first, second in pairwise(samples)
        if first.power_w is not None and second.power_w is not None
    ]
    changes = [(first, second) for first, second in pairs if first.power_w != second.power_w]
    if len(changes) < MIN_CHANGES:
        return None
    together = sum(first.energy_j != second.energy_j for first, second in changes)
    return together >= 0.8 * len(changes)


def tick_of_means(readings: Sequence[tuple[int, float]]) -> float | None:
    """Return the seconds for which each mean power is held, from readings that rarely change; ``None`` if not held.

    If a load switches between two levels, there are at least three different readings, each held for a tick.  The third
    reading is from a tick in which the load switches, and is a mean of both levels.
    """
    moves = [(first[0] + second[0]) / 2e9 for first, second in pairwise(readings) if first[1] != second[1]]
    if len(moves) < MIN_MOVES or len({power_w for _, power_w in readings}) < 3:
        return None
    open_s = 2 * statistics.median((second[0] - first[0]) / 1e9 for first, second in pairwise(readings))
    gaps_s = sorted(later - earlier for earlier, later in pairwise(moves))
    total_s = ticks = 0.0
    for gap_s in gaps_s:
        tick_s = total_s / ticks if ticks else gap_s
        count = round(gap_s / tick_s)
        if abs(gap_s - count * tick_s) > open_s:
            return None
        total_s, ticks = total_s + gap_s, ticks + count
    tick_s = total_s / ticks
    is_seen = sum(abs(gap_s - tick_s) <= open_s for gap_s in gaps_s) >= 2
    return tick_s if is_seen and 2 * open_s < tick_s <= MAX_POWER_TICK_S else None
