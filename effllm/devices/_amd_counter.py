"""Compares the energy counter of an AMD GPU with its power."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

#: Duration and period of the comparison when a device is opened.
CHECK_S = 0.5
CHECK_EVERY_S = 0.02
#: The counter is not used if it and power differ by more.  A power reading that is a mean of 100 ms is up to 13 % low
#: over half a second with a fivefold rise; faulty counters were slow by a factor of 100, constant, or decreasing.
COUNTER_TOLERANCE = 0.25


class CounterReading(NamedTuple):
    """The counter and the power at one moment, and the driver's timestamp."""

    time_s: float
    energy_j: float | None
    power_w: float | None
    stamp: float | None = None


class Verdict(NamedTuple):
    """Whether a counter is used, and why not."""

    is_good: bool
    reason: str = ""
    is_stale: bool = False  # no value changes, neither the counter nor any other


def judge_counter(readings: Sequence[CounterReading]) -> Verdict:
    """Return whether an energy counter agrees with power, from readings of both over half a second.

    Counters had a wrong rate (ROCm/amdsmi#38), did not change (#22) and decreased (#115).
    """
    counted = [reading for reading in readings if reading.energy_j is not None]
    joules = [reading.energy_j for reading in counted if reading.energy_j is not None]
    if len(counted) < 3:
        return Verdict(False, "it could not be read")
    steps = [after - before for before, after in pairwise(joules)]
    span_s = counted[-1].time_s - counted[0].time_s
    if not any(steps) and counted[0].stamp and len({reading.stamp for reading in counted}) == 1:
        return Verdict(False, f"AMD SMI repeats one reading for {span_s:.1f} s", is_stale=True)
    if min(steps) < 0:
        return Verdict(False, f"it decreased by {-min(steps):.3g} J")
    moves = [index for index, step in enumerate(steps, 1) if step > 0]
    if len(moves) < 2:
        return Verdict(False, f"it {'changed once' if moves else 'did not change'} in {span_s:.1f} s")
    # From change to change: the position of the counter's ticks between two readings then does not matter.
    first, last = moves[0], moves[-1]
    counted_j, span_s = joules[last] - joules[first], counted[last].time_s - counted[first].time_s
    power_j = _integral_of_power(counted[first : last + 1])
    if not power_j:
        return Verdict(True, "there is no power to check it against")
    if abs(counted_j - power_j) > COUNTER_TOLERANCE * power_j + 0.5 * span_s:  # power comes in whole watts
        return Verdict(False, f"it counted {counted_j:.3g} J in {span_s:.1f} s in which power comes to {power_j:.3g} J")
    return Verdict(True)


def _integral_of_power(readings: Sequence[CounterReading]) -> float | None:
    joules = 0.0
    for first, second in pairwise(readings):
        if first.power_w is None or second.power_w is None:
            return None
        joules += (first.power_w + second.power_w) / 2 * (second.time_s - first.time_s)
    return joules
