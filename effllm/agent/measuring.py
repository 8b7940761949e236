"""The measurement of a rank: reports of windows, from records of the ring and samples of the devices.

It also has the memory of the rank, and the values of its instruments by window.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from effllm.agent.proc import available_bytes, private_bytes
from effllm.agent.rank_devices import RankDevices
from effllm.agent.series import Series
from effllm.agent.spans import Spans
from effllm.agent.track import FORCE_AFTER_S
from effllm.agent.trainer import Trainer
from effllm.agent.window import WindowCutter
from effllm.memory.watch import STARTUP, STEPS, DeviceWatch, LeakWatch, MemoryReading, MemoryWarning
from effllm.network.transport import Outbox
from effllm.records import ring
from effllm.records.clock import unix_minus_monotonic_ns
from effllm.records.framework_figures import FIGURES
from effllm.records.moments import Moments
from effllm.records.rank import (
    MARKED_PHASES,
    MAX_NAMES,
    WINDOW_CENTROIDS,
    Allocator,
    Event,
    RankReport,
    ValueStatistics,
)
from effllm.records.ring import END as END_RECORD
from effllm.records.ring import ITERATION, MEMORY, SPAN, STATUSES, STEP, VALUES, Slot
from effllm.records.values import MAX_VALUE, centroids_of, digest_type, merge_by_name, merge_statistics, percentiles

LOSS_WAIT_S = 0.5  # maximum wait for the loss of a window, which is recorded after the window's end
CALIBRATION_CHECK_S = 0.05  # seconds between two checks of a sensor that is being calibrated
#: `Series.compact` is called if a device has more samples or energy readings than this; checked every COMPACT_EVERY_S.
COMPACT_FROM, COMPACT_EVERY_S = 200, 30.0
#: Number of windows whose median is the memory of other processes and of the driver.
OTHER_WINDOWS = 9
_PLACES = (*MARKED_PHASES, STEPS, STARTUP)
#: Maximum number of open windows; values of further windows are added to the newest window.
MAX_WINDOWS = 64
PUBLISH_EVERY_S = 1.0
_Statistics = dict[str, ValueStatistics]  # by name
_NO_DIGEST = (
    "percentiles of instruments: not measured, because fastdigest is missing: pip install 'effllm[instruments]'"
)


class Measuring:
    """Cuts the windows of a rank, whose devices have started; the first window has the existing records of the ring."""

    def __init__(self, trainer: Trainer, devices: RankDevices) -> None:
        self._trainer, self.devices = trainer, devices
        self.outbox = Outbox(trainer.config.history_size)
        self.status: str | None = None  # final status of the trainer
        self.end_ns = 0  # end of the trainer
        self._next_compact_s = 0.0
        self._spans, self._has_spans = Spans(trainer.board), False  # whether an instrument has requested a span so far
        self.values = InstrumentValues(trainer.board.values.write_document)
        self.memory = RankMemory(trainer.pid, trainer.config.log_interval, trainer.facts.first_iteration)
        slots, origin_ns = self._read_first_records()
        self.cutter = WindowCutter(
            agent=trainer.agent,
            rank=trainer.rank,
            log_interval=trainer.config.log_interval,
            offset=trainer.facts.first_iteration,
            origin_ns=origin_ns,
            unix_minus_monotonic_s=unix_minus_monotonic_ns() * 1e-9,
        )
        self._add_records(slots)

    def time_s(self) -> float:
        """Return the current time of the clock of reports."""
        return self.cutter.unix_s(time.monotonic_ns())

    def read_ring_and_samples(self, *, is_trainer_gone: bool) -> None:
        self.devices.take_samples()
        self._add_records(self._trainer.ring.read_new())
        if is_trainer_gone and self.status is None:
            self._add_records(self._trainer.ring.read_new())
            self.status, self.end_ns = self._trainer.exit_status.final_status(), time.monotonic_ns()
        self.devices.calibrate_when_due(has_begun=self.cutter.last_ordinal > 0 or self._has_spans)
        self.memory.read_at_window_end(self.cutter.last_ordinal, self.devices.series, self._trainer.facts.max_positions)

    def cut_ended_windows(self, now_s: float) -> None:
        """Queue the reports of ended windows whose edges are settled, request missing samples, and answer for spans."""
        # An edge needs samples of the two ticks after the edge. The next window may end before these ticks, so the
        # samples for all open edges are requested.
        for edge_ns in sorted({*self.cutter.unreported_ends_ns, *self._spans.unanswered_ends_ns}):
            self.devices.request_samples(edge_ns)
        self._spans.answer_requests(self.devices, now_s)
        while self.cutter.unreported:
            last, _ = self.cutter.unreported[0]  # the last iteration of the window
            is_settled = self.devices.is_settled(last.end_ns)
            ordinal = self._trainer.ring.read_state().ordinal
            # A loss is not awaited after a later iteration or the end of the trainer.
            may_loss_follow = max(ordinal, self.cutter.last_ordinal) <= last.ordinal and self.status is None
            waited_s = now_s - last.end_ns * 1e-9
            if not is_settled and waited_s > FORCE_AFTER_S:
                self.devices.request_samples(last.end_ns, is_forced=True)
            waits_for_samples = not is_settled and waited_s < self.devices.patience_s
            waits_for_loss = may_loss_follow and waited_s < LOSS_WAIT_S
            if waits_for_samples or waits_for_loss:
                return
            if (report := self.cutter.take_report(self.devices.series)) is not None:
                self._queue_report(report)

    def due_s(self, now_s: float) -> float:
        """Return the time of the next check of an ended window or span; infinite without an ended window or span."""
        ends_ns = [*self.cutter.unreported_ends_ns[:1], *self._spans.unanswered_ends_ns[:1]]
        if not ends_ns:
            return math.inf
        for wait_s in sorted((LOSS_WAIT_S, FORCE_AFTER_S, self.devices.patience_s)):
            if min(ends_ns) * 1e-9 + wait_s > now_s:
                return min(ends_ns) * 1e-9 + wait_s
        return now_s + (CALIBRATION_CHECK_S if self.devices.is_calibrating else 0.0)

    def compact_samples(self, now_s: float) -> None:
        """Sum up samples while no window ends.

        During a long stall, samples of 0.9 kB would otherwise need 75 MB of memory per day, and each requested span
        adds two readings and a level of the energy.  A span that is never asked for also keeps its samples.
        """
        if now_s < self._next_compact_s:
            return
        self._next_compact_s = now_s + COMPACT_EVERY_S
        all_series = self.devices.series
        if not any(max(len(series.samples), len(series.energy.readings)) > COMPACT_FROM for series in all_series):
            return
        until_ns = time.monotonic_ns()
        self._add_records(self._trainer.ring.read_new())
        since_ns = self._trainer.ring.read_state().since_ns
        edges_ns = [*self.cutter.possible_bounds_ns, *self._spans.possible_bounds_ns, since_ns]
        if not self.devices.has_baseline:
            edges_ns += self._trainer.facts.baseline_ns
        for series in all_series:
            series.compact(edges_ns, until_ns)

    def settle_end(self) -> bool:
        """Request the samples at the trainer's end; return whether these samples have been read."""
        self.devices.request_samples(self.end_ns, is_forced=True)
        self.devices.take_samples()
        return self.devices.is_settled(self.end_ns)

    def finish(self) -> None:
        """Queue the remaining reports, after the trainer's end."""
        self._trainer.ring.skip_torn()
        self._add_records(self._trainer.ring.read_new())
        self._spans.answer_requests(self.devices, time.monotonic(), is_end=True)
        while (report := self.cutter.take_report(self.devices.series)) is not None:
            self._queue_report(report)
        self._queue_report(self.cutter.take_last_report(self.devices.series, self.end_ns))

    def _queue_report(self, report: RankReport) -> None:
        names = self._trainer.facts.value_names
        values = self.values.take_values(report.window, names, time.monotonic(), is_last=report.final)
        allocator, memory_values = self.memory.take_values(report.window, is_last=report.final)
        values = dict(islice({**values, **memory_values}.items(), MAX_NAMES))
        if values or allocator is not None:
            report = replace(report, values=values or None, allocator=allocator)
        self.outbox.add_report(report)

    def _read_first_records(self) -> tuple[list[Slot], int]:
        """Read the existing records; return them, and the start of the first window."""
        origin_ns = time.monotonic_ns()
        self.devices.take_samples()
        all_series = self.devices.series
        if all_series and all_series[0].newest_ns:
            # The first time at which all devices have samples.
            origin_ns = max(series.samples[0].time_ns if series.samples else 0 for series in all_series)
        slots = self._trainer.ring.read_new()
        loop_start_ns = [slot.start_ns for slot in slots if slot.kind == ITERATION and slot.ordinal == 1]
        state, ordinal, since_ns, _ = self._trainer.ring.read_state()
        if state == STEP and ordinal == 1:
            loop_start_ns.append(since_ns)
        return slots, min([origin_ns, *loop_start_ns])

    def _add_records(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.kind == END_RECORD and self.status is None:
                self.status, self.end_ns = STATUSES[slot.what], slot.end_ns
            if slot.kind == MEMORY:
                self.memory.add_record(slot)
            elif slot.kind == SPAN:
                self._has_spans = True
                self._spans.pending.append(slot)
            elif slot.kind == VALUES:
                self.values.add_record(slot, self.cutter.window_of(slot.ordinal))
            else:
                self.cutter.add_record(slot)


class RankMemory:
    """The memory of a rank, with warnings and values for reports; ``offset``: number of the first iteration, less 1."""

    def __init__(self, pid: int, log_interval: int, offset: int) -> None:
        self._pid, self._log_interval, self._offset = pid, log_interval, offset
        self._device_watch, self._host_watch = DeviceWatch(), LeakWatch("private memory of the training process")
        self._last_window_end = 0  # ordinal of the last window end in a record
        self._last_host_read = 0  # ordinal of the last iteration at the last read of the host's memory
        self._other_bytes: deque[float] = deque(maxlen=OTHER_WINDOWS)  # the newest sizes that torch cannot have
        self._warned: list[MemoryWarning] = []
        self._unreported: dict[int, dict[str, float]] = {}  # number of the window -> name -> value

    def add_record(self, slot: ring.Slot) -> None:
        """Add a record of the kind MEMORY."""
        before = self._device_watch.last
        is_boundary = (slot.ordinal + self._offset) % self._log_interval == 0
        is_end = slot.number == ring.AFTER_STEPS and slot.ordinal > self._last_window_end and is_boundary
        fields = dict(zip(ring.MEMORY_FIELDS, (value for _, value in slot.values), strict=True))
        reading = MemoryReading(_PLACES[slot.number], slot.ordinal + self._offset, **fields)
        self._warned += self._device_watch.add_reading(reading, is_window_end=is_end)
        self._keep_values(slot, reading, before, is_end)
        if is_end:
            self._last_window_end = slot.ordinal

    def read_at_window_end(self, ordinal: int, series: Iterable[Series], max_positions: int | None) -> None:
        """Read the memory of the process, and check the forecasts, if a window has ended; torch uses the first GPU."""
        if ordinal // self._log_interval <= self._last_host_read // self._log_interval:
            return
        self._last_host_read = ordinal
        if (private := private_bytes(self._pid)) is not None:
            self._host_watch.add(ordinal + self._offset, private)
            self._warned += self._host_watch.new_warnings(lambda: available_bytes(self._pid))
        if self._device_watch.last is not None:
            self._warned += self._device_watch.new_warnings(self._max_torch_bytes(series), max_positions or 0)

    def take_events(self, time_s: float) -> Iterator[Event]:
        warned, self._warned = self._warned, []
        for warning in warned:
            yield Event(time_s, warning.kind, warning.text)

    def take_values(self, window: int, *, is_last: bool) -> tuple[Allocator | None, _Statistics]:
        """Remove and return the allocator's sizes, and its peaks and counts as statistics of one value."""
        windows = sorted(number for number in self._unreported if is_last or number <= window)
        values: dict[str, float] = {}
        for number in windows:
            for name, value in self._unreported.pop(number).items():
                is_count = name in ("allocator/retries", "allocator/out_of_memory")
                values[name] = values.get(name, 0.0) + value if is_count else max(values.get(name, 0.0), value)
        sizes = [values.pop(f"allocator/{name}", None) for name in Allocator.__struct_fields__]
        allocator = Allocator(*(size for size in sizes if size is not None)) if None not in sizes else None
        return allocator, {name: ValueStatistics(1, value, 0.0, value, value) for name, value in values.items()}

    def _keep_values(self, slot: ring.Slot, now: MemoryReading, before: MemoryReading | None, is_end: bool) -> None:
        """Keep the values of a reading until the report of its window; ``is_end``: at the end of a window."""
        # After the end of a window, also a phase and an iteration that does not end belong to the next window.
        window = -(-(slot.ordinal + self._offset + (not is_end)) // self._log_interval)  # rounded up
        values = self._unreported.setdefault(window, {})
        has_failed = before is not None and now.out_of_memory > before.out_of_memory
        if is_end or has_failed:
            values["allocator/allocated_bytes"] = now.allocated
            values["allocator/reserved_bytes"] = now.reserved
            values["allocator/fragmented_bytes"] = now.fragmented
        if before is None or now.allocated_peak > before.allocated_peak:
            values[f"allocator/{now.after}_peak_bytes"] = now.allocated_peak
        if before is not None:
            for name in ("retries", "out_of_memory"):
                if (increase := getattr(now, name) - getattr(before, name)) > 0:
                    values[f"allocator/{name}"] = values.get(f"allocator/{name}", 0.0) + increase

    def _max_torch_bytes(self, series: Iterable[Series]) -> float | None:
        """Return the bytes that torch's allocator can have, by samples of recent calls; ``None`` without a sample."""
        gpu = next((samples for samples in series if samples.device.is_gpu and not samples.device.shared), None)
        last = self._device_watch.last
        if gpu is None or last is None or not gpu.device.memory_total_bytes or gpu.newest is None:
            return None
        if gpu.newest.memory_bytes is not None:  # the driver, the CUDA context, libraries and other processes
            of_driver = gpu.newest.gauges.get("memory_reserved_bytes", 0.0)
            self._other_bytes.append(max(gpu.newest.memory_bytes - last.reserved, 0.0) + of_driver)
        return gpu.device.memory_total_bytes - statistics.median(self._other_bytes) if self._other_bytes else None


class _NameSums(Moments):
    """The sums of the values of one name, with a digest for percentiles if its library is installed."""

    __slots__ = ("_digest",)

    def __init__(self) -> None:
        super().__init__()
        digest: Any = digest_type()
        self._digest = digest(WINDOW_CENTROIDS) if digest is not None else None

    def add_value(self, value: float) -> bool:
        if abs(value) > MAX_VALUE:
            value = math.copysign(math.inf, value)
        is_finite = super().add_value(value)
        if is_finite and self._digest is not None:
            self._digest.update(value)
        return is_finite

    def statistics(self) -> ValueStatistics:
        nan, infinite, negative = (self.not_finite.get(name, 0) for name in ("nan", "inf", "-inf"))
        return ValueStatistics(
            count=self.count,
            total=self.total,
            squares=self.squares,
            least=self.minimum if self.count else 0.0,
            most=self.maximum if self.count else 0.0,
            not_finite=(nan, infinite, negative),
            centroids=centroids_of(self._digest) if self._digest is not None else (),
        )


class InstrumentValues:
    """Statistics of values by window and name, until the report of the window.

    ``publish`` writes percentiles of the whole run for the training process; ``False`` if there is no room.
    """

    def __init__(self, publish: Callable[[Mapping[str, Any]], bool] = lambda _: True) -> None:
        self._windows: dict[int, dict[int, _NameSums]] = {}  # sums of open windows, by window and index of the name
        self._of_run: dict[str, ValueStatistics] = {}  # statistics of all values so far, by name
        self._publish, self._published_s = publish, -math.inf
        self._num_written = self._num_lost = 0  # values of the training process; the overwritten ones of them
        self._notice = ""  # a line for the user
        self._is_digest_checked = False  # at the first value of an instrument

    def add_record(self, slot: ring.Slot, window: int) -> None:
        """Add a record of the kind VALUES."""
        sums = self._windows.get(window)
        if sums is None:
            if len(self._windows) >= MAX_WINDOWS:
                window = max(self._windows)
            sums = self._windows.setdefault(window, {})
        self._num_lost += max(slot.number - self._num_written - len(slot.values), 0)
        self._num_written = max(slot.number, self._num_written)
        for index, value in slot.values:
            if index not in sums:
                sums[index] = _NameSums()
            sums[index].add_value(value)

    def take_values(self, window: int, names: Sequence[str], now_s: float, *, is_last: bool) -> _Statistics:
        """Remove and return the statistics of values up to a window, or of all if ``is_last``; publish the run's."""
        windows = sorted(number for number in self._windows if is_last or number <= window)
        taken = [self._windows.pop(number) for number in windows]
        values = merge_by_name(
            {names[index]: sums.statistics() for index, sums in part.items() if index < len(names)} for part in taken
        )
        has_instruments = not values.keys() <= FIGURES.keys()  # percentiles of figures of the framework are not shown
        if has_instruments and not self._is_digest_checked:
            self._is_digest_checked, self._notice = True, _NO_DIGEST if digest_type() is None else ""
        for name, value in values.items():
            if value.centroids:
                self._of_run[name] = merge_statistics([self._of_run[name], value]) if name in self._of_run else value
        if is_last or now_s - self._published_s >= PUBLISH_EVERY_S:
            self._published_s = now_s
            rows = {name: [value.count, *percentiles(value.centroids).values()] for name, value in self._of_run.items()}
            while rows and not self._publish(rows):  # no room: the first half or quarter of the names
                rows = dict(islice(rows.items(), len(rows) // 2))
        return values

    def take_notice(self) -> str:
        """Return a line for the user, once; empty without a new one."""
        if self._num_lost:
            text = (
                f"{self._num_lost} values of instruments are missing: they were overwritten before the agent read "
                "them, or a second thread recorded more than 1,000 values in one iteration"
            )
            self._num_lost = 0
            return text
        text, self._notice = self._notice, ""
        return text
