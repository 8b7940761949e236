"""Compares the energy counter of an AMD GPU with its power."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

#: Duration and period of the comparison when a device is opened.
CHECK_S = 0.5
CHECK_EVERY_S = 0.02
#: Largest relative difference between a good counter and integrated power.  Power is a mean over
#: 100 ms: its integral is up to 13 % too low if power rises fivefold in half a second.  Faulty counters were a hundred
#: times too slow, did not change, or decreased.
COUNTER_TOLERANCE = 0.25


class CounterReading(NamedTuple):
    """The counter and the power at one moment, and the driver's timestamp."""

    time_s: float
    energy_j: float | None
    power_w: float | None
    stamp: float | None = None


class CounterJudgement(NamedTuple):
    """The result of the comparison; ``reason`` describes a fault or a missing check."""

    is_good: bool
    reason: str = ""
    is_stale: bool = False  # whether AMD SMI returned the same old values in every reading


def judge_counter(readings: Sequence[CounterReading]) -> CounterJudgement:
    """Return whether an energy counter agrees with power, from readings of counter and power over half a second.

    Some counters had a wrong rate (ROCm/amdsmi#38), some did not change (#22), some decreased (#115).
    """
    counted = [reading for reading in readings if reading.energy_j is not None]
    joules = [reading.energy_j for reading in counted if reading.energy_j is not None]
    if len(counted) < 3:
        return CounterJudgement(False, "too few readings")
    steps = [after - before for before, after in pairwise(joules)]
    span_s = counted[-1].time_s - counted[0].time_s
    if not any(steps) and counted[0].stamp and len({reading.stamp for reading in counted}) == 1:
        return CounterJudgement(False, f"AMD SMI returned the same reading for {span_s:.1f} s", is_stale=True)
    if min(steps) < 0:
        return CounterJudgement(False, f"a decrease of {-min(steps):.3g} J")
    moves = [index for index, step in enumerate(steps, 1) if step > 0]
    if len(moves) < 2:
        return CounterJudgement(False, f"{'one change' if moves else 'no change'} in {span_s:.1f} s")
    # Energy is compared between two changes of the counter, because the counter changes at an unknown time between two
    # readings.
    first, last = moves[0], moves[-1]
    counted_j, span_s = joules[last] - joules[first], counted[last].time_s - counted[first].time_s
    power_j = _integral_of_power(counted[first : last + 1])
    if not power_j:
        return CounterJudgement(True, "no power reading for the comparison")
    if abs(counted_j - power_j) > COUNTER_TOLERANCE * power_j + 0.5 * span_s:  # AMD SMI returns whole watts
        return CounterJudgement(
            False, f"a count of {counted_j:.3g} J in {span_s:.1f} s, but {power_j:.3g} J from integrated power"
        )
    return CounterJudgement(True)


def _integral_of_power(readings: Sequence[CounterReading]) -> float | None:
    joules = 0.0
    for first, second in pairwise(readings):
        if first.power_w is None or second.power_w is None:
            return None
        joules += (first.power_w + second.power_w) / 2 * (second.time_s - first.time_s)
    return joules
