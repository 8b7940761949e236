"""The recorder of a training loop: it writes stamps and running totals to the ring.

This code runs on the training thread: standard library only, no thread, no lock, no exception, no growing memory.
``record_iteration_start`` and ``record_iteration_end`` together take 2 to 4 microseconds: four times the time of two
clock reads and one ``pack_into`` (benchmarks/).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from effllm.records import ring
from effllm.records.shared_memory import RingError
from effllm.trainer.counts import FEW_BITS, PHASES, Generations, Losses, Phases, RunningCounts, WarnOnce
from effllm.trainer.value_buffer import MAX_TOGETHER, ValueBuffer

_NO_TOKENS = 0  # default of `Recorder.end`, compared by identity: a caller's value may have its own `==`

_live_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


class LoopRecords:
    """The running totals of a loop, and its records that are no stamps: each contains the totals so far."""

    generations: Generations

    def __init__(self, writer: ring.RingWriter, log_interval: int, offset: int, warn: Callable[[str], None]) -> None:
        self._writer, self._warn, self._warn_once = writer, warn, WarnOnce(warn)
        self._offset, self.is_on = offset, True
        self.ordinal = 0  # number of iterations that have ended
        self._boundary_ordinal = log_interval - offset % log_interval  # ordinal of the iteration that ends the window
        self._step_ns = self._wait_ns = 0  # totals of the steps and of the data waits
        self._counters, self._phases = RunningCounts(), Phases()
        self._losses = Losses(self._warn_once)
        self.has_loss = False  # whether the loop or a hook has given a loss

    def record_loss(self, number: int | None, loss: float | None) -> None:
        """Record the loss of the last completed iteration, with the caller's number of this iteration."""
        self.has_loss = self.has_loss or loss is not None
        if self.is_on and (checked := self._losses.checked(number, loss)) is not None:
            self.put(ring.LOSS, loss is None, checked[0], (now_ns := time.monotonic_ns()), now_ns, checked[1])

    @property
    def is_last_of_window(self) -> bool:
        """Whether the running iteration is the last one of its window."""
        return self.ordinal + 1 == self._boundary_ordinal

    @property
    def displayed_iteration(self) -> int:
        """Displayed number of the running iteration."""
        return self.ordinal + 1 + self._offset

    def record_seen_loss(self, number: int, loss: float, is_over: bool = False) -> None:
        """Record a loss that a hook has seen, in the running iteration or, with ``is_over``, after the last one.

        ``number`` is the displayed number of its iteration.
        """
        if self.is_on:  # the ordinal of a running iteration is one more than the number of ended iterations
            self.put(ring.LOSS, 0, number, (now_ns := time.monotonic_ns()), now_ns, loss, self.ordinal + (not is_over))

    def reset(self) -> None:
        """Request that the run-to-date values are reset at the end of the current window."""
        self.put(ring.RESET, 0, 0, (now_ns := time.monotonic_ns()), now_ns, 0.0)

    def add_late_counts(self, samples: int = 0, tokens: int = 0, tokens_loss: int = 0) -> None:
        """Add counts that became known after the end of their iteration; the next record includes them."""
        if self.is_on and not self._counters.add_counts(0, samples, tokens, tokens_loss):
            self._warn_once("counts added after an iteration must be whole numbers of at least 0; these are ignored")
            self.reject_counts()

    def reject_counts(self) -> None:
        """Record that counts were rejected, so that the counts of the run are no totals."""
        self._counters.counts_rejected += 1
        self._write_totals()

    def _write_totals(self) -> None:
        if self.is_on:
            self._writer.replace_totals(self._phases.total_ns, self.generations.total_ns, self._counters)

    def put(
        self, kind: int, what: int, number: int, start_ns: int, end_ns: int, value: float, ordinal: int = 0
    ) -> None:
        """Write a record (`ring.Slot`) with the totals so far; by default, it is of the last completed iteration."""
        if self.is_on:
            totals = (self._step_ns, self._wait_ns, self._counters)
            self._writer.write_record(kind, what, ordinal or self.ordinal, number, start_ns, end_ns, value, *totals)


class Recorder(LoopRecords):
    """Stamps iterations, phases and losses of one rank.

    A window ends where ``log_interval`` divides the ordinal plus ``offset``, the number of earlier iterations.
    ``wake`` is called at the end of a window and at the next start of an iteration, and must not wait.  ``warn`` gets
    a line once for each kind of mistake.  ``index_of_value`` returns the index of a name, or -1 if there are too many.
    """

    def __init__(
        self,
        writer: ring.RingWriter,
        log_interval: int,
        offset: int = 0,
        wake: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda _line: None,
        values: ValueBuffer | None = None,
        index_of_value: Callable[[str], int] = lambda _name: -1,
    ) -> None:
        super().__init__(writer, log_interval, offset, warn)
        self.wake, self._log_interval = wake, log_interval
        self.thread_id = threading.get_ident()  # of the loop
        # Whether the next `start` or `end` must do more than write a stamp: at the first iteration, for a phase, after
        # the end of a window, or after recording has stopped.
        self._is_special = True
        self._start_ns = self._end_ns = 0  # start: 0 between iterations; end: 0 until the first iteration has ended
        self._created_ns = time.monotonic_ns()
        self._own_ns = 0  # own time of this iteration before the sync points so far
        self._wait_end_ns = 0  # end of the newest wait for other ranks, less phases; 0 while waiting, or without a wait
        self._has_window_ended = False  # whether a window has ended and the next iteration has not started
        phase = self.phase_start, self.phase_end
        self.generations = Generations(self._counters, *phase, self._write_totals, self._warn_once)
        self._values = values or ValueBuffer()
        self._values_at_ns = 0  # at the first end of an iteration after this time, values are written
        self._values.connect(self._write_values, writer, wake, index_of_value, warn)
        writer.write_state(ring.STARTUP, 0, self._created_ns)  # else startup would begin at the boot
        _live_recorders.add(self)

    def start(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the start of an iteration; a second start before the end replaces the first."""
        start_ns = _now()
        if self._is_special:
            self._start_special_iteration(start_ns)
            return
        self._start_ns, self._own_ns = start_ns, 0
        self._values.limit = MAX_TOGETHER
        self._writer.write_state(ring.STEP, self.ordinal + 1, start_ns)

    def _start_special_iteration(self, start_ns: int) -> None:
        """Start an iteration while `_is_special`: split an open phase there, and wake the agent after a window."""
        if not self.is_on:
            return
        phases = self._phases
        if phases.depth:  # the part of an open phase before this time belongs to the data wait
            self._record_phase_until(start_ns)
        self._start_ns, self._own_ns = start_ns, 0
        self._values.begin_iteration()
        phases.start_iteration()
        self._writer.write_state(ring.STEP, self.ordinal + 1, start_ns)
        self._is_special = not self._end_ns or phases.depth > 0 or phases.between_ns > 0
        if self._has_window_ended:
            self._has_window_ended = False
            self.wake()

    def end(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = _NO_TOKENS,
        _now: Any = time.monotonic_ns,
    ) -> None:
        """Stamp the end of an iteration with this rank's counts, as `MetricsCollector.record_iteration_end`."""
        end_ns = _now()
        start_ns = self._start_ns
        if self._is_special or not start_ns:
            if not self.is_on:
                return
            start_ns = self._subtract_phases(end_ns)
        self._wait_ns = wait_ns = self._wait_ns + (start_ns - self._end_ns)
        self._step_ns = step_ns = self._step_ns + (end_ns - start_ns)
        self._start_ns, self._end_ns = 0, end_ns
        self.ordinal = ordinal = self.ordinal + 1
        counters = self._counters
        if (
            tokens is None
            and tokens_loss is _NO_TOKENS
            and type(tokens_processed) is type(samples) is int
            and not (tokens_processed | samples) >> FEW_BITS  # not 0 if a count is large or negative
        ):
            counters.tokens += tokens_processed
            counters.tokens_processed += tokens_processed
            counters.samples += samples
        else:
            tokens = tokens_processed if tokens is None else tokens
            if not counters.add_counts(tokens_processed, samples, tokens, tokens_loss):
                self._warn_once(f"tokens and samples must be counts of at least 0; iteration {ordinal} has no counts")
                self.reject_counts()
        self._values.limit = 1  # values between two iterations are written at once
        if end_ns >= self._values_at_ns or ordinal == self._boundary_ordinal:  # before a record that may end the window
            self._values_at_ns = self._values.write_values(ordinal, end_ns)
        if self._own_ns:
            self._writer.write_iteration(ordinal, start_ns, end_ns, step_ns, wait_ns, counters, self._own_ns)
            self._own_ns = self._wait_end_ns = 0
        else:
            self._writer.write_iteration(ordinal, start_ns, end_ns, step_ns, wait_ns, counters)
        if ordinal == self._boundary_ordinal:
            self._boundary_ordinal += self._log_interval
            self._has_window_ended = self._is_special = True
            self.wake()

    def _subtract_phases(self, end_ns: int) -> int:
        """Subtract phases from the totals of wait and step; return the start of the iteration that ends now."""
        phases = self._phases
        if phases.depth:
            self._record_phase_until(end_ns)
        if not (start_ns := self._start_ns):
            self._warn_once("an iteration ended without a start; it counts from the end of the previous iteration")
            start_ns = self.earliest_start_ns
        between_ns, inside_ns = phases.end_iteration()
        if self._end_ns:  # `end` adds the whole time since the last end
            self._wait_ns -= between_ns
        else:
            self._end_ns = start_ns  # the first iteration has no data wait
        self._step_ns -= inside_ns
        self._is_special = self._has_window_ended or phases.depth > 0
        return start_ns

    def sync_point(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the sync point of the running iteration: the point at which this rank first waits for other ranks.

        The time before this point, without data waits and phases, is the rank's own time.  Later calls do nothing,
        except after `end_rank_wait`.
        """
        if (self._own_ns and not self._wait_end_ns) or not self._start_ns or self._phases.depth or not self.is_on:
            return
        since_ns = self._wait_end_ns if self._own_ns else self._start_ns
        self._own_ns += _now() - self._phases.inside_ns - since_ns
        self._wait_end_ns = 0

    def end_rank_wait(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the end of a wait for other ranks: the time to the next sync point of the iteration is own time too."""
        if self._own_ns and self._start_ns and not self._phases.depth and self.is_on:
            self._wait_end_ns = _now() - self._phases.inside_ns

    def add_data_wait(self, spent_ns: int) -> None:
        """Count this time of the running iteration as data wait: the iteration's start is moved by this time."""
        if self.is_on and self._start_ns and not self._phases.depth:
            self._start_ns += spent_ns
            if self._wait_end_ns:
                self._wait_end_ns += spent_ns

    def phase_start(self, name: str) -> None:
        """Begin a phase; a nested phase is a part of the outer phase."""
        if not self.is_on:
            return
        self._write_values()  # a phase may be long
        self._is_special, now_ns = True, time.monotonic_ns()
        if self._phases.begin_phase(name, now_ns):
            self._writer.write_state(ring.PHASE_STATE, self.ordinal, now_ns, self._phases.open_index)

    def phase_end(self) -> None:
        """End the phase that the last `phase_start` began."""
        if not self.is_on or self._phases.depth == 0:
            self._warn_once("a phase ended without a start; this end is ignored")
            return
        if not self._phases.end_phase():
            return
        end_ns = time.monotonic_ns()
        self._record_phase_until(end_ns)
        if self._start_ns:
            self._writer.write_state(ring.STEP, self.ordinal + 1, self._start_ns)
        else:
            self._writer.write_state(ring.BETWEEN, self.ordinal, end_ns)

    def _record_phase_until(self, at_ns: int) -> None:  # the part of the open phase since its last record
        start_ns = self._phases.add_open_until(at_ns, is_inside=self._start_ns > 0)
        self._write_totals()
        self.put(ring.PHASE, self._phases.open_index, 0, start_ns, at_ns, 0.0)

    @property
    def earliest_start_ns(self) -> int:
        """Earliest start of the next iteration: the end of the last iteration or phase, or the recorder's start."""
        return (self._end_ns or self._created_ns) + self._phases.between_ns

    @property
    def phase_marks(self) -> tuple[int, ...]:
        """Values that change when a phase or a generation begins or ends."""
        return (self._phases.depth, self.generations.depth, *self._phases.total_ns, self.generations.total_ns)

    def publish_replay(self) -> None:
        """Publish that the device works, although no iteration ends: a CUDA graph was replayed."""
        if self.is_on and not self._phases.depth:
            is_inside = bool(self._start_ns)
            state = ring.STEP if is_inside else ring.BETWEEN if self._end_ns else ring.STARTUP
            self._writer.write_state(state, self.ordinal + is_inside, time.monotonic_ns())

    def publish_evaluation(self) -> None:
        """Publish that this rank may be in an evaluation; `count_as_phase` confirms it after its end."""
        if self.is_on and not self._phases.depth:
            self._writer.write_state(ring.PHASE_STATE, self.ordinal, time.monotonic_ns(), 0)  # 0: PHASES[0]

    def count_as_phase(self, start_ns: int, end_ns: int, index: int = 0) -> None:
        """Count a past part of the running iteration, without phases and data waits, as a phase.

        ``index`` is that of the phase in `PHASES`, by default of an evaluation.
        """
        if self.is_on and self._start_ns and not self._phases.depth:
            self._writer.write_state(ring.STEP, self.ordinal + 1, self._start_ns)
            self._is_special = True
            self._phases.add_time(index, end_ns - start_ns, is_inside=True)
            self._write_totals()
            self.put(ring.PHASE, index, 0, start_ns, end_ns, 0.0)

    def count_as_other_phase(self, _now: Any = time.monotonic_ns) -> bool:
        """Count the running iteration as ``other``: the next `start` replaces it; ``False`` if it has a phase."""
        if self._phases.inside_ns or self._phases.depth:
            return False
        self.count_as_phase(self._start_ns, _now(), PHASES.index("other"))
        return True

    def _write_values(self) -> None:
        self._values.write_values(self.ordinal + (self._start_ns > 0))

    def finish(self, status: str = "completed") -> None:
        """Record the final status of the loop and stop recording; later calls do nothing."""
        if not self.is_on:
            return
        while self._phases.depth:  # an exception may have left a phase open
            self.phase_end()
        self._values.begin_iteration()
        self._write_values()
        now_ns = time.monotonic_ns()
        is_status = isinstance(status, str) and status in ring.STATUSES
        self.put(ring.END, ring.STATUSES.index(status if is_status else "failed"), 0, now_ns, now_ns, 0.0)
        self._writer.write_state(ring.FINISHED, self.ordinal, now_ns)
        self.disable()
        self.wake()

    def disable(self) -> None:
        """Stop recording without a final status, as in a forked child."""
        self.is_on, self._is_special, self._warn_once.is_on = False, True, False
        self._values.disconnect(self._write_values)


def measured_pair_s() -> float | None:
    """Measure the time to record an iteration's start and end on this host; ``None`` if memory is too short.

    The result is a median, measured within 1 ms.  It is a lower bound, because a real loop has colder caches.
    """
    batches, pairs = 5, 40  # pairs of calls in a batch
    try:
        writer = ring.RingWriter(16)
    except RingError:
        return None
    recorder = Recorder(writer, pairs + 1)
    took_ns = []  # of each batch, in time of this thread
    for _ in range(batches):
        begin_ns = time.thread_time_ns()
        for _ in range(pairs):
            recorder.start()
            recorder.end(1, 1)
        took_ns.append(time.thread_time_ns() - begin_ns)
    recorder.disable()
    writer.close()
    return sorted(took_ns)[batches // 2] / pairs * 1e-9


def _disable_all() -> None:
    for recorder in list(_live_recorders):
        recorder.disable()


# A forked DataLoader worker must not write into its parent's ring.
os.register_at_fork(after_in_child=_disable_all)
