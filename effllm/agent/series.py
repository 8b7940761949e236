"""The samples of one device, and their integrals over any period. No I/O.

Integrals are time-weighted, because samples are irregular.  Time next to a failed reading and gaps without samples
are not covered: the covered seconds of an integral exclude this time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from msgspec.structs import replace

from effllm.energy.device_energy import EnergyLedger
from effllm.energy.readings import NS, runs_between
from effllm.job.joining import join_devices
from effllm.records.energy import NOT_MEASURED
from effllm.records.rank import (
    CLOCK_RATIO,
    NUM_POWER_BINS,
    POWER_STEP_W,
    TENSOR_CLOCK,
    Device,
    DeviceWindow,
    Event,
    Gauge,
    Integrals,
    Sample,
)
from effllm.records.timeline import overlap_ns, union

#: Reasons of a lower clock that are no fault: the power limit of a busy GPU, the common clock of a sync group, and the
#: highest voltage, which limits every GPU without another limit.
FAULTLESS = frozenset({"power_cap", "sync_boost", "reliability"})
#: A reason that a single reading may also show while the clock changes (DCGM's field notes): two in a row count.
TRANSIENT = "hw_slowdown"

PEAK_FIELDS = {"memory_bytes": "memory_peak_bytes", "power_w": "power_peak_w"}

#: Gauges that are means since the previous sample; all other gauges are instantaneous values.
ACTIVITY = "tensor_activity_ratio"
SINCE_LAST = frozenset({"sm_activity_ratio", ACTIVITY, "dram_activity_ratio"})


class Series:
    """The samples of one device that a window may still need; ``max_gap_s``: longest covered time between samples."""

    def __init__(self, device: Device, max_gap_s: float) -> None:
        self.device = device
        self._max_gap_ns = int(max_gap_s / NS)
        self.samples: deque[Sample] = deque()
        self._blocks: dict[int, DeviceWindow] = {}  # time of a sample -> sums until the next sample, by `compact`
        self.energy = EnergyLedger(device, max_gap_s)
        self.newest_ns = 0  # time of the newest sample
        self.events: list[Event] = []  # of the device, since `DeviceTrack` last took them
        self._max_activity_ns = int(0.4 * max_gap_s / NS)  # two intervals between samples; the longest gap is five
        self._first_start_ns = 0  # start of the first window
        self._counted_until_ns = 0  # the windows so far have the readings until this time
        self._last_activity: Sample | None = None  # the last sample of earlier windows that has an activity
        self._outside_iterations: list[tuple[int, int]] = []  # parts of the last windows outside their iterations
        self.keep_from_ns: int | None = None  # start of the oldest requested span; samples from there on are kept

    @property
    def newest(self) -> Sample | None:
        """The newest full sample, or ``None``."""
        return self.samples[-1] if self.samples else None

    def allow_gap(self, max_gap_s: float) -> None:
        """Allow longer gaps between samples, because the device is read less often than configured."""
        self._max_gap_ns = max(self._max_gap_ns, int(max_gap_s / NS))
        self.energy.allow_gap(max_gap_s)

    def add_sample(self, sample: Sample) -> None:
        """Append a sample; a sample that is not newer than the last is dropped."""
        if sample.time_ns <= self.newest_ns:
            return
        self.newest_ns = sample.time_ns
        self.energy.add(sample)
        if not sample.energy_only:
            self.samples.append(sample)
            self.events += sample.events

    def set_calibration(self, device: Device) -> None:
        """Use the sensor of a device that was calibrated after its first samples."""
        self.device = replace(self.device, sensor=device.sensor)
        self.energy.timing.calibrate(device.sensor)

    def is_settled(self, edge_ns: int) -> bool:
        """Whether the value at an edge is final: later samples cannot improve this value."""
        return self.newest_ns >= edge_ns and self.energy.is_settled(edge_ns)

    def compact(self, edges_ns: Collection[int], until_ns: int) -> None:
        """Sum up samples into blocks: a later period should include all of a block, or nothing of it.

        A period that begins or ends inside a block gets a share of the block in proportion to time.  Possible edges of
        later periods are ``edges_ns``, and any time after ``until_ns``.
        """
        margin_ns = max(self.energy.timing.margin_ns, 2 * self._max_gap_ns)
        for run in runs_between([sample.time_ns for sample in self.samples], edges_ns, until_ns, margin_ns):
            samples = list(self.samples)
            first, last = samples[run.start], samples[run.stop - 1]
            block = self._sums_without_energy(first.time_ns, last.time_ns)
            for sample in samples[run.start : run.stop - 1]:
                self._blocks.pop(sample.time_ns, None)
            self._blocks[first.time_ns] = block
            self.samples = deque([*samples[: run.start + 1], *samples[run.stop - 1 :]])
        self.energy.compact(edges_ns, until_ns, margin_ns)

    def forget_before(self, time_ns: int) -> None:
        """Drop the samples that periods after ``time_ns``, and the requested spans, do not need."""
        if self.keep_from_ns is not None:
            time_ns = min(time_ns, self.keep_from_ns)
        while len(self.samples) > 1 and self.samples[1].time_ns <= time_ns:
            self._blocks.pop(self.samples.popleft().time_ns, None)
        self.energy.forget_before(time_ns)

    def integrals(self, start_ns: int, end_ns: int) -> Integrals:
        return replace(self._integrals_without_energy(start_ns, end_ns), energy=self.energy.energy(start_ns, end_ns))

    def _integrals_without_energy(self, start_ns: int, end_ns: int) -> Integrals:
        byte_seconds = memory_covered_s = utilization_seconds = utilization_covered_s = 0.0
        for level_bytes, covered_s in self._memory_levels(start_ns, end_ns):
            byte_seconds += level_bytes * covered_s
            memory_covered_s += covered_s
        for _, second, covered_s in self._covered_pairs(start_ns, end_ns):
            if second.utilization is not None:  # utilization is the mean since the previous sample
                utilization_seconds += second.utilization * covered_s
                utilization_covered_s += covered_s
        for block, share, _ in self._blocks_inside(start_ns, end_ns):
            byte_seconds += (block.wall.memory_byte_seconds or 0.0) * share
            memory_covered_s += block.wall.memory_covered_s * share
            utilization_seconds += (block.wall.utilization_seconds or 0.0) * share
            utilization_covered_s += block.wall.utilization_covered_s * share
        memory = (byte_seconds if memory_covered_s > 0 else None), memory_covered_s
        utilization = (utilization_seconds if utilization_covered_s > 0 else None), utilization_covered_s
        return Integrals(NOT_MEASURED, *memory, *utilization)

    def _memory_levels(self, start_ns: int, end_ns: int) -> Iterator[tuple[float, float]]:
        """Yield the mean memory between adjacent samples inside the period, and the seconds of this part."""
        for first, second, covered_s in self._covered_pairs(start_ns, end_ns):
            if first.memory_bytes is not None and second.memory_bytes is not None:
                yield _mean_inside(first, second, start_ns, end_ns, first.memory_bytes, second.memory_bytes), covered_s

    def take_window(
        self, start_ns: int, end_ns: int, phases: dict[str, Integrals], outside: Collection[tuple[int, int]] = ()
    ) -> DeviceWindow:
        """Return the readings of a window, with what followed the last reading of the window before.

        It is called once for each window, in order; ``outside``: the parts of the window outside its iterations.
        """
        self._first_start_ns = self._first_start_ns or start_ns
        # A reading may have begun in the window before.
        self._outside_iterations = [span for span in self._outside_iterations if span[1] > start_ns - self._max_gap_ns]
        self._outside_iterations = union([*self._outside_iterations, *outside])
        sums = self._sums_without_energy(start_ns, end_ns, self._outside_iterations)
        # A device that is read less often than windows end: what followed its last reading is in the next window.
        for from_ns, to_ns in _gaps_between(self._outside_iterations, self._counted_until_ns or start_ns, start_ns):
            late_sums = self._sums_without_energy(from_ns, to_ns, self._outside_iterations)
            sums = join_devices((sums, replace(late_sums, memory_peak_bytes=None, power_peak_w=None)))
        self._counted_until_ns = min(self.samples[-1].time_ns if self.samples else start_ns, end_ns)
        window = self._with_energy(sums, start_ns, end_ns, phases)
        last = (sample for sample in reversed(self.samples) if sample.time_ns <= end_ns and ACTIVITY in sample.gauges)
        self._last_activity = next(last, self._last_activity)
        return window

    def window_of_span(self, start_ns: int, end_ns: int) -> DeviceWindow:
        """Return the readings in the period of a span; the windows of the loop do not change."""
        return self._with_energy(self._sums_without_energy(start_ns, end_ns), start_ns, end_ns, {})

    def _with_energy(
        self, sums: DeviceWindow, start_ns: int, end_ns: int, phases: dict[str, Integrals]
    ) -> DeviceWindow:
        return replace(
            sums,
            wall=replace(sums.wall, energy=self.energy.energy(start_ns, end_ns)),
            phases=phases,
            energy_method=self.energy.readings.coarsest_method(start_ns, end_ns),
        )

    def _sums_without_energy(self, start_ns: int, end_ns: int, outside: Sequence[tuple[int, int]] = ()) -> DeviceWindow:
        gauges = self._iteration_gauges(start_ns, end_ns, outside)
        throttled_s: dict[str, float] = {}
        histogram_s: dict[int, float] = {}
        throttle_covered_s = 0.0
        for first, second, covered_s in self._covered_pairs(start_ns, end_ns):
            for name, value in second.gauges.items():
                before = first.gauges.get(name, value)
                mean = value if name in SINCE_LAST else _mean_inside(first, second, start_ns, end_ns, before, value)
                _add_gauge(gauges, name, Gauge(mean * covered_s, covered_s, value, value))
            if second.throttled_by is not None:
                throttle_covered_s += covered_s
                reasons = set(second.throttled_by)
                if TRANSIENT not in (first.throttled_by or ()):
                    reasons.discard(TRANSIENT)
                for reason in (*reasons, *([] if reasons <= FAULTLESS else ["any"])):
                    throttled_s[reason] = throttled_s.get(reason, 0.0) + covered_s
            if second.power_w is not None:
                power_bin = min(max(int(second.power_w // POWER_STEP_W), 0), NUM_POWER_BINS - 1)
                histogram_s[power_bin] = histogram_s.get(power_bin, 0.0) + covered_s
        for block, share, _ in self._blocks_inside(start_ns, end_ns):
            for name, gauge in block.gauges.items():
                if name not in (CLOCK_RATIO, TENSOR_CLOCK):
                    _add_gauge(gauges, name, _scaled(gauge, share))
            throttle_covered_s += block.throttle_covered_s * share
            for reason, seconds in block.throttled_s.items():
                throttled_s[reason] = throttled_s.get(reason, 0.0) + seconds * share
            for power_bin, seconds in block.power_histogram_s.items():
                histogram_s[power_bin] = histogram_s.get(power_bin, 0.0) + seconds * share
        return DeviceWindow(
            device=self.device.key,
            wall=self._integrals_without_energy(start_ns, end_ns),
            memory_peak_bytes=self.peak(start_ns, end_ns, "memory_bytes"),
            power_peak_w=self.peak(start_ns, end_ns, "power_w"),
            gauges=gauges,
            throttled_s=throttled_s,
            throttle_covered_s=throttle_covered_s,
            power_histogram_s=histogram_s,
        )

    def _iteration_gauges(self, start_ns: int, end_ns: int, outside: Sequence[tuple[int, int]]) -> dict[str, Gauge]:
        """Return the gauges that are computed for iterations only; ``outside``: the parts of the period outside them.

        The SM clock over its reference covers the time in iterations with a busy GPU.  Tensor activity times SM clock
        covers whole readings in iterations: a reading of activity is a mean since the reading before it, and the mean
        of a product is not the product of means.
        """
        gauges: dict[str, Gauge] = {}
        previous = self._last_activity  # the last sample with an activity; not each sample has one
        for first, second, covered_s in self._covered_pairs(start_ns, end_ns):
            previous = first if ACTIVITY in first.gauges else previous
            clock_hz, activity = second.gauges.get("sm_clock_hz"), second.gauges.get(ACTIVITY)
            if clock_hz is None:
                continue
            before_hz = first.gauges.get("sm_clock_hz", clock_hz)
            covered_s -= _overlap_s(max(first.time_ns, start_ns), min(second.time_ns, end_ns), outside)
            if (reference_hz := self.device.sm_clock_reference_hz) and second.utilization != 0 and covered_s > 0:
                ratio = _mean_inside(first, second, start_ns, end_ns, before_hz, clock_hz) / reference_hz
                _add_gauge(gauges, CLOCK_RATIO, Gauge(ratio * covered_s, covered_s, *[clock_hz / reference_hz] * 2))
            is_whole = previous is not None and self._first_start_ns <= previous.time_ns < second.time_ns <= end_ns
            if activity is None or previous is None or not is_whole:
                continue
            if second.time_ns - previous.time_ns > self._max_activity_ns:  # long means would not represent iterations
                continue
            if not _overlap_s(previous.time_ns, second.time_ns, outside):
                used_hz = activity * (previous.gauges.get("sm_clock_hz", clock_hz) + clock_hz) / 2
                whole_s = (second.time_ns - previous.time_ns) * NS
                _add_gauge(gauges, TENSOR_CLOCK, Gauge(used_hz * whole_s, whole_s, used_hz, used_hz))
        for block, share, (from_ns, to_ns) in self._blocks_inside(start_ns, end_ns):
            if _overlap_s(max(from_ns, start_ns), min(to_ns, end_ns), outside):
                continue
            for name in (CLOCK_RATIO, TENSOR_CLOCK) if share == 1 else (CLOCK_RATIO,):
                if (gauge := block.gauges.get(name)) is not None:
                    _add_gauge(gauges, name, _scaled(gauge, share))
        return gauges

    def peak(self, start_ns: int, end_ns: int, field: str) -> float | None:
        """Return the maximum of a field (memory_bytes, power_w) in ``[start_ns, end_ns]``, or ``None``."""
        values = [getattr(s, field) for s in self.samples if start_ns <= s.time_ns <= end_ns]
        if field == "memory_bytes":  # a mean includes parts before the first and after the last of these samples
            values += [level for level, _ in self._memory_levels(start_ns, end_ns)]
        values += [getattr(block, PEAK_FIELDS[field]) for block, *_ in self._blocks_inside(start_ns, end_ns)]
        return max((value for value in values if value is not None), default=None)

    def _covered_pairs(self, start_ns: int, end_ns: int) -> Iterable[tuple[Sample, Sample, float]]:
        """Yield pairs of adjacent samples without a gap, with the seconds of each pair inside the period."""
        for first, second in pairwise(self.samples):
            inside_ns = min(second.time_ns, end_ns) - max(first.time_ns, start_ns)
            if inside_ns <= 0 or second.time_ns - first.time_ns > self._max_gap_ns:
                continue
            if first.time_ns not in self._blocks:
                yield first, second, inside_ns * NS

    def _blocks_inside(self, start_ns: int, end_ns: int) -> Iterable[tuple[DeviceWindow, float, tuple[int, int]]]:
        """Yield the blocks of `compact`: sums, share of the block inside the period (usually 1), and start and end."""
        if not self._blocks:
            return
        for first, second in pairwise(self.samples):
            if (block := self._blocks.get(first.time_ns)) is not None:
                inside_ns = min(second.time_ns, end_ns) - max(first.time_ns, start_ns)
                if inside_ns > 0:
                    whole_ns = second.time_ns - first.time_ns
                    yield block, inside_ns / whole_ns, (first.time_ns, second.time_ns)


def _gaps_between(outside: Sequence[tuple[int, int]], from_ns: int, to_ns: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a period that are not in any of the intervals, which are in order.

    >>> list(_gaps_between([(2, 4), (8, 9)], 1, 8))
    [(1, 2), (4, 8)]
    """
    for start_ns, end_ns in outside:
        if from_ns < min(start_ns, to_ns):
            yield from_ns, min(start_ns, to_ns)
        from_ns = max(from_ns, end_ns)
    if from_ns < to_ns:
        yield from_ns, to_ns


def _overlap_s(from_ns: int, to_ns: int, outside: Sequence[tuple[int, int]]) -> float:
    """Return the seconds of a period that lie in one of the intervals."""
    return overlap_ns([(from_ns, to_ns)], outside) * NS


def _mean_inside(first: Sample, second: Sample, start_ns: int, end_ns: int, before: float, after: float) -> float:
    """Return the mean value inside the period, by linear interpolation between two readings."""
    from_ns, to_ns = max(first.time_ns, start_ns), min(second.time_ns, end_ns)
    middle = ((from_ns + to_ns) / 2.0 - first.time_ns) / (second.time_ns - first.time_ns)
    return before + (after - before) * middle


def _add_gauge(gauges: dict[str, Gauge], name: str, part: Gauge) -> None:
    gauges[name] = gauges[name] + part if name in gauges else part


def _scaled(gauge: Gauge, share: float) -> Gauge:
    return replace(gauge, value_seconds=gauge.value_seconds * share, covered_s=gauge.covered_s * share)
