"""The training loop's two calls: stamps and running totals into the ring, and nothing else.

What happens here happens on the training thread, so: the standard library alone, no thread, no lock,
no exception, nothing that grows.  ``record_iteration_start`` and ``record_iteration_end`` together cost
2 to 4 microseconds, four times two clock reads and a pack (benchmarks/).
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

from effllm.records.counters import Counters
from effllm.training import ring
from effllm.training.shared_memory import RingError

_PHASES = ("evaluation", "checkpoint", "other", "generation")
_MAX_TOTAL = 2**62  # what a running total can hold
_FEW_BITS = 30  # of counts that no total overflows by
_NO_TOKENS = 0

_live: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """Stamps iterations, phases and losses of one rank.

    Args:
        writer: the ring, shared with the agent.
        log_interval: iterations per window.
        offset: the number of the first iteration, less one; boundaries lie where ordinal plus offset
            is divisible by ``log_interval``.
        wake: called without waiting when a window ends and again when the next iteration starts.
        warn: called with a line for the person, for each kind of mistake once.
    """

    # Of an object with more than 30 attributes CPython keeps them in a dictionary of its own, which is slower.
    __slots__ = (
        "__weakref__",
        "_arrival_ns",
        "_boundary",
        "_boundary_ordinal",
        "_counters",
        "_end_ns",
        "_generation_is_phase",
        "_generation_ns",
        "_generation_start_ns",
        "_generations",
        "_is_special",
        "_log_interval",
        "_made_ns",
        "_number",
        "_offset",
        "_on",
        "_own_ns",
        "_paused_between_ns",
        "_paused_inside_ns",
        "_phase",
        "_phase_depth",
        "_phase_ns",
        "_phase_start_ns",
        "_start_ns",
        "_step_ns",
        "_wait_ns",
        "_wake",
        "_warn",
        "_warned",
        "_writer",
        "ordinal",
    )

    def __init__(
        self,
        writer: ring.RingWriter,
        log_interval: int,
        offset: int = 0,
        wake: Callable[[], None] = lambda: None,
        warn: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._writer = writer
        self._log_interval = log_interval
        self._offset = offset
        self._wake = wake
        self._warn = warn
        self._warned: set[str] = set()
        self._on = True
        # Whether the next start or end has more to do than stamp: nothing has ended yet, a phase is open or was, a
        # window has ended, or nothing is recorded any more.
        self._is_special = True
        self.ordinal = 0
        self._boundary_ordinal = log_interval - offset % log_interval  # the next that ends a window
        self._start_ns = 0  # 0 while no iteration runs
        self._end_ns = 0  # 0 before the first has ended
        self._made_ns = time.monotonic_ns()
        self._own_ns = self._arrival_ns = 0  # of the running iteration, once it has come to its sync point
        self._boundary = False  # a window has ended and the next iteration has not started
        self._phase = -1
        self._phase_depth = 0
        self._phase_start_ns = 0
        self._paused_between_ns = 0
        self._paused_inside_ns = 0
        self._step_ns = self._wait_ns = 0
        self._phase_ns = [0, 0, 0, 0]
        self._counters = Counters()
        self._generation_ns = 0
        self._generations: list[tuple[int, int]] = []  # of each open one: tokens and prompts counted inside of it
        self._generation_start_ns = 0
        self._generation_is_phase = False
        self._number = 0
        writer.state(ring.STARTUP, 0, self._made_ns)  # since now, and not since the machine was started
        _live.add(self)

    def start(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp the start of an iteration; a second start before the end replaces the first."""
        start_ns = _now()
        if self._is_special:
            self._start_specially(start_ns)
            return
        self._start_ns = start_ns
        self._own_ns = 0
        self._writer.state(ring.STEP, self.ordinal + 1, start_ns)

    def _start_specially(self, start_ns: int) -> None:
        if not self._on:
            return
        if self._phase_depth:
            self._split_phase(start_ns)
        self._start_ns = start_ns
        self._paused_between_ns += self._paused_inside_ns
        self._paused_inside_ns = self._own_ns = 0
        self._writer.state(ring.STEP, self.ordinal + 1, start_ns)
        self._is_special = not self._end_ns or self._phase_depth > 0 or self._paused_between_ns > 0
        if self._boundary:
            self._boundary = False
            self._wake()

    def end(
        self,
        tokens_processed: int = 0,
        samples: int = 0,
        tokens: int | None = None,
        tokens_loss: int = _NO_TOKENS,
        _now: Any = time.monotonic_ns,
    ) -> None:
        """Stamp the end of an iteration with this rank's share of its tokens and samples.

        Args:
            tokens_processed: all positions.
            samples: sequences.
            tokens: positions without padding; the processed ones where the loop does not tell.
            tokens_loss: positions with a label.
        """
        end_ns = _now()
        start_ns = self._start_ns
        if self._is_special or not start_ns:
            if not self._on:
                return
            start_ns = self._settle(end_ns)
        self._wait_ns = wait_ns = self._wait_ns + (start_ns - self._end_ns)
        self._step_ns = step_ns = self._step_ns + (end_ns - start_ns)
        self._start_ns = 0
        self._end_ns = end_ns
        self.ordinal = ordinal = self.ordinal + 1
        counters = self._counters
        if (
            tokens is None
            and tokens_loss is _NO_TOKENS
            and type(tokens_processed) is type(samples) is int
            and not (tokens_processed | samples) >> _FEW_BITS  # nor negative
        ):
            counters.tokens += tokens_processed
            counters.tokens_processed += tokens_processed
            counters.samples += samples
        else:
            self._count(tokens_processed, samples, tokens_processed if tokens is None else tokens, tokens_loss)
        if self._own_ns:
            self._writer.iteration(
                ordinal, start_ns, end_ns, step_ns, wait_ns, counters, self._own_ns, self._arrival_ns
            )
            self._own_ns = 0
        else:
            self._writer.iteration(ordinal, start_ns, end_ns, step_ns, wait_ns, counters)
        if ordinal == self._boundary_ordinal:
            self._boundary_ordinal += self._log_interval
            self._boundary = self._is_special = True
            self._wake()

    def _settle(self, end_ns: int) -> int:
        """Take off pauses from wait and step, and return when the iteration started that ends now."""
        if self._phase_depth:
            self._split_phase(end_ns)
        start_ns = self._start_ns or self._without_start()
        if self._end_ns:
            self._wait_ns -= self._paused_between_ns
        else:
            self._end_ns = start_ns  # nobody waited before the first
        self._step_ns -= self._paused_inside_ns
        self._paused_between_ns = self._paused_inside_ns = 0
        self._is_special = self._boundary or self._phase_depth > 0
        return start_ns

    def _count(self, tokens_processed: Any, samples: Any, tokens: Any, tokens_loss: Any) -> None:
        counters = self._counters
        try:
            if not (type(tokens) is type(tokens_processed) is type(tokens_loss) is type(samples) is int):
                tokens, tokens_processed = whole_number(tokens), whole_number(tokens_processed)
                tokens_loss, samples = whole_number(tokens_loss), whole_number(samples)
            if (tokens | tokens_processed | tokens_loss | samples) >> _FEW_BITS:
                if min(tokens, tokens_processed, tokens_loss, samples) < 0:
                    raise ValueError  # noqa: TRY301 - handled as the wrong types are
                most = max(
                    counters.tokens + tokens, counters.tokens_processed + tokens_processed,
                    counters.tokens_loss + tokens_loss, counters.samples + samples,
                )  # fmt: skip
                if most >= _MAX_TOTAL:
                    raise OverflowError  # noqa: TRY301
            counters.tokens += tokens
            counters.tokens_processed += tokens_processed
            counters.tokens_loss += tokens_loss
            counters.samples += samples
        except Exception:  # noqa: BLE001 - whatever the objects of the caller raise must not end the loop
            self._once(f"tokens and samples must be counts of at least 0; iteration {self.ordinal} counts none")

    def sync_point(self, _now: Any = time.monotonic_ns) -> None:
        """Stamp where this rank first waits for others in the running iteration; later ones of it do not count.

        What lies before, less data waits and phases, is the rank's own time.
        """
        if self._own_ns or not self._start_ns or self._phase_depth or not self._on:
            return
        self._arrival_ns = now_ns = _now()
        self._own_ns = now_ns - self._start_ns - self._paused_inside_ns

    def waited(self, spent_ns: int) -> None:
        """Count a stretch of the running iteration as waiting for data: its start moves on by as much."""
        if self._on and self._start_ns and not self._phase_depth:
            self._start_ns += spent_ns

    def add(self, samples: int = 0, tokens: int = 0, tokens_loss: int = 0) -> None:
        """Add counts that became known when their iteration had ended; they enter the next record."""
        if not self._on:
            return
        counts = (samples, tokens, tokens_loss)
        if all(type(one) is int and 0 <= one < _MAX_TOTAL // 2 for one in counts):
            self._counters.samples += samples
            self._counters.tokens += tokens
            self._counters.tokens_loss += tokens_loss
        else:
            self._once("counts that come late must be whole numbers of at least 0; they are not counted")

    def phase_start(self, name: str) -> None:
        """Begin a stretch that is not iteration; one inside another belongs to the outer."""
        if not self._on:
            return
        self._phase_depth += 1
        self._is_special = True
        if self._phase_depth > 1:
            return
        self._phase = _PHASES.index(name) if isinstance(name, str) and name in _PHASES else 2
        self._phase_start_ns = time.monotonic_ns()
        self._writer.state(ring.PHASE_STATE, self.ordinal, self._phase_start_ns, self._phase)

    def phase_end(self) -> None:
        """End the stretch that the last `phase_start` began."""
        if not self._on:
            return
        if self._phase_depth == 0:
            self._once("a phase was ended that had not begun; ignored")
            return
        self._phase_depth -= 1
        if self._phase_depth:
            return
        end_ns = time.monotonic_ns()
        self._split_phase(end_ns)
        if self._start_ns:
            self._writer.state(ring.STEP, self.ordinal + 1, self._start_ns)
        else:
            self._writer.state(ring.BETWEEN, self.ordinal, end_ns)

    def _split_phase(self, at_ns: int) -> None:
        # An iteration that starts or ends inside an open phase cuts it in two, so that every nanosecond
        # belongs to exactly one class.
        spent_ns = at_ns - self._phase_start_ns
        self._phase_ns[self._phase] += spent_ns
        self._write_totals()
        if self._start_ns:
            self._paused_inside_ns += spent_ns
        else:
            self._paused_between_ns += spent_ns
        self._put(ring.PHASE, self._phase, self.ordinal, 0, self._phase_start_ns, at_ns, 0.0)
        self._phase_start_ns = at_ns

    def generated(self, tokens: int, time_ns: int, prompt_tokens: int = 0) -> None:
        """Add what this rank generated, and how long that took, to its totals; they make IT.

        The time is left where it lay, in a step or in a phase. Use `generation_start` and `generation_end`
        around what another hook may count as well.

        Args:
            tokens: that were generated, without prompts.
            time_ns: of the generation, prompts included.
            prompt_tokens: that stood before.
        """
        if not self._on:
            return
        try:
            if not (type(tokens) is type(time_ns) is type(prompt_tokens) is int):
                tokens, time_ns, prompt_tokens = (
                    whole_number(tokens),
                    whole_number(time_ns),
                    whole_number(prompt_tokens),
                )
            if min(tokens, time_ns, prompt_tokens) < 0:
                raise ValueError  # noqa: TRY301 - handled as the wrong types are
            counters = self._counters
            tokens += counters.generated_tokens
            time_ns += self._generation_ns
            prompt_tokens += counters.prompt_tokens
            if max(tokens, time_ns, prompt_tokens) >= _MAX_TOTAL:
                raise OverflowError  # noqa: TRY301
            counters.generated_tokens, self._generation_ns, counters.prompt_tokens = tokens, time_ns, prompt_tokens
            self._write_totals()
        except Exception:  # noqa: BLE001 - whatever the objects of the caller raise must not end the loop
            self._once("generated tokens and their time must be counts of at least 0; a generation is not counted")

    @property
    def is_generating(self) -> bool:
        """Whether a generation has begun and not ended."""
        return bool(self._generations)

    @property
    def free_ns(self) -> int:
        """From when on nothing is an iteration yet, nor a phase: the end of the last, or our beginning."""
        return (self._end_ns or self._made_ns) + self._paused_between_ns

    @property
    def marks(self) -> tuple[int, ...]:
        """What changes where a phase or a generation begins or ends."""
        return (self._phase_depth, len(self._generations), *self._phase_ns, self._generation_ns)

    def may_evaluate(self) -> None:
        """Report an evaluation as the state of this rank; whether it is one, `evaluated` decides when it is over."""
        if self._on and not self._phase_depth:
            self._writer.state(ring.PHASE_STATE, self.ordinal, time.monotonic_ns(), 0)

    def evaluated(self, start_ns: int, end_ns: int) -> None:
        """Count a stretch of the running iteration as evaluation; no phase and no wait that was given may lie in it."""
        if self._on and self._start_ns and not self._phase_depth:
            self._writer.state(ring.STEP, self.ordinal + 1, self._start_ns)
            self._is_special = True
            self._phase_ns[0] += end_ns - start_ns
            self._paused_inside_ns += end_ns - start_ns
            self._write_totals()
            self._put(ring.PHASE, 0, self.ordinal, 0, start_ns, end_ns, 0.0)

    def _write_totals(self) -> None:
        self._writer.take(self._phase_ns, self._generation_ns, self._counters)

    def generation_start(self, is_phase: bool = False) -> None:
        """Begin a generation; one inside another belongs to the outer.

        Args:
            is_phase: whether it is a stretch of its own, so that neither AL nor T has its time.
        """
        if not self._on:
            return
        self._generations.append((0, 0))
        if len(self._generations) > 1:
            return
        self._generation_is_phase = is_phase
        if is_phase:
            self.phase_start("generation")
        self._generation_start_ns = time.monotonic_ns()

    def generation_end(self, tokens: int | None = None, prompt_tokens: int = 0) -> None:
        """End the generation that the last `generation_start` began, with this rank's share of its tokens.

        Args:
            tokens: that were generated; what lay inside has counted them where not given.
            prompt_tokens: that stood before.
        """
        if not self._on:
            return
        if not self._generations:
            self._once("a generation was ended that had not begun; ignored")
            return
        seen_inside = self._generations.pop()
        if tokens is None:
            tokens, prompt_tokens = seen_inside
        if self._generations:
            try:
                outer = self._generations[-1]
                self._generations[-1] = (outer[0] + whole_number(tokens), outer[1] + whole_number(prompt_tokens))
            except Exception:  # noqa: BLE001 - as in generated
                self._once("generated tokens and their time must be counts of at least 0; a generation is not counted")
            return
        self.generated(tokens, time.monotonic_ns() - self._generation_start_ns, prompt_tokens)
        if self._generation_is_phase:
            self.phase_end()

    def loss(self, number: int | None, loss: float | None) -> None:
        """Record the loss of the iteration that ended last, and the number it is known by."""
        if not self._on:
            return
        try:
            number = int(number)  # type: ignore[arg-type] # of None it raises, as of other things that are no number
            value = float("nan") if loss is None else float(loss)
        except Exception:  # noqa: BLE001 - whatever the objects of the caller raise must not end the loop
            self._once("log_metrics takes an iteration number and a loss that is a number; ignored")
            return
        if not -_MAX_TOTAL < number < _MAX_TOTAL:
            self._once("log_metrics was given an iteration number out of range; ignored")
            return
        if number < self._number:
            self._once(f"the iteration number went back from {self._number} to {number}; counting goes on")
        self._number = number
        now_ns = time.monotonic_ns()
        self._put(ring.LOSS, loss is None, self.ordinal, number, now_ns, now_ns, value)

    def reset(self) -> None:
        """Let the run-to-date values start anew after the current window."""
        if self._on:
            now_ns = time.monotonic_ns()
            self._put(ring.RESET, 0, self.ordinal, 0, now_ns, now_ns, 0.0)

    def finish(self, status: str = "completed") -> None:
        """Record how the loop ended and record nothing from then on; later calls do nothing."""
        if not self._on:
            return
        while self._phase_depth:  # an exception may have left one open
            self.phase_end()
        now_ns = time.monotonic_ns()
        known = isinstance(status, str) and status in ring.STATUSES
        self._put(ring.END, ring.STATUSES.index(status if known else "failed"), self.ordinal, 0, now_ns, now_ns, 0.0)
        self._writer.state(ring.FINISHED, self.ordinal, now_ns)
        self.disable()
        self._wake()

    def disable(self) -> None:
        """Record nothing from now on, and say nothing about it: this is a forked child."""
        self._on, self._is_special = False, True

    def _put(self, kind: int, what: int, ordinal: int, number: int, start_ns: int, end_ns: int, value: float) -> None:
        self._writer.put(
            kind, what, ordinal, number, start_ns, end_ns, value, self._step_ns, self._wait_ns, self._counters
        )

    def _without_start(self) -> int:
        self._once("an iteration ended that had not started; it counts from the end of the one before")
        return self.free_ns

    def _once(self, line: str) -> None:
        kind = line[:24]
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(line)


def pair_s(batches: int = 5, pairs: int = 40) -> float | None:
    """Return what a start and an end of an iteration take here, a median over a millisecond; ``None`` without memory.

    The real loop's caches are colder, so it is an estimate from below.
    """
    try:
        writer = ring.RingWriter(16)
    except RingError:
        return None
    recorder = Recorder(writer, pairs + 1)
    took_ns = []
    for _ in range(batches):
        begin_ns = time.thread_time_ns()
        for _ in range(pairs):
            recorder.start()
            recorder.end(1, 1)
        took_ns.append(time.thread_time_ns() - begin_ns)
    recorder.disable()
    writer.close()
    return sorted(took_ns)[batches // 2] / pairs * 1e-9


def whole_number(value: Any) -> int:
    """Return a count as an ``int``; a string is none, and a tensor on a GPU is not read.

    Raises:
        TypeError: it is one of those, or no number; `ValueError` or whatever else its own conversion raises.
    """
    if isinstance(value, (str, bytes)) or getattr(value, "is_cuda", False):
        raise TypeError  # reading a tensor on a GPU would be a synchronisation
    return int(value)


def _disable_all() -> None:
    for recorder in list(_live):
        recorder.disable()


# A forked DataLoader worker must not write into its parent's ring.
os.register_at_fork(after_in_child=_disable_all)
