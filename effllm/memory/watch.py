"""The warnings about the memory of one rank: forecasts, leaks, and errors that have occurred.  No I/O.

torch's peak is never reset, so a reading shows the peak of the time before it only if the peak has risen.  From such
readings follow the temporary bytes of steps, evaluations and checkpoints: peak less the memory that stays allocated.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

STEPS, STARTUP = "steps", "startup"
#: A forecast covers at most this multiple of the judged iterations.
MAX_HORIZON = 2.0
#: If memory grows by less than this share in the later half of the judged iterations, a cache fills up.
MIN_LATER = 0.8
#: If memory grows by less than this share of the trend since the second newest block, the growth has stopped.
MIN_NEWEST = 0.6
#: The lower end of the interval of the growth is at least this share of the growth: a few jumps have a wide interval.
MIN_CERTAIN = 0.75
#: The upper end of the interval is multiplied by this factor, the lower end by its inverse: jumps and caches, which the
#: trend does not contain.  With 1.35, 95 % of the intervals of `benchmarks.memory_forecast` contain the end of the run.
WIDENED = 1.35
#: Number of the newest steps with a known peak from which the peak of the longest micro-batch follows.
MAX_STEPS = 64
#: The line through these steps is extended by at most this multiple of the range of their lengths.
MAX_REACH = 8.0

#: Maximum number of blocks of measurements in a trend; at this number the blocks are merged in pairs.
MAX_BLOCKS = 32
#: This share of the blocks, the oldest ones, is ignored.
WARM_UP = 1 / 3
#: A trend needs at least MIN_BLOCKS other blocks; from MANY_BLOCKS on, one pair of blocks in ten may show a decrease.
MIN_BLOCKS, MANY_BLOCKS = 8, 12
MIN_TAU = 0.8
#: The median difference of two blocks must be at least this share of the mean: a few jumps of the memory are no leak.
MIN_STEADY = 0.5
_NORMAL_95 = 1.96

FORECAST, LEAK, OUT_OF_MEMORY = "memory_forecast", "memory_leak", "out_of_memory"
#: A leak needs this growth (the certain part, over the judged iterations), readings, and iterations.  Caches fill up
#: ever more slowly: the later half of the iterations grows by at least MIN_LATER_LEAK of the first half, also when
#: CONFIRMED_AT times as many iterations have passed.
MIN_LEAK_BYTES, MIN_LEAK_READINGS, MIN_LEAK_ITERATIONS, MIN_LATER_LEAK, CONFIRMED_AT = 100e6, 24, 300, 0.85, 2.0
_GB = 1e9


class MemoryTrend(NamedTuple):
    """Growth of memory at one place of the loop, in bytes per 1,000 iterations, with its 95 % interval."""

    growth_bytes: float
    low_bytes: float
    high_bytes: float
    iterations: float  # number of iterations between the first and the last judged measurement
    is_growing: bool  # whether memory grows steadily, not by a few jumps

    @property
    def certain_bytes(self) -> float:
        return max(self.low_bytes, 0.0) * self.iterations / 1000


class MemoryBlocks:
    """The minimum of memory in consecutive blocks of measurements: a leak raises the minimum, a long batch does not."""

    def __init__(self) -> None:
        self._complete: list[tuple[float, float]] = []  # mean iteration number and minimum of each complete block
        self._block_size, self.num_measurements = 1, 0
        self._open: list[tuple[float, float]] = []  # iteration and bytes of each measurement in the incomplete block

    def add(self, iteration: float | None, used_bytes: float) -> None:
        self.num_measurements += 1
        self._open.append((self.num_measurements if iteration is None else iteration, used_bytes))
        if len(self._open) < self._block_size:
            return
        self._complete.append(_block_of(self._open))
        self._open = []
        if len(self._complete) == MAX_BLOCKS:
            self._complete = [_block_of(self._complete[i : i + 2]) for i in range(0, MAX_BLOCKS, 2)]
            self._block_size *= 2

    def trend(self) -> MemoryTrend | None:
        """Return the trend of the blocks after the warm-up, in which caches fill; ``None`` for too few blocks."""
        points = self._judged_blocks()
        if len(points) < MIN_BLOCKS or not (slopes := _sorted_slopes(points)):
            return None
        # Theil-Sen's slope; its interval is Sen's (Journal of the American Statistical Association 63, 1968).
        num = len(points)
        spread = _NORMAL_95 * math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
        low = slopes[max(int((len(slopes) - spread) / 2), 0)]
        high = slopes[min(math.ceil((len(slopes) + spread) / 2), len(slopes) - 1)]
        middle = slopes[len(slopes) // 2]
        return MemoryTrend(1000 * middle, 1000 * low, 1000 * high, points[-1][0] - points[0][0], _is_steady(points))

    def early_and_late_growth(self) -> tuple[float, float]:
        """Return the growth in the two halves of the judged blocks, in bytes per 1,000 iterations; 0 if unknown."""
        points = self._judged_blocks()
        middle = len(points) // 2
        slopes = [_sorted_slopes(part) for part in (points[: middle + 1], points[middle:])]
        early, late = (1000 * half[len(half) // 2] if half else 0.0 for half in slopes)
        return early, late

    def newest_growth(self, iteration: float, used_bytes: float) -> float:
        """Return the growth from the second newest block: the newest one may have ended with this measurement."""
        earlier_iteration, earlier_bytes = self._complete[-2]
        return 1000 * (used_bytes - earlier_bytes) / (iteration - earlier_iteration)

    def _judged_blocks(self) -> list[tuple[float, float]]:
        return self._complete[math.ceil(len(self._complete) * WARM_UP) :]


def _sorted_slopes(points: list[tuple[float, float]]) -> list[float]:
    return sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0])


def _block_of(points: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(iteration for iteration, _ in points) / len(points), min(used_bytes for _, used_bytes in points)


def _is_steady(points: list[tuple[float, float]]) -> bool:
    """Whether memory grows from block to block: Kendall's tau is high, and the growth is not from a few differences."""
    signs = [(later > earlier) - (later < earlier) for (_, earlier), (_, later) in combinations(points, 2)]
    tau = sum(signs) / len(signs)
    if tau < (MIN_TAU if len(points) >= MANY_BLOCKS else 1.0):
        return False
    differences = [later - earlier for (_, earlier), (_, later) in pairwise(points)]
    return statistics.median(differences) >= MIN_STEADY * statistics.fmean(differences)


class MemoryReading(NamedTuple):
    """The state of torch's allocator after some part of the loop, in bytes; peaks and counts are running totals."""

    after: str  # STEPS, STARTUP or a marked phase
    iteration: int
    allocated: float
    allocated_peak: float
    reserved: float
    reserved_peak: float
    fragmented: float  # free, but in segments that are partly used: cannot be returned to the device
    retries: float
    out_of_memory: float
    positions: float  # with padding, of the largest micro-batch of the window so far; 0: not known


class MemoryForecast(NamedTuple):
    """The forecast of a memory that grows: the number of iterations until it is full, with a 95 % interval."""

    iterations: float
    low: float
    high: float
    bytes_per_iteration: float
    low_bytes: float
    high_bytes: float
    place: str  # STEPS, or the phase with the largest peak
    judged: float  # number of iterations that were judged


class MemoryWarning(NamedTuple):
    """A warning: a kind of event, and its text."""

    kind: str
    text: str


class LeakWatch:
    """Reports the steady growth of one kind of memory, once; ``what`` names it in the text."""

    def __init__(self, what: str) -> None:
        self._what, self.blocks, self._is_reported = what, MemoryBlocks(), False
        self._first, self._last = -1, 0  # iterations of the first and of the newest reading; -1: no reading
        self._confirmed_from = 0  # iteration from which a second judgement is a confirmation; 0: no first judgement

    def add(self, iteration: int, used_bytes: float) -> None:
        self._first, self._last = self._first if self._first >= 0 else iteration, iteration
        self.blocks.add(iteration, used_bytes)

    def new_warnings(self, available: Callable[[], float | None] = lambda: None) -> Iterator[MemoryWarning]:
        """Yield the leak, once; ``available`` returns the bytes by which the memory can grow, for a leak only."""
        if self._is_reported or self.blocks.num_measurements < MIN_LEAK_READINGS:
            return
        passed = self._last - self._first + 1
        if passed < MIN_LEAK_ITERATIONS or self._last < self._confirmed_from:
            return
        trend, (early, late) = self.blocks.trend(), self.blocks.early_and_late_growth()
        is_leak = trend is not None and trend.is_growing and trend.certain_bytes > MIN_LEAK_BYTES
        if trend is None or not is_leak or late < MIN_LATER_LEAK * early:
            self._confirmed_from = 0
        elif not self._confirmed_from:
            self._confirmed_from = self._first + int(CONFIRMED_AT * passed)
        else:
            self._is_reported = True
            low, middle, high = (growth / 1000 for growth in (trend.low_bytes, trend.growth_bytes, trend.high_bytes))
            yield MemoryWarning(
                LEAK,
                f"the {self._what} grows steadily, by {_text(middle)} per iteration (95 %: {_text(low)} to "
                f"{_text(high)}), judged over {trend.iterations:,.0f} iterations until iteration {self._last:,}"
                + _until_full_text((high, middle, low), available()),
            )


class DeviceWatch:
    """The readings of one GPU so far, in bounded memory; its forecasts and errors are reported once."""

    def __init__(self) -> None:
        self._leak = LeakWatch("allocated memory of the GPU")
        self.last: MemoryReading | None = None  # the newest reading
        self._temporary_bytes: dict[str, float] = {}  # largest known temporary bytes by part of the loop
        self._peak_bytes: dict[str, float] = {}  # largest known peak by part of the loop
        self._steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)  # positions and temporary bytes
        self._longest = 0.0  # positions of the longest micro-batch so far
        self._reported: set[str] = set()  # causes of the reported forecasts: growth, length

    def add_reading(self, reading: MemoryReading, *, is_window_end: bool) -> Iterator[MemoryWarning]:
        """Add a reading; yield an event after an out-of-memory error."""
        before, self.last = self.last, reading
        # The script may have reset the peak: then the peaks of the later parts are known again.
        has_risen = reading.allocated_peak > (before.allocated_peak if before is not None else 0.0)
        temporary = reading.allocated_peak - reading.allocated
        if has_risen:
            # During an evaluation or checkpoint, memory may be allocated that is free again at its end.
            self._temporary_bytes[reading.after] = max(self._temporary_bytes.get(reading.after, 0.0), temporary)
            self._peak_bytes[reading.after] = reading.allocated_peak
        if is_window_end:
            self._leak.add(reading.iteration, reading.allocated)
            self._longest = max(self._longest, reading.positions)
            if has_risen and reading.positions > 0:
                self._steps.append((reading.positions, temporary))
        if before is not None and reading.out_of_memory > before.out_of_memory:
            yield MemoryWarning(OUT_OF_MEMORY, f"GPU out of memory: {self._error_state_text(reading, before)}")

    def forecast(self, capacity: float) -> MemoryForecast | None:
        """Return the forecast for a capacity of torch's allocator; ``None`` without steady growth."""
        trend, last = self._leak.blocks.trend(), self.last
        if trend is None or last is None or not trend.is_growing or trend.low_bytes <= MIN_CERTAIN * trend.growth_bytes:
            return None
        early, late = self._leak.blocks.early_and_late_growth()
        newest = self._leak.blocks.newest_growth(last.iteration, last.allocated)
        if late < MIN_LATER * early or newest < MIN_NEWEST * trend.growth_bytes:
            return None
        # The part of the loop with the largest temporary bytes.
        temporary_bytes = {STEPS: 0.0, **self._temporary_bytes}
        temporary_bytes.pop(STARTUP, None)
        place, temporary = max(temporary_bytes.items(), key=lambda pair: pair[1])
        # The growth may go on to change as it has changed between the two halves.
        low, high = min(trend.low_bytes, early, late), max(trend.high_bytes, early, late)
        low = max(low, 0.0) * min(late / early, 1.0) if early > 0 else low
        if low <= 0:
            return None
        free_bytes = capacity - last.allocated - temporary
        # Free parts of used segments may be too small for an allocation, or may be just right.
        least, most = max(free_bytes - last.fragmented, 0.0), max(free_bytes, 0.0)
        middle, given = trend.growth_bytes / 1000, (trend.low_bytes / 1000, trend.high_bytes / 1000)
        soonest, latest = 1000 * least / high / WIDENED, 1000 * most / low * WIDENED
        return MemoryForecast((least + most) / 2 / middle, soonest, latest, middle, *given, place, trend.iterations)

    def is_near(self, forecast: MemoryForecast) -> bool:
        """Whether a forecast is near enough, compared with the judged iterations, to be stated."""
        return forecast.iterations <= MAX_HORIZON * forecast.judged

    def _max_batch_text(self, positions: int, capacity: float) -> str:
        """Return the forecast for the longest possible micro-batch, if its step needs more than the capacity.

        The temporary bytes of a step are taken as linear in the positions; with attention scores they are more.
        """
        lengths = [length for length, _ in self._steps]
        shortest, longest = min(lengths, default=0.0), max(lengths, default=0.0)
        is_near = positions - longest <= MAX_REACH * (longest - shortest)
        if self.last is None or positions <= self._longest or not is_near:
            return ""
        slope, intercept = statistics.linear_regression(lengths, [temporary for _, temporary in self._steps])
        needed = self.last.allocated + intercept + slope * positions
        if needed <= capacity:
            return ""
        return (
            f"GPU memory runs out at the longest micro-batch, {positions:,} positions: a step needs about "
            f"{needed / _GB:.2f} GB of at most {capacity / _GB:.2f} GB, if memory grows with the length as it did from "
            f"{shortest:,.0f} to {longest:,.0f} positions"
        )

    def new_warnings(self, capacity: float | None, max_positions: int = 0) -> Iterator[MemoryWarning]:
        """Yield the new warnings of a window; ``max_positions`` are those of the largest micro-batch, 0 if unknown."""
        yield from self._leak.new_warnings()
        if capacity is None or self.last is None:
            return
        forecast = None if "growth" in self._reported else self.forecast(capacity)
        if forecast is not None and self.is_near(forecast):
            self._reported.add("growth")
            yield MemoryWarning(FORECAST, self._forecast_text(forecast, capacity))
        batch_text = "" if "length" in self._reported else self._max_batch_text(max_positions, capacity)
        if batch_text:
            self._reported.add("length")
            yield MemoryWarning(FORECAST, batch_text)

    def _forecast_text(self, rise: MemoryForecast, capacity: float) -> str:
        at = "in a step" if rise.place == STEPS else f"at a{'n' if rise.place[:1] in 'aeiou' else ''} {rise.place}"
        last = self.last
        assert last is not None
        return (
            f"GPU memory runs out in about {rise.iterations:,.0f} iterations (95 %: {rise.low:,.0f} to "
            f"{rise.high:,.0f}), {at}: the allocated memory grows by {_text(rise.bytes_per_iteration)} per iteration "
            f"({_text(rise.low_bytes)} to {_text(rise.high_bytes)}), judged over {rise.judged:,.0f} iterations; "
            f"iteration {last.iteration:,} ended with {last.allocated / _GB:.2f} GB of at most {capacity / _GB:.2f} GB"
        )

    def _error_state_text(self, now: MemoryReading, before: MemoryReading) -> str:
        """Return the state at an error: the peaks by part of the loop, retries and fragmentation."""
        parts = [f"peak of {name} {size / _GB:.2f} GB" for name, size in self._peak_bytes.items() if name != STARTUP]
        parts += [
            f"before the error {before.allocated / _GB:.2f} GB allocated, {before.reserved / _GB:.2f} GB reserved",
            f"{now.fragmented / _GB:.2f} GB fragmented (free, in partly used segments)",
            f"{now.retries:,.0f} allocator retries so far",
            f"after iteration {now.iteration:,}",
        ]
        return "; ".join(parts)


def _until_full_text(growths: tuple[float, ...], available: float | None) -> str:
    """Return when the memory is full, for the text of a leak; empty if the available memory is unknown."""
    if available is None:
        return ""
    soonest, middle, latest = (max(available, 0.0) / growth for growth in growths)
    return (
        f"; if only this process grows, the available {available / _GB:.2f} GB of the host are full in about "
        f"{middle:,.0f} iterations ({soonest:,.0f} to {latest:,.0f})"
    )


def _text(size: float) -> str:
    return f"{size / 1e6:.3g} MB" if abs(size) >= 1e5 else f"{size / 1e3:.3g} kB"
