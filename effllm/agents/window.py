"""Samples and iterations of one rank to the sums of its windows, pure: no clock, no device, no file.

Integrals are time-weighted over irregular samples.  A stretch next to a failed reading, or one in which
no sample was taken for long, is not covered, and says so in the seconds that its integral covers.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from msgspec.structs import replace

from effllm.energy.device_energy import EnergyLedger
from effllm.energy.readings import NS, runs_between
from effllm.records.counters import FIELDS
from effllm.records.energy import MIN_COVERED_S, NOT_MEASURED
from effllm.records.rank import (
    MARKED_PHASES,
    NUM_POWER_BARS,
    POWER_STEP_W,
    SHUTDOWN,
    STARTUP,
    Device,
    DeviceWindow,
    Event,
    Gauge,
    Integrals,
    Phase,
    Profile,
    RankReport,
    Sample,
)
from effllm.timeline import KINDS
from effllm.training import ring

#: The totals before the first record.
_NO_TOTALS = ring.Slot(0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, (0,) * len(MARKED_PHASES), 0, (0,) * len(FIELDS))
_Level: TypeAlias = tuple[float | None, float]  # an integral over time, and the seconds that it covers


class Series:
    """The samples of one device that a window may still need.

    Args:
        device: what they are samples of.
        longest_gap_s: samples further apart than this leave a hole between them.
    """

    def __init__(self, device: Device, longest_gap_s: float) -> None:
        self.device = device
        self._longest_gap_ns = int(longest_gap_s / NS)
        self._samples: deque[Sample] = deque()
        self._folded: dict[int, DeviceWindow] = {}  # what lay between a sample and the next that is kept, by its time
        self._energy = EnergyLedger(device, longest_gap_s)
        self._newest_ns = 0
        self._events: list[Event] = []

    @property
    def newest_ns(self) -> int:
        """Time of the newest sample, 0 before the first."""
        return self._newest_ns

    @property
    def newest(self) -> Sample | None:
        """The newest sample that says more than energy."""
        return self._samples[-1] if self._samples else None

    @property
    def oldest_ns(self) -> int:
        """Time of the oldest sample that is kept, 0 before the first."""
        return self._samples[0].time_ns if self._samples else 0

    def allow_gap(self, longest_gap_s: float) -> None:
        """Let samples lie further apart: the device is read more seldom than it was meant to be."""
        self._longest_gap_ns = max(self._longest_gap_ns, int(longest_gap_s / NS))
        self._energy.allow_gap(longest_gap_s)

    def add(self, sample: Sample) -> None:
        """Append a sample; one that is not newer than the last is dropped."""
        if sample.time_ns <= self.newest_ns:
            return
        self._newest_ns = sample.time_ns
        self._energy.add(sample)
        if not sample.energy_only:
            self._samples.append(sample)
            self._events += sample.events

    def calibrate(self, device: Device) -> None:
        """Take what has been learnt of the device's sensor since the samples began."""
        self.device = replace(self.device, sensor=device.sensor)
        self._energy.calibrate(device.sensor)

    def expect_lag(self, kept_s: float) -> None:
        """Take the lag of the counter that an earlier run found."""
        self._energy.expect_lag(kept_s)

    def found_lag_s(self) -> float | None:
        """Return the lag of the counter that the samples have shown; ``None`` where they have not."""
        return self._energy.found_lag_s()

    @property
    def is_contradicted(self) -> bool:
        """Whether the samples contradict what is known of the sensor's ticks."""
        return self._energy.is_contradicted

    def set_rhythm(self, step_s: float, deviation_s: float) -> None:
        """Tell how long iterations take and how much that varies, for the sensor may beat with them."""
        self._energy.set_rhythm(step_s, deviation_s)

    def aliasing_error(self, iterations: int, wall: Integrals, durations_s: Sequence[float]) -> float | None:
        """Return the error of the run to date if iterations keep step with the sensor; once for each window."""
        return self._energy.aliasing_error(iterations, wall.energy, durations_s)

    def take_events(self, time_s: float) -> list[Event]:
        """Return what happened to the device and its measurement; ``time_s`` is the newest sample's unix time."""
        events, self._events = self._events + self._energy.take_events(time_s), []
        return events

    def reads_for(self, edge_ns: int) -> list[int]:
        """Return the moments at which a sample would tell what happened until an edge, soonest first."""
        return self._energy.reads_for(edge_ns)

    def is_settled(self, edge_ns: int) -> bool:
        """Whether no sample to come could tell an edge better."""
        return self.newest_ns >= edge_ns and self._energy.is_settled(edge_ns)

    @property
    def num_kept(self) -> int:
        """How many samples are kept."""
        return len(self._samples)

    def fold(self, edges_ns: Collection[int], until_ns: int) -> None:
        """Sum up the samples of which no stretch that is to come will have a part: all of them or none.

        A stretch that begins or ends inside of such a block after all gets its share of it by time.

        Args:
            edges_ns: moments at which a stretch may begin or end.
            until_ns: ... as at every one from here on.
        """
        margin_ns = max(self._energy.margin_ns, 2 * self._longest_gap_ns)
        for run in runs_between([sample.time_ns for sample in self._samples], edges_ns, until_ns, margin_ns):
            samples = list(self._samples)
            first, last = samples[run.start], samples[run.stop - 1]
            block = self._sums(first.time_ns, last.time_ns)
            for sample in samples[run.start : run.stop - 1]:
                self._folded.pop(sample.time_ns, None)
            self._folded[first.time_ns] = block
            self._samples = deque([*samples[: run.start + 1], *samples[run.stop - 1 :]])
        self._energy.fold(edges_ns, until_ns, margin_ns)

    def forget_before(self, time_ns: int) -> None:
        """Drop the samples that no stretch from ``time_ns`` on needs."""
        while len(self._samples) > 1 and self._samples[1].time_ns <= time_ns:
            self._folded.pop(self._samples.popleft().time_ns, None)
        self._energy.forget_before(time_ns)

    def integrals(self, start_ns: int, end_ns: int) -> Integrals:
        """Return the integrals over ``[start_ns, end_ns]``."""
        return replace(self._levels(start_ns, end_ns), energy=self._energy.energy(start_ns, end_ns))

    def _levels(self, start_ns: int, end_ns: int) -> Integrals:
        """Return the integrals of all but energy."""
        memory, utilization = _Sum(), _Sum()
        for first, second, covered_s in self._covered(start_ns, end_ns):
            if first.memory_bytes is not None and second.memory_bytes is not None:
                level = _level(first, second, start_ns, end_ns, first.memory_bytes, second.memory_bytes)
                memory.add(level * covered_s, covered_s)
            if second.utilization is not None:  # the mean since the sample before
                utilization.add(second.utilization * covered_s, covered_s)
        for block, share in self._blocks(start_ns, end_ns):
            memory.add((block.wall.memory_byte_seconds or 0.0) * share, block.wall.memory_covered_s * share)
            utilization.add((block.wall.utilization_seconds or 0.0) * share, block.wall.utilization_covered_s * share)
        return Integrals(NOT_MEASURED, *memory.pair(), *utilization.pair())

    def window(self, start_ns: int, end_ns: int, phases: dict[str, Integrals]) -> DeviceWindow:
        """Return what the device did in ``[start_ns, end_ns]``, of which ``phases`` are parts."""
        sums = self._sums(start_ns, end_ns)
        return replace(
            sums,
            wall=replace(sums.wall, energy=self._energy.energy(start_ns, end_ns)),
            phases=phases,
            energy_method=self._energy.method_in(start_ns, end_ns),
        )

    def _sums(self, start_ns: int, end_ns: int) -> DeviceWindow:
        """Return all but the energy."""
        gauges: dict[str, Gauge] = {}
        throttled_s: dict[str, float] = {}
        histogram_s: dict[int, float] = {}
        throttle_covered_s = 0.0
        for first, second, covered_s in self._covered(start_ns, end_ns):
            for name, value in second.gauges.items():
                before = first.gauges.get(name, value)
                mean = value if name in SINCE_LAST else _level(first, second, start_ns, end_ns, before, value)
                gauges[name] = _with(gauges.get(name), Gauge(mean * covered_s, covered_s, value, value))
            if second.throttled_by is not None:
                throttle_covered_s += covered_s
                is_slowed = not FAULTLESS.issuperset(second.throttled_by)
                for reason in (*second.throttled_by, *(["any"] if is_slowed else [])):
                    throttled_s[reason] = throttled_s.get(reason, 0.0) + covered_s
            if second.power_w is not None:
                step = min(max(int(second.power_w // POWER_STEP_W), 0), NUM_POWER_BARS - 1)
                histogram_s[step] = histogram_s.get(step, 0.0) + covered_s
        for block, share in self._blocks(start_ns, end_ns):
            for name, gauge in block.gauges.items():
                part = replace(gauge, value_seconds=gauge.value_seconds * share, covered_s=gauge.covered_s * share)
                gauges[name] = _with(gauges.get(name), part)
            throttle_covered_s += block.throttle_covered_s * share
            for reason, seconds in block.throttled_s.items():
                throttled_s[reason] = throttled_s.get(reason, 0.0) + seconds * share
            for step, seconds in block.power_histogram_s.items():
                histogram_s[step] = histogram_s.get(step, 0.0) + seconds * share
        return DeviceWindow(
            device=self.device.key,
            wall=self._levels(start_ns, end_ns),
            memory_peak_bytes=self.peak(start_ns, end_ns, "memory_bytes"),
            power_peak_w=self.peak(start_ns, end_ns, "power_w"),
            gauges=gauges,
            throttled_s=throttled_s,
            throttle_covered_s=throttle_covered_s,
            power_histogram_s=histogram_s,
        )

    def peak(self, start_ns: int, end_ns: int, field: str) -> float | None:
        """Return the largest reading of a field (memory_bytes, power_w) in ``[start_ns, end_ns]``, or ``None``."""
        values = [getattr(s, field) for s in self._samples if start_ns <= s.time_ns <= end_ns]
        values += [getattr(block, PEAKS[field]) for block, _ in self._blocks(start_ns, end_ns)]
        return max((value for value in values if value is not None), default=None)

    def _covered(self, start_ns: int, end_ns: int) -> Iterable[tuple[Sample, Sample, float]]:
        """Yield neighbouring samples that are near enough, with the seconds between them inside of a stretch."""
        for first, second in pairwise(self._samples):
            inside_ns = min(second.time_ns, end_ns) - max(first.time_ns, start_ns)
            if inside_ns <= 0 or second.time_ns - first.time_ns > self._longest_gap_ns:
                continue
            if first.time_ns not in self._folded:
                yield first, second, inside_ns * NS

    def _blocks(self, start_ns: int, end_ns: int) -> Iterable[tuple[DeviceWindow, float]]:
        """Yield what was folded, with the share of its time that lies inside of a stretch: all of it, as a rule."""
        if not self._folded:
            return
        for first, second in pairwise(self._samples):
            if (block := self._folded.get(first.time_ns)) is not None:
                inside_ns = min(second.time_ns, end_ns) - max(first.time_ns, start_ns)
                if inside_ns > 0:
                    yield block, inside_ns / (second.time_ns - first.time_ns)


#: Reasons of a lower clock that are no fault: busy GPUs reach their power limit, or wait for each other's clocks.
FAULTLESS = frozenset({"power_cap", "sync_boost"})

PEAKS = {"memory_bytes": "memory_peak_bytes", "power_w": "power_peak_w"}

#: Gauges that are means since the sample before; the others are values of a moment.
SINCE_LAST = frozenset({"sm_activity_ratio", "tensor_activity_ratio", "dram_activity_ratio"})


def _level(first: Sample, second: Sample, start_ns: int, end_ns: int, before: float, after: float) -> float:
    """Return the mean of a straight line between two readings over the part of it inside of a stretch."""
    from_ns, to_ns = max(first.time_ns, start_ns), min(second.time_ns, end_ns)
    middle = ((from_ns + to_ns) / 2.0 - first.time_ns) / (second.time_ns - first.time_ns)
    return before + (after - before) * middle


def _with(gauge: Gauge | None, part: Gauge) -> Gauge:
    if gauge is None:
        return part
    return Gauge(
        gauge.value_seconds + part.value_seconds,
        gauge.covered_s + part.covered_s,
        min(gauge.least, part.least),
        max(gauge.most, part.most),
    )


class _Sum:
    def __init__(self) -> None:
        self._value, self._covered_s = 0.0, 0.0

    def add(self, value: float, covered_s: float) -> None:
        self._value += value
        self._covered_s += covered_s

    def pair(self) -> tuple[float | None, float]:
        return (self._value, self._covered_s) if self._covered_s > 0 else (None, 0.0)


def subtract(whole: Integrals, parts: Iterable[Integrals]) -> Integrals:
    """Return the integrals over what is left of ``whole`` without ``parts``, which lie inside it."""
    for part in parts:
        memory, utilization = map(_left, _levels(whole), _levels(part))
        whole = Integrals(whole.energy - part.energy, *memory, *utilization)
    return whole


def _left(whole: _Level, part: _Level) -> _Level:
    if whole[0] is None or part[0] is None:
        return whole
    covered_s = whole[1] - part[1]
    return (max(whole[0] - part[0], 0.0), covered_s) if covered_s > MIN_COVERED_S else (None, 0.0)


def _both(first: _Level, second: _Level) -> _Level:
    value = second[0] if first[0] is None else first[0] if second[0] is None else first[0] + second[0]
    return value, first[1] + second[1]


def _levels(integrals: Integrals) -> tuple[_Level, _Level]:
    return (
        (integrals.memory_byte_seconds, integrals.memory_covered_s),
        (integrals.utilization_seconds, integrals.utilization_covered_s),
    )


class WindowCutter:
    """Cuts the records of one rank's ring into windows.

    Args:
        agent: random id of the agent.
        rank: rank in the job.
        log_interval: iterations per window.
        offset: iteration number less ordinal, as known at start on every rank.
        origin_ns: where the first row begins.
        unix_minus_monotonic_s: what makes unix times of monotonic ones.
    """

    def __init__(
        self,
        agent: str,
        rank: int,
        log_interval: int,
        offset: int,
        origin_ns: int,
        unix_minus_monotonic_s: float,
    ) -> None:
        self._agent, self._rank = agent, rank
        self._log_interval, self._offset = log_interval, offset
        self._unix_minus_monotonic_s = unix_minus_monotonic_s
        self._row_start_ns = self._origin_ns = origin_ns
        self._row_first = 1  # ordinal of the row's first iteration
        self._totals = _NO_TOTALS  # at the row's start
        self._newest: ring.Slot | None = None  # the last iteration
        self._newest_totals = _NO_TOTALS
        self._open: deque[tuple[ring.Slot, int]] = deque()  # last iteration and overrun of windows that are not cut yet
        self._phases: list[Phase] = []
        self._first_start_ns = 0
        self._losses: deque[tuple[int, int, float]] = deque()  # ordinal, number, loss
        self._profiles: deque[tuple[int, Profile]] = deque()
        self._device_times: deque[tuple[int, int, float]] = deque()  # ordinal, iterations timed so far, their seconds
        self._device_time = (0, 0.0)  # at the row's start
        self._device_own_times: deque[tuple[int, int, float]] = deque()  # the same until the sync point
        self._device_own_time = (0, 0.0)
        self._own: deque[tuple[int, int, int]] = deque()  # ordinal, own time, arrival, of iterations that told
        self._shown_minus_ordinal = offset
        self._reset_at = 0
        self._sequence = 0
        self._seen = 0  # iterations whose record was read
        self._overrun = 0  # ... and was not, so far
        self._row_overrun = 0  # of those, at the row's start
        self._durations_s: deque[float] = deque(maxlen=64)  # of the last iterations, data wait included
        self._last_wait_ns = 0

    def unix_s(self, time_ns: int) -> float:
        """Return a monotonic time as the unix time that rows are stamped with."""
        return time_ns * NS + self._unix_minus_monotonic_s

    @property
    def start_time_s(self) -> float:
        """Unix time at which the first row begins."""
        return self.unix_s(self._origin_ns)

    @property
    def last_ordinal(self) -> int:
        """Ordinal of the last iteration that ended."""
        return self._newest.ordinal if self._newest else 0

    @property
    def ended(self) -> ring.Slot | None:
        """Last iteration of the oldest window that has ended and is not cut yet."""
        return self._open[0][0] if self._open else None

    @property
    def edges_ns(self) -> list[int]:
        """Ends of the windows that have ended and are not cut yet, oldest first."""
        return [iteration.end_ns for iteration, _ in self._open]

    @property
    def moments_ns(self) -> list[int]:
        """Moments until now at which a stretch of a row to come may begin or end."""
        known = [
            self._row_start_ns,
            self._first_start_ns,
            *self.edges_ns,
            *([self._newest.end_ns] if self._newest else []),
        ]
        return known + [moment for phase in self._phases for moment in (phase.start_ns, phase.end_ns)]

    def window_of(self, ordinal: int) -> int:
        """Return the number of the window in which an iteration lies."""
        return -(-(ordinal + self._offset) // self._log_interval)

    def add(self, slot: ring.Slot) -> None:
        """Take the next record of the ring."""
        if not self._sequence and slot.kind in (ring.ITERATION, ring.PHASE):
            # The loop was faster than its agent.
            self._row_start_ns = self._origin_ns = min(self._row_start_ns, slot.start_ns)
        if slot.kind == ring.ITERATION:
            self._add_iteration(slot)
        elif slot.kind == ring.PHASE:
            if slot.end_ns > slot.start_ns:
                self._phases.append(Phase(MARKED_PHASES[slot.what], slot.start_ns, slot.end_ns))
        elif slot.kind == ring.LOSS:
            self._shown_minus_ordinal = slot.number - slot.ordinal
            if not slot.what:  # else none was given
                self._losses.append((slot.ordinal, slot.number, slot.value))
        elif slot.kind == ring.RESET:
            self._reset_at = max(slot.ordinal, 1)
        elif slot.kind == ring.PROFILE:
            self._profiles.append((slot.ordinal, _profile(slot)))
        elif slot.kind == ring.DEVICE_TIME:
            self._device_times.append((slot.ordinal, slot.number, slot.value))
        elif slot.kind == ring.OWN_TIME:
            self._device_own_times.append((slot.ordinal, slot.number, slot.value))
        if slot.kind in (ring.PHASE, ring.END):
            self._newest_totals = slot

    def _add_iteration(self, slot: ring.Slot) -> None:
        if not self._first_start_ns:
            self._first_start_ns = slot.start_ns
        if slot.number > 0:
            self._own.append((slot.ordinal, slot.number, int(slot.value)))
        self._durations_s.append((slot.end_ns - slot.start_ns + max(slot.wait_ns - self._last_wait_ns, 0)) * NS)
        self._last_wait_ns = slot.wait_ns
        self._seen += 1
        self._overrun = slot.ordinal - self._seen
        # An overrun may have taken the record of a boundary: then the next one at a boundary ends the window.
        self._newest = self._newest_totals = slot
        if (slot.ordinal + self._offset) % self._log_interval == 0:
            self._open.append((slot, self._overrun))

    def cut(self, series: Sequence[Series]) -> RankReport | None:
        """Return the oldest window that has ended, or ``None``."""
        if not self._open:
            return None
        iteration, overrun = self._open.popleft()
        return self._row(iteration.ordinal, iteration.end_ns, iteration, overrun, series, final=False)

    def cut_rest(self, series: Sequence[Series], end_ns: int) -> RankReport:
        """Return the last row: what ran since the last boundary, and the shut-down until ``end_ns``."""
        end_ns = max(end_ns, self._row_start_ns)
        return self._row(self.last_ordinal, end_ns, self._newest_totals, self._overrun, series, final=True)

    def _row(
        self, last: int, end_ns: int, totals: ring.Slot, overrun: int, series: Sequence[Series], final: bool
    ) -> RankReport:
        start_ns = self._row_start_ns
        before = self._totals
        step_ns, wait_ns = totals.step_ns - before.step_ns, totals.wait_ns - before.wait_ns
        phases_ns = [now_ns - then_ns for now_ns, then_ns in zip(totals.phases_ns, before.phases_ns, strict=True)]
        counts = [now - then for now, then in zip(totals.counts, before.counts, strict=True)]
        phases_s = {name: ns * NS for name, ns in zip(MARKED_PHASES, phases_ns, strict=True) if ns}
        # What no total claims lies before the first iteration or after the last one.
        rest_ns = max(end_ns - start_ns - step_ns - wait_ns - sum(phases_ns), 0)
        startup_ns = 0
        if self._row_first == 1:
            startup_ns = self._startup_ns(start_ns, end_ns, rest_ns)
            if startup_ns:
                phases_s[STARTUP] = startup_ns * NS
        if rest_ns - startup_ns:
            phases_s[SHUTDOWN] = (rest_ns - startup_ns) * NS
        losses = [(number, loss) for ordinal, number, loss in self._losses if self._row_first <= ordinal <= last]
        not_finite = [number for number, loss in losses if not math.isfinite(loss)]
        while self._losses and self._losses[0][0] <= last:
            self._losses.popleft()
        profile = None
        while self._profiles and self._profiles[0][0] <= last:  # one that came late is of this row
            profile = add_profiles(profile, self._profiles.popleft()[1])
        device_steps, device_step_s = self._device_time
        while self._device_times and self._device_times[0][0] <= last:
            self._device_time = self._device_times.popleft()[1:]
        device_own_steps, device_own_step_s = self._device_own_time
        while self._device_own_times and self._device_own_times[0][0] <= last:
            self._device_own_time = self._device_own_times.popleft()[1:]
        own_s, arrival_ns = [], 0
        while self._own and self._own[0][0] <= last:
            ordinal, own_ns, came_ns = self._own.popleft()
            own_s.append(own_ns * NS)
            arrival_ns = came_ns if ordinal == last else 0
        inside = [phase for phase in self._phases if phase.end_ns <= end_ns]
        self._phases = [phase for phase in self._phases if phase.end_ns > end_ns]
        self._sequence += 1
        if len(self._durations_s) > 1:
            step_s, deviation_s = statistics.median(self._durations_s), _deviation(self._durations_s)
            for one in series:
                one.set_rhythm(step_s, deviation_s)
        devices = tuple(self._device(one, start_ns, end_ns, inside, phases_s) for one in series)
        iterations = last - self._row_first + 1
        aliasing = [
            error
            for one, device in zip(series, devices, strict=True)
            if (error := one.aliasing_error(iterations, device.wall, self._durations_s)) is not None
        ]
        report = RankReport(
            agent=self._agent,
            sequence=self._sequence,
            rank=self._rank,
            window=self.window_of(max(last, self._row_first)),
            iteration_first=self._row_first,
            iteration_last=last,
            iteration_shown=last + self._shown_minus_ordinal,
            start_time_s=self.unix_s(start_ns),
            end_time_s=self.unix_s(end_ns),
            wall_s=(end_ns - start_ns) * NS,
            busy_s=step_ns * NS,
            wait_s=wait_ns * NS,
            phases_s=phases_s,
            generation_s=(totals.generation_ns - before.generation_ns) * NS,
            devices=devices,
            loss=losses[-1][1] if losses and math.isfinite(losses[-1][1]) else None,
            final=final,
            reset=bool(self._reset_at) and self._reset_at <= max(last, 1),
            iterations_overrun=overrun - self._row_overrun,
            profile=profile,
            device_steps=self._device_time[0] - device_steps,
            device_step_s=max(self._device_time[1] - device_step_s, 0.0),
            own_steps=len(own_s),
            own_step_s=sum(own_s),
            own_median_s=statistics.median(own_s) if own_s else None,
            arrival_ns=arrival_ns,
            device_own_steps=self._device_own_time[0] - device_own_steps,
            device_own_step_s=max(self._device_own_time[1] - device_own_step_s, 0.0),
            aliasing_error=max(aliasing, default=None),
            losses_not_finite=len(not_finite),
            first_not_finite=not_finite[0] if not_finite else None,
            **dict(zip(FIELDS, counts, strict=True)),
        )
        if report.reset:
            self._reset_at = 0
        self._row_start_ns, self._row_first, self._totals, self._row_overrun = end_ns, last + 1, totals, overrun
        for one in series:
            one.forget_before(end_ns)
        return report

    def _startup_ns(self, start_ns: int, end_ns: int, rest_ns: int) -> int:
        if not self.last_ordinal:
            return rest_ns  # no iteration ever ended: all of it was start-up
        marked_ns = sum(p.end_ns - p.start_ns for p in self._phases if p.end_ns <= self._first_start_ns)
        return min(max(min(self._first_start_ns, end_ns) - start_ns - marked_ns, 0), rest_ns)

    def _device(
        self, series: Series, start_ns: int, end_ns: int, inside: Sequence[Phase], phases_s: dict[str, float]
    ) -> DeviceWindow:
        phases: dict[str, Integrals] = {}
        for phase in inside:
            part = series.integrals(max(phase.start_ns, start_ns), phase.end_ns)
            phases[phase.name] = add(phases[phase.name], part) if phase.name in phases else part
        if STARTUP in phases_s:
            until_ns = min(self._first_start_ns or end_ns, end_ns)
            before = [series.integrals(max(p.start_ns, start_ns), p.end_ns) for p in inside if p.end_ns <= until_ns]
            phases[STARTUP] = subtract(series.integrals(start_ns, until_ns), before)
        if SHUTDOWN in phases_s and self._newest:
            from_ns = self._newest.end_ns
            after = [series.integrals(p.start_ns, p.end_ns) for p in inside if p.start_ns >= from_ns]
            phases[SHUTDOWN] = subtract(series.integrals(from_ns, end_ns), after)
        return series.window(start_ns, end_ns, phases)


def add(first: Integrals, second: Integrals, *, is_next: bool = False) -> Integrals:
    """Return the integrals over two stretches that do not overlap; ``is_next`` where the second follows the first."""
    memory, utilization = map(_both, _levels(first), _levels(second))
    energy = first.energy.then(second.energy) if is_next else first.energy + second.energy
    return Integrals(energy, *memory, *utilization)


def _profile(slot: ring.Slot) -> Profile:
    if slot.what == ring.WHOLE:
        time_s = (slot.end_ns - slot.start_ns) * NS
        return Profile(iterations=1, time_s=time_s, communication_s=slot.number * NS, exposed_s=slot.value)
    if slot.what == ring.COMPUTING:
        return Profile(computing_s=slot.number * NS, cost_s=slot.value)
    return Profile(kinds={KINDS[slot.what]: (slot.number * NS, slot.value)})


def add_profiles(first: Profile | None, second: Profile | None) -> Profile | None:
    """Return the sums of both; ``None`` where neither was measured."""
    if first is None or second is None:
        return first or second
    kinds = dict(first.kinds)
    for kind, (communication_s, exposed_s) in second.kinds.items():
        before = kinds.get(kind, (0.0, 0.0))
        kinds[kind] = (before[0] + communication_s, before[1] + exposed_s)
    return Profile(
        iterations=first.iterations + second.iterations,
        time_s=first.time_s + second.time_s,
        communication_s=first.communication_s + second.communication_s,
        exposed_s=first.exposed_s + second.exposed_s,
        computing_s=first.computing_s + second.computing_s,
        cost_s=first.cost_s + second.cost_s,
        kinds=kinds,
    )


def _deviation(values: Collection[float]) -> float:
    """Return the standard deviation of a sample; `statistics.stdev` adds fractions, and takes ten times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def iterations_only(window: DeviceWindow) -> Integrals:
    """Return what a device did in a window's iterations: everything less the phases."""
    return subtract(window.wall, window.phases.values())
