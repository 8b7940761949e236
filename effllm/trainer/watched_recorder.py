"""A recorder that also profiles every Nth iteration, times all iterations by CUDA events, and reads torch's allocator.

`WatchedRecorder` replaces `Recorder` only if iterations are profiled, or with a CUDA build of torch, because `Recorder`
must stay fast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from effllm.records import ring
from effllm.records.timeline import KINDS
from effllm.trainer.counts import PHASES
from effllm.trainer.rank_device import RankDevice
from effllm.trainer.recorder import Recorder
from effllm.trainer.torch_profile import Profiled, TorchProfile

#: While the device is more than this many iterations behind the host, no iteration is measured.
MAX_PENDING = 4
#: An iteration with more sync points and ends of waits has no own time on the device.
MAX_MARKS = 16

_NS = 1e-9
_MEMORY_INDICES = tuple(range(len(ring.MEMORY_FIELDS)))


class _Events:
    """The CUDA events of one iteration."""

    __slots__ = ("end", "marks", "num_marks", "start")

    def __init__(self, start: Any, end: Any) -> None:
        self.start, self.end = start, end
        self.marks: list[Any] = []  # in turn: a sync point, and the end of the wait for other ranks
        self.num_marks = 0  # marks of this iteration

    def own_ms(self) -> float:
        """Return the own time: up to the first sync point, and from each end of a wait to the next sync point."""
        marks = self.marks[: self.num_marks]
        pairs = zip(marks[1::2], marks[2::2], strict=False)
        return float(self.start.elapsed_time(marks[0]) + sum(wait_end.elapsed_time(sync) for wait_end, sync in pairs))


class DeviceTime:
    """Times iterations on the current stream of the rank's GPU by two CUDA events each, without waiting for them.

    The host may be far ahead of the device, so the host's stamps only show launches.  The events of an iteration are
    read when a later iteration ends, and only if the device has passed them.
    """

    def __init__(self, cuda: Any, device: RankDevice) -> None:
        self._cuda, self._device = cuda, device
        self._free: list[_Events] = []  # to be used again
        self._num_made = 0  # number of `_Events` that exist
        self._open: _Events | None = None  # of the running iteration; None if it is not measured
        self._pending: deque[_Events] = deque()  # of ended iterations, oldest first
        self.total_ns = 0  # time of the measured iterations
        self.num_iterations = 0  # number of measured iterations
        self.own_ns = 0  # own time of the iterations with a sync point
        self.num_own_iterations = 0  # number of iterations with a sync point

    def mark_start(self) -> None:
        """Mark the start of an iteration on the device."""
        self._device.call_on_gpu(self._start)

    def _start(self) -> None:
        self._open = self._open or self._unused_events()
        if self._open is not None:
            self._open.num_marks = 0
            self._open.start.record()

    def mark(self, is_sync: bool) -> None:
        """Mark a sync point, or the end of a wait for other ranks; a second mark of the same kind has no effect."""
        events = self._open
        # Marks are in turn sync points and ends of waits; above MAX_MARKS, one more mark shows that there were more.
        if events is not None and (events.num_marks % 2 == 0) == is_sync and events.num_marks <= MAX_MARKS:
            self._device.call_on_gpu(self._mark)

    def _mark(self) -> None:
        assert self._open is not None
        if self._open.num_marks == len(self._open.marks):
            self._open.marks.append(self._cuda.Event(enable_timing=True))
        self._open.marks[self._open.num_marks].record()
        self._open.num_marks += 1

    def mark_end(self) -> None:
        """Mark the end of an iteration on the device; read the events of iterations that the device has completed."""
        if not self._device.call_on_gpu(self._end) and self._open is not None:
            self._free.append(self._open)
            self._open = None

    def _end(self) -> bool:
        while self._pending and self._pending[0].end.query():
            events = self._pending.popleft()
            self.total_ns += round(events.start.elapsed_time(events.end) * 1e6)
            self.num_iterations += 1
            if 0 < events.num_marks <= MAX_MARKS:
                self.own_ns += round(events.own_ms() * 1e6)
                self.num_own_iterations += 1
            self._free.append(events)
        if self._open is not None:
            self._open.end.record()
            self._pending.append(self._open)
            self._open = None
        return True

    def forget_events(self) -> None:
        """Drop all events, because the rank's GPU has changed; an event belongs to one GPU."""
        self._free, self._num_made, self._open = [], 0, None
        self._pending.clear()

    def _unused_events(self) -> _Events | None:
        if self._free:
            return self._free.pop()
        if self._num_made >= MAX_PENDING:
            return None
        self._num_made += 1
        return _Events(self._cuda.Event(enable_timing=True), self._cuda.Event(enable_timing=True))


class DeviceMemory:
    """The memory of the rank's GPU, from the state of torch's allocator.

    A reading takes the allocator's lock, as each allocation of the training thread does, and calls no driver.  The
    peaks of the allocator belong to the script, so they are never reset.
    """

    __slots__ = ("_cuda", "_device", "_phases", "is_off", "open_phase", "positions")

    def __init__(self, cuda: Any, device: RankDevice) -> None:
        self._cuda, self._device = cuda, device
        self._phases: set[int] = set()  # indices in `PHASES` of the phases that were read in this window
        self.is_off = False  #: whether readings have ended after an error
        self.open_phase = -1  #: index of the open phase whose start was read
        self.positions = 0  #: largest number of positions of a micro-batch in this window; 0 if it is not known

    def remember_phase(self, phase: int) -> bool:
        """Remember the kind of a phase; return whether it is the first in this window, so that its memory is read."""
        if phase in self._phases:
            return False
        self._phases.add(phase)
        return True

    def end_window(self) -> None:
        self.positions = 0
        self._phases.clear()

    def read_allocator(self) -> tuple[float, ...] | None:
        """Return the values of `ring.MEMORY_FIELDS`; ``None`` without a known GPU, or during a capture."""
        # `memory_stats` also makes a sorted flat dictionary of several hundred names, which takes most of its time.
        stats = None if self.is_off else self._device.call_on_gpu(self._cuda.memory_stats_as_nested_dict)
        if stats is None:
            return None
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return (
            float(allocated["current"]),
            float(allocated["peak"]),
            float(reserved["current"]),
            float(reserved["peak"]),
            float(stats["inactive_split_bytes"]["all"]["current"]),
            float(stats["num_alloc_retries"]),
            float(stats["num_ooms"]),
            float(self.positions),
        )


class WatchedRecorder(Recorder):
    """A `Recorder` that also records the profiles and device times of iterations, and the memory of the device.

    An iteration is profiled if ``profile_every`` divides its number; 0 is for no profiles.
    """

    __slots__ = ("_device_times", "_memory", "_profile", "_rank_device", "_send_facts")

    def __init__(
        self,
        *arguments: Any,
        profile_every: int = 0,
        torch: Any = None,
        rank_device: RankDevice | None = None,
        send_facts: Callable[[], None] = lambda: None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._profile = TorchProfile(profile_every, self._warn, torch) if profile_every else None
        self._rank_device, self._send_facts = rank_device, send_facts
        self._device_times = DeviceTime(torch.cuda, rank_device) if rank_device is not None else None
        self._memory = DeviceMemory(torch.cuda, rank_device) if rank_device is not None else None

    def start(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the start of an iteration; the profiler starts before the stamp."""
        if not self.is_on:
            return
        if self._rank_device is not None and self._rank_device.is_due:
            self._rank_device.is_due = False
            self._find_gpus()
        if self._memory is not None and not self._end_ns and not self._start_ns:
            self._put_memory(ring.AFTER_STARTUP)
        if self._profile is not None:
            self._profile.start_if_due(self.ordinal + 1 + self._offset)
        super().start(_now)
        self._time_on_device(DeviceTime.mark_start)

    def end(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = 0,
        _now: Any = time.monotonic_ns,
    ) -> None:
        """Stamp the end of an iteration, as `Recorder.end`; the profiler stops after the stamp."""
        if not self.is_on:
            return
        self._time_on_device(DeviceTime.mark_end)
        if self.ordinal + 1 == self._boundary_ordinal:  # before the record that ends the window is written
            if self._rank_device is not None:
                self._rank_device.end_window()
            self._put_device_times(self.ordinal + 1)
            if self._memory is not None:
                if not self._phases.depth:
                    self._put_memory(ring.AFTER_STEPS, self.ordinal + 1)
                self._memory.end_window()
        step_ns = self._step_ns
        super().end(tokens_processed, samples, tokens, tokens_loss, _now)
        if self._profile is not None and (profiled := self._profile.end(self._end_ns)) is not None:
            self._put_profile(profiled, self._step_ns - step_ns)

    def sync_point(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the sync point, as `Recorder.sync_point`, on the host and on the device."""
        super().sync_point(_now)
        self._mark(is_sync=True)

    def end_rank_wait(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the end of a wait for other ranks, as `Recorder.end_rank_wait`, on the host and on the device."""
        super().end_rank_wait(_now)
        self._mark(is_sync=False)

    def _mark(self, is_sync: bool) -> None:
        if self._own_ns and not self._phases.depth:
            self._time_on_device(DeviceTime.mark, is_sync)

    def _time_on_device(self, act: Callable[..., None], *arguments: bool) -> None:  # act: a method of DeviceTime
        if self._device_times is not None:
            try:
                act(self._device_times, *arguments)
            except Exception as error:  # noqa: BLE001 - no exception from CUDA may end a training step
                self._device_times = None
                self._warn(f"iterations are not timed on the device any more: {type(error).__name__}: {error}")

    def phase_start(self, name: str) -> None:
        """Begin a phase, as `Recorder.phase_start`; the memory so far is the memory of the steps."""
        if self._memory is not None and self.is_on and not self._phases.depth:
            index = PHASES.index(name) if isinstance(name, str) and name in PHASES else PHASES.index("other")
            if self._memory.remember_phase(index):
                self._put_memory(ring.AFTER_STEPS if self._end_ns or self._start_ns else ring.AFTER_STARTUP)
                self._memory.open_phase = index
        super().phase_start(name)

    def phase_end(self) -> None:
        super().phase_end()
        if self._memory is not None and not self._phases.depth and self._memory.open_phase >= 0:
            self._put_memory(self._memory.open_phase)
            self._memory.open_phase = -1

    def record_positions(self, positions: int) -> None:
        """Record the number of positions of a micro-batch, with padding: the memory of a step depends on this."""
        if self._memory is not None and type(positions) is int and positions > self._memory.positions:
            self._memory.positions = positions

    def finish(self, status: str = "completed") -> None:
        """Record the final status of the loop, and stop profiling."""
        if self.is_on:
            if self._profile is not None:
                self._profile.close(failed=status != "completed")
            self._put_device_times(self.ordinal)
            if self._memory is not None:
                # An error may have left a phase open.
                self._put_memory(self._memory.open_phase if self._memory.open_phase >= 0 else ring.AFTER_STEPS)
                self._memory.open_phase = -1
        super().finish(status)

    def _find_gpus(self) -> None:
        assert self._rank_device is not None
        last_index = self._rank_device.index
        try:
            if self._rank_device.find_gpus():
                self._send_facts()
        except Exception as error:  # noqa: BLE001 - no exception from CUDA may end a training step
            self._warn(f"it is not known which GPU this process uses: {type(error).__name__}: {error}")
        if self._device_times is not None and self._rank_device.index != last_index:
            self._device_times.forget_events()

    def _put_memory(self, after: int, ordinal: int = 0) -> None:
        """Write a record of the allocator's state; ``after`` is what has run since the last one, as `Slot.number`."""
        assert self._memory is not None
        if self._rank_device is not None and self._rank_device.index is None:  # perhaps no iteration has begun
            self._find_gpus()
        try:
            if self.is_on and (values := self._memory.read_allocator()) is not None:
                self._writer.write_values(ordinal or self.ordinal, after, _MEMORY_INDICES, values, ring.MEMORY)
        except Exception as error:  # noqa: BLE001 - an allocator without statistics; no exception may end a training step
            self._memory.is_off = True
            self._warn(f"the memory of torch's allocator is not measured: {type(error).__name__}: {error}")

    def _put_profile(self, profiled: Profiled, step_ns: int) -> None:  # of the last iteration, whose step this is
        split, duration_ns = profiled.split, profiled.split.duration_ns
        if not profiled.is_of_device:  # AL excludes phases and data waits inside the iteration
            duration_ns = max(step_ns, split.exposed_ns + split.computing_ns)
        begin_ns, end_ns = self._end_ns - duration_ns, self._end_ns
        for what, communication_ns, exposed_ns in (  # `Slot.what`
            (ring.WHOLE, split.communication_ns, split.exposed_ns),
            *((KINDS.index(kind), *times) for kind, times in split.kinds.items()),
        ):
            self.put(ring.PROFILE, what, communication_ns, begin_ns, end_ns, exposed_ns * _NS)
        self.put(ring.PROFILE, ring.COMPUTING, split.computing_ns, begin_ns, end_ns, profiled.cost_ns * _NS)

    def _put_device_times(self, ordinal: int) -> None:
        if (times := self._device_times) is not None and times.num_iterations:
            self.put(ring.DEVICE_TIME, 0, times.num_iterations, 0, 0, times.total_ns * _NS, ordinal)
            if times.num_own_iterations:
                self.put(ring.OWN_TIME, 0, times.num_own_iterations, 0, 0, times.own_ns * _NS, ordinal)
