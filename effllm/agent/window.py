"""The reports of windows, from the records and samples of one rank. No clock, device or file is used."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Container, Iterable, Sequence
from functools import reduce
from operator import lt, sub
from typing import Any

from effllm.agent.series import Series
from effllm.energy.readings import NS
from effllm.records import ring
from effllm.records.counters import FIELDS
from effllm.records.iteration_times import IterationTimes
from effllm.records.rank import (
    MARKED_PHASES,
    SHUTDOWN,
    STARTUP,
    DeviceWindow,
    Integrals,
    Phase,
    Profile,
    RankReport,
    add_profiles,
)
from effllm.records.timeline import KINDS

MAX_KEPT = 8192  # iterations whose start and end are kept
#: The totals before the first record.
_NO_TOTALS = ring.Slot(0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, (0,) * len(MARKED_PHASES), 0, (0,) * len(FIELDS))


class IterationValues:
    """Stores the values of iterations, which may arrive late, until the report of their window."""

    def __init__(self) -> None:
        self._losses: deque[tuple[int, int, float]] = deque()  # ordinal, number, loss
        self._profiles: deque[tuple[int, Profile]] = deque()  # ordinal, profile
        self._times: deque[tuple[int, float, float, float]] = deque()  # ordinal; seconds of step, wait and own time
        self._on_device, self._own_on_device = TimedIterations(), TimedIterations()  # step and own time, by the GPU

    def add_record(self, slot: ring.Slot) -> None:
        """Add a record of the ring; records without such values are ignored."""
        if slot.kind == ring.LOSS and not slot.what:  # what = 1: the record has no loss
            self._losses.append((slot.ordinal, slot.number, slot.value))
        elif slot.kind == ring.PROFILE:
            self._profiles.append((slot.ordinal, _profile(slot)))
        elif slot.kind == ring.DEVICE_TIME:
            self._on_device.add_totals(slot)
        elif slot.kind == ring.OWN_TIME:
            self._own_on_device.add_totals(slot)

    def add_times(self, slot: ring.Slot, step_s: float, wait_s: float) -> None:
        """Add the times of an iteration, without phases; own time, up to the first wait for others, is 0 if unknown."""
        self._times.append((slot.ordinal, step_s, wait_s, slot.number * NS))

    def take_fields(self, first: int, last: int) -> dict[str, Any]:
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
        times = []
        while self._times and self._times[0][0] <= last:
            times.append(self._times.popleft()[1:])
        own_s = [seconds for *_, seconds in times if seconds > 0]
        device_steps, device_step_s = self._on_device.take_totals(last)
        device_own_steps, device_own_step_s = self._own_on_device.take_totals(last)
        return {
            "loss": losses[-1][1] if losses and math.isfinite(losses[-1][1]) else None,
            "losses_not_finite": len(not_finite),
            "first_not_finite": not_finite[0] if not_finite else None,
            "profile": profile,
            "own_steps": len(own_s),
            "own_step_s": sum(own_s),
            "times": _iteration_times(times, last - first + 1),
            "device_steps": device_steps,
            "device_step_s": device_step_s,
            "device_own_steps": device_own_steps,
            "device_own_step_s": device_own_step_s,
        }


def _iteration_times(times: Sequence[tuple[float, float, float]], count: int) -> IterationTimes | None:
    if len(times) != count:
        return None  # a record was overwritten
    steps_s, waits_s, own_s = zip(*times, strict=True) if times else ((), (), ())
    return IterationTimes.of(steps_s, waits_s, own_s if all(own_s) else ())


class TimedIterations:
    """Running totals by ordinal: the number of timed iterations, and the sum of their seconds."""

    def __init__(self) -> None:
        self._totals: deque[tuple[int, int, float]] = deque()  # ordinal, iterations, seconds
        self._taken_totals = (0, 0.0)  # iterations, seconds; at the last call of `take_totals`

    def add_totals(self, slot: ring.Slot) -> None:
        self._totals.append((slot.ordinal, slot.number, slot.value))

    def take_totals(self, last: int) -> tuple[int, float]:
        """Return the number and the seconds of iterations up to ``last`` that no earlier call returned."""
        count, seconds = self._taken_totals
        while self._totals and self._totals[0][0] <= last:
            self._taken_totals = self._totals.popleft()[1:]
        return self._taken_totals[0] - count, max(self._taken_totals[1] - seconds, 0.0)


def _with_rising_totals(slot: ring.Slot, before: ring.Slot) -> ring.Slot:
    """Return a record in which no total is lower than in the record before it.

    Totals decrease if a signal handler or another thread records an iteration in the middle of another one.  A report
    with a negative number would be rejected with its frame.
    """
    totals = (slot.step_ns, slot.wait_ns, slot.generation_ns, *slot.phases_ns, *slot.counts)
    old_totals = (before.step_ns, before.wait_ns, before.generation_ns, *before.phases_ns, *before.counts)
    if not any(map(lt, totals, old_totals)):
        return slot
    step_ns, wait_ns, generation_ns, *others = map(max, totals, old_totals)
    phases_ns, counts = others[: len(slot.phases_ns)], others[len(slot.phases_ns) :]
    return slot._replace(
        step_ns=step_ns, wait_ns=wait_ns, generation_ns=generation_ns, phases_ns=tuple(phases_ns), counts=tuple(counts)
    )


def _profile(slot: ring.Slot) -> Profile:
    if slot.what == ring.WHOLE:
        time_s = (slot.end_ns - slot.start_ns) * NS
        return Profile(iterations=1, time_s=time_s, communication_s=slot.number * NS, exposed_s=slot.value)
    if slot.what == ring.COMPUTING:
        return Profile(computing_s=slot.number * NS, cost_s=slot.value)
    return Profile(kinds={KINDS[slot.what]: (slot.number * NS, slot.value)})


class WindowCutter:
    """Cuts the records of one rank's ring into windows, of which the first starts at ``origin_ns``.

    ``offset`` is iteration number minus ordinal at the start, equal on every rank.
    """

    def __init__(
        self, agent: str, rank: int, log_interval: int, offset: int, origin_ns: int, unix_minus_monotonic_s: float
    ) -> None:
        self._agent, self._rank = agent, rank
        self._log_interval, self._offset = log_interval, offset
        self._unix_minus_monotonic_s = unix_minus_monotonic_s
        # For the next report: its start, the ordinal of its first iteration, and the totals at its start.
        self._start_ns = self.origin_ns = origin_ns
        self._first_ordinal, self._start_totals, self._num_overwritten_before = 1, _NO_TOTALS, 0
        self._last_iteration: ring.Slot | None = None
        self._newest_totals = _NO_TOTALS  # the last record with totals: of an iteration, a phase or the end
        #: Ended windows without a report, the oldest first: last iteration, number of overwritten iterations so far.
        self.unreported: deque[tuple[ring.Slot, int]] = deque()
        self._phases: list[Phase] = []  # marked phases that no report contains so far
        self._values = IterationValues()
        self._shown_minus_ordinal = offset  # of an iteration: number shown to users, minus ordinal
        self._first_iteration_ns = 0  # start of the first iteration; 0 before its end
        self._reset_ordinal = 0  # iteration with whose window the run-to-date values end; 0: no reset was requested
        self._num_reports = 0
        self._num_read = 0  # number of iterations with a read record
        self._num_overwritten = 0  # number of iterations with an overwritten record
        self._durations_s: deque[float] = deque(maxlen=64)  # of the last iterations, with data wait
        self._last_wait_ns = 0  # total of data waits at the last iteration; phases in between do not change it
        self._bounds_ns = array("q", bytes(16 * MAX_KEPT))  # start and end of the newest iterations, as a ring

    def iterations_ns(self) -> list[tuple[int, int]]:
        """Start and end of the newest iterations, in any order."""
        return [(start, end) for start, end in zip(self._bounds_ns[::2], self._bounds_ns[1::2], strict=True) if end]

    def unix_s(self, time_ns: int) -> float:
        """Return a monotonic time as unix time, by the clock of reports."""
        return time_ns * NS + self._unix_minus_monotonic_s

    @property
    def last_ordinal(self) -> int:
        """Ordinal of the last ended iteration, 0 before the first."""
        return self._last_iteration.ordinal if self._last_iteration else 0

    @property
    def unreported_ends_ns(self) -> list[int]:
        """Ends of the ended windows without a report, oldest first."""
        return [iteration.end_ns for iteration, _ in self.unreported]

    @property
    def possible_bounds_ns(self) -> list[int]:
        """Past times at which a part of a later report may begin or end."""
        moments = [self._start_ns, self._first_iteration_ns, *self.unreported_ends_ns]
        moments += [self._last_iteration.end_ns] if self._last_iteration else []
        return moments + [moment for phase in self._phases for moment in (phase.start_ns, phase.end_ns)]

    def window_of(self, ordinal: int) -> int:
        return -(-(ordinal + self._offset) // self._log_interval)  # rounded up

    def add_record(self, slot: ring.Slot) -> None:
        """Add a record; the window that it ends, if any, is then in `unreported`."""
        if not self._num_reports and slot.kind in (ring.ITERATION, ring.PHASE):
            # The first iteration or phase may have begun before the agent's first window.
            self._start_ns = self.origin_ns = min(self._start_ns, slot.start_ns)
        self._values.add_record(slot)
        if slot.kind in (ring.ITERATION, ring.PHASE, ring.END):
            slot = _with_rising_totals(slot, self._newest_totals)
        if slot.kind == ring.ITERATION and slot.ordinal <= self.last_ordinal:
            return  # a second record: two threads ended this iteration at once
        if slot.kind == ring.ITERATION:
            self._add_iteration(slot)
        elif slot.kind == ring.PHASE and slot.end_ns > slot.start_ns:
            self._phases.append(Phase(MARKED_PHASES[slot.what], slot.start_ns, slot.end_ns))
        elif slot.kind == ring.LOSS:
            self._shown_minus_ordinal = slot.number - slot.ordinal
        elif slot.kind == ring.RESET:
            self._reset_ordinal = max(slot.ordinal, 1)
        if slot.kind in (ring.PHASE, ring.END):
            self._newest_totals = slot

    def _add_iteration(self, slot: ring.Slot) -> None:
        if not self._first_iteration_ns:
            self._first_iteration_ns = slot.start_ns
        wait_s = max(slot.wait_ns - self._last_wait_ns, 0) * NS
        self._durations_s.append((slot.end_ns - slot.start_ns) * NS + wait_s)
        self._values.add_times(slot, (slot.step_ns - self._newest_totals.step_ns) * NS, wait_s)
        index = 2 * (self._num_read % MAX_KEPT)
        self._bounds_ns[index], self._bounds_ns[index + 1] = slot.start_ns, slot.end_ns
        self._last_wait_ns = slot.wait_ns
        self._num_read += 1
        self._num_overwritten = slot.ordinal - self._num_read
        self._last_iteration = self._newest_totals = slot
        # If the record at a window's boundary was overwritten, the window ends at the next boundary.
        if (slot.ordinal + self._offset) % self._log_interval == 0:
            self.unreported.append((slot, self._num_overwritten))

    def take_report(self, series: Sequence[Series]) -> RankReport | None:
        """Return the report of the oldest ended window, or ``None`` if no window has ended."""
        if not self.unreported:
            return None
        iteration, num_overwritten = self.unreported.popleft()
        return self._make_report(iteration.ordinal, iteration.end_ns, iteration, num_overwritten, series, final=False)

    def take_last_report(self, series: Sequence[Series], end_ns: int) -> RankReport:
        """Return the last report: the iterations since the last boundary, and the shutdown until ``end_ns``."""
        end_ns = max(end_ns, self._start_ns)
        totals, num_overwritten = self._newest_totals, self._num_overwritten
        return self._make_report(self.last_ordinal, end_ns, totals, num_overwritten, series, final=True)

    def _make_report(
        self, last: int, end_ns: int, totals: ring.Slot, num_overwritten: int, series: Sequence[Series], final: bool
    ) -> RankReport:
        start_ns, first, start_totals = self._start_ns, self._first_ordinal, self._start_totals
        phases_s = self._phases_s(totals, end_ns)
        self._num_reports += 1
        counts: Iterable[Any] = map(sub, totals.counts, start_totals.counts)
        devices, aliasing_error = self._device_windows(series, end_ns, phases_s, last - first + 1)
        report = RankReport(
            agent=self._agent,
            sequence=self._num_reports,
            rank=self._rank,
            window=self.window_of(max(last, first)),
            iteration_first=first,
            iteration_last=last,
            iteration_shown=max(last + self._shown_minus_ordinal, 0),
            start_time_s=self.unix_s(start_ns),
            end_time_s=self.unix_s(end_ns),
            wall_s=(end_ns - start_ns) * NS,
            busy_s=(totals.step_ns - start_totals.step_ns) * NS,
            wait_s=(totals.wait_ns - start_totals.wait_ns) * NS,
            phases_s=phases_s,
            generation_s=(totals.generation_ns - start_totals.generation_ns) * NS,
            devices=devices,
            final=final,
            reset=bool(self._reset_ordinal) and self._reset_ordinal <= max(last, 1),
            iterations_overrun=num_overwritten - self._num_overwritten_before,
            aliasing_error=aliasing_error,
            **self._values.take_fields(first, last),
            **dict(zip(FIELDS, counts, strict=True)),
        )
        if report.reset:
            self._reset_ordinal = 0
        self._start_ns, self._first_ordinal = end_ns, last + 1
        self._start_totals, self._num_overwritten_before = totals, num_overwritten
        for samples in series:
            samples.forget_before(end_ns)
        return report

    def _phases_s(self, totals: ring.Slot, end_ns: int) -> dict[str, float]:
        """Return the seconds of each phase; time outside of iterations and marked phases is startup or shutdown."""
        start_totals, start_ns = self._start_totals, self._start_ns
        phases = zip(MARKED_PHASES, totals.phases_ns, start_totals.phases_ns, strict=True)
        phases_ns = {name: total_ns - start_total_ns for name, total_ns, start_total_ns in phases}
        iterations_ns = totals.step_ns - start_totals.step_ns + totals.wait_ns - start_totals.wait_ns
        outside_ns = max(end_ns - start_ns - iterations_ns - sum(phases_ns.values()), 0)
        startup_ns = self._startup_ns(start_ns, end_ns, outside_ns) if self._first_ordinal == 1 else 0
        # Between two iterations all time is a wait or a phase, so there is a shutdown only in the last window.
        phases_ns |= {STARTUP: startup_ns, SHUTDOWN: outside_ns - startup_ns}
        return {name: ns * NS for name, ns in phases_ns.items() if ns}

    def _startup_ns(self, start_ns: int, end_ns: int, outside_ns: int) -> int:
        """Return the part of ``outside_ns``, the time outside iterations and phases, before the first iteration."""
        if not self.last_ordinal:
            return outside_ns  # before the end of the first iteration, all of this time is startup
        marked_ns = sum(p.end_ns - p.start_ns for p in self._phases if p.end_ns <= self._first_iteration_ns)
        return min(max(min(self._first_iteration_ns, end_ns) - start_ns - marked_ns, 0), outside_ns)

    def _device_windows(
        self, series: Sequence[Series], end_ns: int, phases_s: dict[str, float], iterations: int
    ) -> tuple[tuple[DeviceWindow, ...], float | None]:
        """Return the readings of the devices, and the largest aliasing error of a device."""
        inside = [phase for phase in self._phases if phase.end_ns <= end_ns]
        self._phases = [phase for phase in self._phases if phase.end_ns > end_ns]
        if len(self._durations_s) > 1:
            for samples in series:
                samples.energy.aliasing.set_durations(tuple(self._durations_s))
        devices = tuple(self._device_window(samples, end_ns, inside, phases_s) for samples in series)
        errors = [
            samples.energy.aliasing.add_window(iterations, device.wall.energy.joules or 0.0)
            for samples, device in zip(series, devices, strict=True)
        ]
        return devices, max((error for error in errors if error is not None), default=None)

    def _device_window(self, series: Series, end_ns: int, inside: list[Phase], names: Container[str]) -> DeviceWindow:
        """Return the readings of a device; ``inside``: its marked phases; ``names``: of all its phases."""
        start_ns = self._start_ns
        phases: dict[str, Integrals] = {}
        outside = [(phase.start_ns, phase.end_ns) for phase in inside]
        for phase in inside:
            part = series.integrals(max(phase.start_ns, start_ns), phase.end_ns)
            phases[phase.name] = phases[phase.name] + part if phase.name in phases else part
        if STARTUP in names:
            until_ns = min(self._first_iteration_ns or end_ns, end_ns)
            before = [series.integrals(max(p.start_ns, start_ns), p.end_ns) for p in inside if p.end_ns <= until_ns]
            outside.append((start_ns, until_ns))
            phases[STARTUP] = reduce(sub, before, series.integrals(start_ns, until_ns))
        if SHUTDOWN in names and self._last_iteration:
            from_ns = self._last_iteration.end_ns
            after = [series.integrals(p.start_ns, p.end_ns) for p in inside if p.start_ns >= from_ns]
            outside.append((from_ns, end_ns))
            phases[SHUTDOWN] = reduce(sub, after, series.integrals(from_ns, end_ns))
        return series.take_window(start_ns, end_ns, phases, outside)
