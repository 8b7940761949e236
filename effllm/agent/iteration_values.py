"""The losses, profiles, own times and device times of iterations. No I/O."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from effllm.energy.readings import NS
from effllm.records import ring
from effllm.records.rank import Profile, add_profiles
from effllm.records.timeline import KINDS


class IterationValues:
    """Stores the values of iterations, which may arrive late, until the report of their window."""

    def __init__(self) -> None:
        self._losses: deque[tuple[int, int, float]] = deque()  # ordinal, number, loss
        self._profiles: deque[tuple[int, Profile]] = deque()
        self._own: deque[tuple[int, int, int]] = deque()  # ordinal, own time, arrival; only iterations with an own time
        self._on_device, self._own_on_device = TimedIterations(), TimedIterations()

    def add(self, slot: ring.Slot) -> None:
        """Add a record of the ring; records without such values are ignored."""
        if slot.kind == ring.ITERATION and slot.number > 0:
            self._own.append((slot.ordinal, slot.number, int(slot.value)))
        elif slot.kind == ring.LOSS and not slot.what:  # what = 1: the record has no loss
            self._losses.append((slot.ordinal, slot.number, slot.value))
        elif slot.kind == ring.PROFILE:
            self._profiles.append((slot.ordinal, _profile(slot)))
        elif slot.kind == ring.DEVICE_TIME:
            self._on_device.add(slot)
        elif slot.kind == ring.OWN_TIME:
            self._own_on_device.add(slot)

    def take(self, first: int, last: int) -> dict[str, Any]:
        """Return the fields of `RankReport` with the values of the iterations from ``first`` to ``last``.

        Late profiles of earlier windows are included. Late losses of earlier windows are dropped.
        """
        losses = [(number, loss) for ordinal, number, loss in self._losses if first <= ordinal <= last]
        not_finite = [number for number, loss in losses if not math.isfinite(loss)]
        while self._losses and self._losses[0][0] <= last:
            self._losses.popleft()
        profile = None
        while self._profiles and self._profiles[0][0] <= last:
            profile = add_profiles(profile, self._profiles.popleft()[1])
        own_s, arrival_ns = [], 0
        while self._own and self._own[0][0] <= last:
            ordinal, own_ns, came_ns = self._own.popleft()
            own_s.append(own_ns * NS)
            arrival_ns = came_ns if ordinal == last else 0
        device_steps, device_step_s = self._on_device.take(last)
        device_own_steps, device_own_step_s = self._own_on_device.take(last)
        return {
            "loss": losses[-1][1] if losses and math.isfinite(losses[-1][1]) else None,
            "losses_not_finite": len(not_finite),
            "first_not_finite": not_finite[0] if not_finite else None,
            "profile": profile,
            "own_steps": len(own_s),
            "own_step_s": sum(own_s),
            "own_median_s": statistics.median(own_s) if own_s else None,
            "arrival_ns": arrival_ns,
            "device_steps": device_steps,
            "device_step_s": device_step_s,
            "device_own_steps": device_own_steps,
            "device_own_step_s": device_own_step_s,
        }


class TimedIterations:
    """Running totals by ordinal: the number of timed iterations, and the sum of their seconds."""

    def __init__(self) -> None:
        self._totals: deque[tuple[int, int, float]] = deque()  # ordinal, iterations, seconds
        self._taken = (0, 0.0)

    def add(self, slot: ring.Slot) -> None:
        self._totals.append((slot.ordinal, slot.number, slot.value))

    def take(self, last: int) -> tuple[int, float]:
        """Return the number and the seconds of iterations up to ``last`` that no earlier call returned."""
        count, seconds = self._taken
        while self._totals and self._totals[0][0] <= last:
            self._taken = self._totals.popleft()[1:]
        return self._taken[0] - count, max(self._taken[1] - seconds, 0.0)


def _profile(slot: ring.Slot) -> Profile:
    if slot.what == ring.WHOLE:
        time_s = (slot.end_ns - slot.start_ns) * NS
        return Profile(iterations=1, time_s=time_s, communication_s=slot.number * NS, exposed_s=slot.value)
    if slot.what == ring.COMPUTING:
        return Profile(computing_s=slot.number * NS, cost_s=slot.value)
    return Profile(kinds={KINDS[slot.what]: (slot.number * NS, slot.value)})
