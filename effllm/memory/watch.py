"""The warnings about the memory of one rank: forecasts, leaks, and errors that have occurred.  No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from effllm.memory.device_forecast import STARTUP, STEPS, DeviceForecast, MemoryGrowth, MemoryReading
from effllm.memory.trend import MemoryBlocks, MemoryTrend

FORECAST, LEAK, OUT_OF_MEMORY = "memory_forecast", "memory_leak", "out_of_memory"
#: A leak needs this growth (the certain part, over the judged iterations), readings, and iterations.  Caches fill up
#: ever more slowly: the later half of the iterations grows by at least MIN_LATER_LEAK of the first half, also when
#: CONFIRMED_AT times as many iterations have passed.
MIN_LEAK_BYTES, MIN_LEAK_READINGS, MIN_LEAK_ITERATIONS, MIN_LATER_LEAK, CONFIRMED_AT = 100e6, 24, 300, 0.85, 2.0
_GB = 1e9


class Warned(NamedTuple):
    """A warning: a kind of event, and its text."""

    kind: str
    text: str


class LeakWatch:
    """Reports the steady growth of one kind of memory, once.

    Args:
        what: the memory, for the text: ``private memory of the training process``.
    """

    def __init__(self, what: str) -> None:
        self._what, self._blocks, self._is_reported = what, MemoryBlocks(), False
        self._first = -1  # iteration of the first reading
        self._last = 0
        self._confirmed_from = 0  # iteration from which a second judgement is a confirmation; 0: no first judgement

    def add(self, iteration: int, used_bytes: float) -> None:
        if self._first < 0:
            self._first = iteration
        self._last = iteration
        self._blocks.add(iteration, used_bytes)

    def warnings(self, available: Callable[[], float | None] = lambda: None) -> Iterator[Warned]:
        """Yield the leak, once.

        Args:
            available: returns the bytes by which the memory can grow, ``None`` if unknown; called for a leak only.
        """
        if self._is_reported or self._blocks.count < MIN_LEAK_READINGS:
            return
        passed = self._last - self._first + 1
        if passed < MIN_LEAK_ITERATIONS or self._last < self._confirmed_from:
            return
        found = self._blocks.trend()
        if found is None or not self._is_leak(found):
            self._confirmed_from = 0
        elif not self._confirmed_from:
            self._confirmed_from = self._first + int(CONFIRMED_AT * passed)
        else:
            self._is_reported = True
            low, middle, high = (one / 1000 for one in (found.low_bytes, found.growth_bytes, found.high_bytes))
            yield Warned(
                LEAK,
                f"the {self._what} grows steadily, by {_size(middle)} per iteration (95 %: {_size(low)} to "
                f"{_size(high)}), judged over {found.iterations:,.0f} iterations until iteration {self._last:,}"
                + _until_full(found, available()),
            )

    def _is_leak(self, found: MemoryTrend) -> bool:
        early, late = self._blocks.halves()
        return found.is_growing and found.certain_bytes > MIN_LEAK_BYTES and late >= MIN_LATER_LEAK * early


class DeviceWatch:
    """Reports forecasts and errors of the memory of one GPU."""

    def __init__(self) -> None:
        self.forecast = DeviceForecast()
        self._leak = LeakWatch("allocated memory of the GPU")
        self._reported: set[str] = set()  # causes of the reported forecasts

    def add(self, reading: MemoryReading, *, is_window_end: bool) -> Iterator[Warned]:
        """Add a reading; yield an event after an out-of-memory error."""
        before = self.forecast.last
        self.forecast.add(reading, is_window_end=is_window_end)
        if is_window_end:
            self._leak.add(reading.iteration, reading.allocated)
        if before is not None and reading.out_of_memory > before.out_of_memory:
            yield Warned(OUT_OF_MEMORY, f"GPU out of memory: {self._state(reading, before)}")

    def warnings(self, capacity: float | None, max_positions: int = 0) -> Iterator[Warned]:
        """Yield the new warnings at the end of a window.

        Args:
            capacity: bytes that torch's allocator can have; ``None`` if unknown.
            max_positions: positions of the largest possible micro-batch; 0 if unknown.
        """
        yield from self._leak.warnings()
        last = self.forecast.last
        if capacity is None or last is None:
            return
        found = None if "growth" in self._reported else self.forecast.growth(capacity)
        if found is not None and self.forecast.is_near(found):
            self._reported.add("growth")
            yield Warned(FORECAST, self._of_growth(found, capacity))
        step = None if "length" in self._reported else self.forecast.longest_step(max_positions)
        if step is not None and step.peak_bytes > capacity:
            self._reported.add("length")
            yield Warned(
                FORECAST,
                f"GPU memory runs out at the longest micro-batch, {max_positions:,} positions: a step needs "
                f"about {step.peak_bytes / _GB:.2f} GB of at most {capacity / _GB:.2f} GB, if memory grows with the "
                f"length as it did from {step.shortest:,.0f} to {step.longest:,.0f} positions",
            )

    def _of_growth(self, found: MemoryGrowth, capacity: float) -> str:
        at = "in a step" if found.place == STEPS else f"at a{'n' if found.place[:1] in 'aeiou' else ''} {found.place}"
        last = self.forecast.last
        assert last is not None
        return (
            f"GPU memory runs out in about {found.iterations:,.0f} iterations (95 %: {found.low:,.0f} to "
            f"{found.high:,.0f}), {at}: the allocated memory grows by {_size(found.bytes_per_iteration)} per iteration "
            f"({_size(found.low_bytes)} to {_size(found.high_bytes)}), judged over {found.judged:,.0f} iterations; "
            f"iteration {last.iteration:,} ended with {last.allocated / _GB:.2f} GB of at most {capacity / _GB:.2f} GB"
        )

    def _state(self, now: MemoryReading, before: MemoryReading) -> str:
        """Return the state at an error: the peaks by part of the loop, retries and fragmentation."""
        peaks = {name: size for name, size in self.forecast.peaks.items() if name != STARTUP}
        parts = [f"peak of {name} {size / _GB:.2f} GB" for name, size in peaks.items()]
        parts += [
            f"before the error {before.allocated / _GB:.2f} GB allocated, {before.reserved / _GB:.2f} GB reserved",
            f"{now.fragmented / _GB:.2f} GB fragmented (free, in partly used segments)",
            f"{now.retries:,.0f} allocator retries so far",
            f"after iteration {now.iteration:,}",
        ]
        return "; ".join(parts)


def _until_full(found: MemoryTrend, available: float | None) -> str:
    """Return when the memory is full, for the text of a leak; empty if the available memory is unknown."""
    if available is None:
        return ""
    soonest, middle, latest = (
        1000 * max(available, 0.0) / one for one in (found.high_bytes, found.growth_bytes, found.low_bytes)
    )
    return (
        f"; if only this process grows, the available {available / _GB:.2f} GB of the host are full in about "
        f"{middle:,.0f} iterations ({soonest:,.0f} to {latest:,.0f})"
    )


def _size(one: float) -> str:
    return f"{one / 1e6:.3g} MB" if abs(one) >= 1e5 else f"{one / 1e3:.3g} kB"
