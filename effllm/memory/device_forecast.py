"""Foretells when the memory of a device runs out: by growth, or at the longest micro-batch.  No I/O.

torch's peak is never reset, so a reading shows the peak of the time before it only if the peak has risen.  From such
readings follow the temporary bytes of steps, evaluations and checkpoints: peak less the memory that stays allocated.
The steady growth of the allocated memory, plus the largest temporary bytes, reaches the capacity at a known iteration.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from effllm.memory.trend import MemoryBlocks

STEPS, STARTUP = "steps", "startup"
#: A forecast covers at most this multiple of the judged iterations.
MAX_HORIZON = 2.0
#: If memory grows by less than this share in the later half of the judged iterations, a cache fills up.
MIN_LATER = 0.8
#: If memory grows by less than this share of the trend since the second newest block, the growth has stopped.
MIN_NEWEST = 0.6
#: The lower end of the interval of the growth is at least this share of the growth: a few jumps of the memory, up and
#: down, look like growth with a wide interval.
MIN_CERTAIN = 0.75

#: The upper end of the interval is multiplied by this factor, the lower end by its inverse: jumps and caches, which the
#: trend does not contain.  With 1.35, 95 % of the intervals of `benchmarks.memory_forecast` contain the end of the run.
WIDENED = 1.35
#: Number of the newest steps with a known peak from which the peak of the longest micro-batch follows.
MAX_STEPS = 64
#: The line through these steps is extended by at most this multiple of the range of their lengths.
MAX_REACH = 8.0


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


class MemoryGrowth(NamedTuple):
    """The forecast of a memory that grows: the number of iterations until it is full, with a 95 % interval."""

    iterations: float
    low: float
    high: float
    bytes_per_iteration: float
    low_bytes: float
    high_bytes: float
    place: str  # STEPS, or the phase with the largest peak
    judged: float  # number of iterations that were judged


class LongestStep(NamedTuple):
    """The forecast for the longest possible micro-batch.

    The temporary bytes of a step are taken as linear in the positions.  They are more if a model stores attention
    scores, which are quadratic in the length.
    """

    peak_bytes: float
    shortest: float  # positions of the shortest and the longest of the steps from which the peak follows
    longest: float


class DeviceForecast:
    """The readings of one device so far, in bounded memory."""

    def __init__(self) -> None:
        self._blocks = MemoryBlocks()
        self._peak = 0.0
        self.last: MemoryReading | None = None  # the newest reading
        self._temporary: dict[str, float] = {}  # largest known temporary bytes by part of the loop
        self.peaks: dict[str, float] = {}  # largest known peak by part of the loop
        self._steps: deque[tuple[float, float]] = deque(maxlen=MAX_STEPS)  # positions and temporary bytes
        self._longest = 0.0  # positions of the longest micro-batch so far

    def add(self, reading: MemoryReading, *, is_window_end: bool) -> None:
        """Add a reading; the readings at the ends of windows are compared with each other."""
        has_risen = reading.allocated_peak > self._peak
        temporary = reading.allocated_peak - reading.allocated
        if has_risen:
            # During an evaluation or checkpoint, memory may be allocated that is free again at its end.
            self._temporary[reading.after] = max(self._temporary.get(reading.after, 0.0), temporary)
            self.peaks[reading.after] = reading.allocated_peak
        # The script may have reset the peak: then the peaks of the later parts are known again.
        self._peak, self.last = reading.allocated_peak, reading
        if is_window_end:
            self._blocks.add(reading.iteration, reading.allocated)
            self._longest = max(self._longest, reading.positions)
            if has_risen and reading.positions > 0:
                self._steps.append((reading.positions, temporary))

    def growth(self, capacity: float) -> MemoryGrowth | None:
        """Return the forecast for a capacity of torch's allocator; ``None`` without steady growth."""
        trend, last = self._blocks.trend(), self.last
        if trend is None or last is None or not trend.is_growing:
            return None
        if trend.low_bytes <= MIN_CERTAIN * trend.growth_bytes:
            return None
        early, late = self._blocks.halves()
        newest = self._blocks.newest_growth(last.iteration, last.allocated)
        if late < MIN_LATER * early or newest < MIN_NEWEST * trend.growth_bytes:
            return None
        place, temporary = self._largest()
        # The growth may go on to change as it has changed between the two halves.
        low, high = min(trend.low_bytes, early, late), max(trend.high_bytes, early, late)
        low = max(low, 0.0) * min(late / early, 1.0) if early > 0 else low
        if low <= 0:
            return None
        room = capacity - last.allocated - temporary
        # Free parts of used segments may be too small for an allocation, or may be just right.
        least, most = max(room - last.fragmented, 0.0), max(room, 0.0)
        middle, given = trend.growth_bytes / 1000, (trend.low_bytes / 1000, trend.high_bytes / 1000)
        soonest, latest = 1000 * least / high / WIDENED, 1000 * most / low * WIDENED
        return MemoryGrowth((least + most) / 2 / middle, soonest, latest, middle, *given, place, trend.iterations)

    def is_near(self, found: MemoryGrowth) -> bool:
        """Whether a forecast is near enough, compared with the judged iterations, to be stated."""
        return found.iterations <= MAX_HORIZON * found.judged

    def longest_step(self, positions: int) -> LongestStep | None:
        """Return the forecast for the longest possible micro-batch.

        ``None`` if a micro-batch of this length has been measured, or if those so far have too similar lengths.
        """
        lengths = [length for length, _ in self._steps]
        shortest, longest = min(lengths, default=0.0), max(lengths, default=0.0)
        is_near = positions - longest <= MAX_REACH * (longest - shortest)
        if self.last is None or positions <= self._longest or not is_near:
            return None
        slope, intercept = statistics.linear_regression(lengths, [temporary for _, temporary in self._steps])
        return LongestStep(self.last.allocated + intercept + slope * positions, shortest, longest)

    def _largest(self) -> tuple[str, float]:
        """Return the part of the loop with the largest temporary bytes, and these bytes."""
        known = {place: size for place, size in self._temporary.items() if place != STARTUP}
        place = max(known, key=lambda one: known[one], default=STEPS)
        return place, known.get(place, 0.0)
