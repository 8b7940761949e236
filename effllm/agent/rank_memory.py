"""The memory of one rank: readings of torch's allocator from the ring, and the memory of the training process.

The warnings are made by `effllm.memory`; this module supplies the readings and the capacity of the device.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Iterator

from effllm.agent.proc import available_bytes, private_bytes
from effllm.agent.series import Series
from effllm.memory.device_forecast import STARTUP, STEPS, MemoryReading
from effllm.memory.watch import DeviceWatch, LeakWatch, Warned
from effllm.records import ring
from effllm.records.rank import MARKED_PHASES, Allocator, Event, Sample, ValueStatistics

#: Number of windows whose median is the memory of other processes and of the driver.
OTHER_WINDOWS = 9
_PLACES = (*MARKED_PHASES, STEPS, STARTUP)


class RankMemory:
    """The memory of a rank.

    Args:
        pid: the training process.
        log_interval: iterations per window.
        offset: number of the first iteration, less 1.
    """

    def __init__(self, pid: int, log_interval: int, offset: int) -> None:
        self._pid, self._log_interval, self._offset = pid, log_interval, offset
        self._watch, self._host = DeviceWatch(), LeakWatch("private memory of the training process")
        self._last = 0  # ordinal of the newest read window end
        self._host_last = 0
        self._others: deque[float] = deque(maxlen=OTHER_WINDOWS)  # bytes of the device that torch cannot have
        self._warned: list[Warned] = []
        self._values: dict[int, dict[str, float]] = {}  # number of the window -> name -> value
        self._counted = (0.0, 0.0)  # retries and errors so far

    def add(self, slot: ring.Slot) -> None:
        """Add a record of the kind MEMORY."""
        before = self._watch.forecast.last
        is_boundary = (slot.ordinal + self._offset) % self._log_interval == 0
        is_end = slot.number == ring.AFTER_STEPS and slot.ordinal > self._last and is_boundary
        fields = dict(zip(ring.MEMORY_FIELDS, (value for _, value in slot.values), strict=True))
        reading = MemoryReading(_PLACES[slot.number], slot.ordinal + self._offset, **fields)
        self._warned += self._watch.add(reading, is_window_end=is_end)
        self._note(slot, reading, before, is_end)
        if is_end:
            self._last = slot.ordinal

    def look(self, ordinal: int, series: Iterable[Series], max_positions: int | None) -> None:
        """Read the memory of the process, and check the forecasts, if a window has ended.

        Args:
            ordinal: ordinal of the last ended iteration.
            series: the devices of the rank; the first GPU is torch's device.
            max_positions: positions of the largest possible micro-batch, if it is known.
        """
        if ordinal // self._log_interval <= self._host_last // self._log_interval:
            return
        self._host_last = ordinal
        if (private := private_bytes(self._pid)) is not None:
            self._host.add(ordinal + self._offset, private)
            self._warned += self._host.warnings(lambda: available_bytes(self._pid))
        if self._watch.forecast.last is not None:
            self._warned += self._watch.warnings(self._capacity(series), max_positions or 0)

    def take_events(self, time_s: float) -> Iterator[Event]:
        """Yield the events since the last call."""
        warned, self._warned = self._warned, []
        for one in warned:
            yield Event(time_s, one.kind, one.text)

    def take(self, window: int, *, is_last: bool) -> tuple[Allocator | None, dict[str, ValueStatistics]]:
        """Return the memory and the values of the windows up to a window, for the report."""
        taken = sorted(number for number in self._values if is_last or number <= window)
        found: dict[str, float] = {}
        for number in taken:
            for name, value in self._values.pop(number).items():
                is_count = name in ("allocator/retries", "allocator/out_of_memory")
                found[name] = found.get(name, 0.0) + value if is_count else max(found.get(name, 0.0), value)
        sizes = [found.pop(f"allocator/{name}", None) for name in Allocator.__struct_fields__]
        allocator = Allocator(*(size for size in sizes if size is not None)) if None not in sizes else None
        return allocator, {name: ValueStatistics(1, value, 0.0, value, value) for name, value in found.items()}

    def _note(self, slot: ring.Slot, now: MemoryReading, before: MemoryReading | None, is_end: bool) -> None:
        """Keep the values of a reading until the report of its window."""
        # After the end of a window, also a phase and an iteration that does not end belong to the next window.
        window = -(-(slot.ordinal + self._offset + (not is_end)) // self._log_interval)
        values = self._values.setdefault(window, {})
        has_failed = before is not None and now.out_of_memory > before.out_of_memory
        if is_end or has_failed:
            values["allocator/allocated_bytes"] = now.allocated
            values["allocator/reserved_bytes"] = now.reserved
            values["allocator/fragmented_bytes"] = now.fragmented
        if before is None or now.allocated_peak > before.allocated_peak:
            values[f"allocator/{now.after}_peak_bytes"] = now.allocated_peak
        if before is not None:
            for name in ("retries", "out_of_memory"):
                if (more := getattr(now, name) - getattr(before, name)) > 0:
                    values[f"allocator/{name}"] = values.get(f"allocator/{name}", 0.0) + more

    def _capacity(self, series: Iterable[Series]) -> float | None:
        """Return the bytes of the device that torch's allocator can have; ``None`` if the device is not read."""
        gpu = next((one for one in series if one.device.is_gpu and not one.device.shared), None)
        last = self._watch.forecast.last
        if gpu is None or last is None or not gpu.device.memory_total_bytes or gpu.newest is None:
            return None
        if (other := _other_bytes(gpu.newest, last.reserved)) is not None:
            self._others.append(other)
        return gpu.device.memory_total_bytes - statistics.median(self._others) if self._others else None


def _other_bytes(sample: Sample, reserved: float) -> float | None:
    """Return the memory of a device that the driver, the CUDA context, libraries and other processes have."""
    if sample.memory_bytes is None:
        return None
    return max(sample.memory_bytes - reserved, 0.0) + sample.gauges.get("memory_reserved_bytes", 0.0)
