"""Counts, phases and generations of a loop; a count may have any type, and an invalid count changes no total."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from effllm.records.counters import Counters

MAX_TOTAL = 2**62  # maximal running total
FEW_BITS = 30  # counts of at most this many bits cannot make a total overflow
PHASES = ("evaluation", "checkpoint", "other", "generation")  # periods that are excluded from the iterations


class RunningCounts(Counters):
    """Totals of a loop's counts."""

    def add_counts(self, tokens_processed: Any, samples: Any, tokens: Any, tokens_loss: Any) -> bool:
        """Add the counts of an iteration; ``False`` if a count is invalid: then no count is added."""
        if not type(tokens_processed) is type(samples) is type(tokens) is type(tokens_loss) is int or (
            (tokens_processed | samples | tokens | tokens_loss) >> FEW_BITS  # not 0 if a count is large or negative
        ):
            counts = counts_of(tokens_processed, samples, tokens, tokens_loss)
            totals = self.tokens_processed, self.samples, self.tokens, self.tokens_loss
            if counts is None or max(map(int.__add__, totals, counts)) >= MAX_TOTAL:
                return False
            tokens_processed, samples, tokens, tokens_loss = counts
        self.tokens_processed += tokens_processed
        self.samples += samples
        self.tokens += tokens
        self.tokens_loss += tokens_loss
        return True


class CallCounts:
    """Sums of the counts of `effllm.count`, and the newest loss, since the end of the last iteration."""

    def __init__(self) -> None:
        self._counts = [0, 0, 0, 0]  # positions, samples, tokens, tokens with a label
        self._loss: Any = None
        self.has_any = False  #: whether a count is more than 0

    def add_counts(self, tokens: Any, samples: Any, tokens_processed: Any, tokens_loss: Any, loss: Any) -> bool:
        """Add the arguments of `effllm.count`; ``False`` if a count is invalid: then nothing is added."""
        positions = tokens if tokens_processed is None else tokens_processed
        unpadded = tokens_processed if tokens is None else tokens
        given = counts_of(*(0 if count is None else count for count in (positions, samples, unpadded, tokens_loss)))
        if given is None:
            return False
        self._counts = [before + now for before, now in zip(self._counts, given, strict=True)]
        self.has_any = any(self._counts)
        if loss is not None and not is_on_gpu(loss):
            self._loss = loss
        return True

    def take_counts(self) -> tuple[list[int], Any]:
        """Return and reset the counts and the loss."""
        counts, loss = self._counts, self._loss
        self._counts, self._loss, self.has_any = [0, 0, 0, 0], None, False
        return counts, loss


class WarnOnce:
    """Passes on the first warning of each kind: lines with the same first 24 letters are of one kind."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._kinds: set[str] = set()  # the first letters of the lines so far
        self.is_on = True  # False after the end of recording: then no warning is passed on

    def __call__(self, line: str) -> None:
        if self.is_on and line[:24] not in self._kinds:
            self._kinds.add(line[:24])
            self._warn(line)


class Losses:
    """Checks losses and iteration numbers that a caller passes."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._last_number = 0  # the newest iteration number

    def checked(self, number: Any, loss: Any) -> tuple[int, float] | None:
        """Return number and loss (nan for a loss of ``None``), or ``None`` if an argument is invalid."""
        try:
            number = int(number)
            value = float("nan") if loss is None else float(loss)
        except Exception:  # noqa: BLE001 - no exception from the objects of the caller may end the loop
            self._warn("log_metrics takes an iteration number and a loss that is a number; the loss is ignored")
            return None
        if not -MAX_TOTAL < number < MAX_TOTAL:
            self._warn("log_metrics was given an iteration number out of range; the loss is ignored")
            return None
        if number < self._last_number:
            self._warn(f"the iteration number decreased from {self._last_number} to {number}; counting continues")
        self._last_number = number
        return number, value


def counts_of(*values: Any) -> list[int] | None:
    """Return counts as whole numbers of at least 0; ``None`` if a count is invalid, a string or on a GPU."""
    counts = []
    for value in values:
        if type(value) is not int and (isinstance(value, (str, bytes)) or is_on_gpu(value)):
            return None  # reading a tensor on a GPU would be a synchronisation
        try:
            counts.append(int(value))
        except Exception:  # noqa: BLE001 - no exception from the objects of the caller may end the loop
            return None
    return counts if min(counts) >= 0 and max(counts) < MAX_TOTAL else None


def is_on_gpu(value: Any) -> bool:
    """Whether a value is a tensor on a GPU, which is never read."""
    try:
        return bool(getattr(value, "is_cuda", False))
    except Exception:  # noqa: BLE001 - no exception from the objects of the caller may end the loop
        return False


class Phases:
    """Times of all phases, and the parts of these times to subtract from the step and data wait of an iteration.

    A nested phase is a part of the outer phase.  If an iteration starts or ends during a phase, the phase is split
    there, so that every nanosecond is counted exactly once.
    """

    def __init__(self) -> None:
        self.total_ns = [0] * len(PHASES)  # time of each phase of `PHASES`
        self.depth = 0  # number of open phases
        self.open_index = -1  # index of the outermost open phase in `PHASES`
        self.between_ns = 0  # time of phases between the last iteration and the next
        self.inside_ns = 0  # time of phases in the running iteration
        self._start_ns = 0  # of the part of the open phase that is not in the totals

    def begin_phase(self, name: Any, now_ns: int) -> bool:
        """Begin a phase (an unknown name counts as ``other``); return whether it is not inside another phase."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.open_index = PHASES.index(name if isinstance(name, str) and name in PHASES else "other")
        self._start_ns = now_ns
        return True

    def end_phase(self) -> bool:
        """End the newest phase; return whether no phase is open any more."""
        self.depth -= 1
        return self.depth == 0

    def add_open_until(self, at_ns: int, *, is_inside: bool) -> int:
        """Add the open phase up to ``at_ns`` to the totals; return the start of the added part."""
        start_ns, self._start_ns = self._start_ns, at_ns
        self.add_time(self.open_index, at_ns - start_ns, is_inside=is_inside)
        return start_ns

    def add_time(self, index: int, spent_ns: int, *, is_inside: bool) -> None:
        self.total_ns[index] += spent_ns
        if is_inside:
            self.inside_ns += spent_ns
        else:
            self.between_ns += spent_ns

    def start_iteration(self) -> None:
        """Begin an iteration; phases of an earlier iteration that did not end count as phases between iterations."""
        self.between_ns, self.inside_ns = self.between_ns + self.inside_ns, 0

    def end_iteration(self) -> tuple[int, int]:
        """Return the times of phases in the data wait and in the step of the iteration that ends."""
        between_and_inside_ns = self.between_ns, self.inside_ns
        self.between_ns = self.inside_ns = 0
        return between_and_inside_ns


class Generations:
    """Counts and times generations; a nested generation is a part of the outer generation.

    ``phase_start`` is called with ``generation`` at the start of a generation that is a phase, ``phase_end`` at its
    end, and ``changed`` after each change of the totals ``counters``.
    """

    def __init__(
        self,
        counters: Counters,
        phase_start: Callable[[str], None],
        phase_end: Callable[[], None],
        changed: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._counters = counters
        self._phase_start, self._phase_end = phase_start, phase_end
        self._changed, self._warn = changed, warn
        # For each open generation, outermost first: generated tokens and prompt tokens of the generations inside it.
        self._open: list[tuple[int, int]] = []
        self._start_ns = 0  # of the outermost open generation
        self._is_phase = False  # whether it is a phase
        self.total_ns = 0  #: time of all generations, also of those that are not in the phase ``generation``

    @property
    def depth(self) -> int:
        return len(self._open)

    def begin(self, is_phase: bool = False) -> None:
        """Begin a generation; with ``is_phase`` it is a phase, which AL and T exclude."""
        self._open.append((0, 0))
        if len(self._open) > 1:
            return
        self._is_phase = is_phase
        if is_phase:
            self._phase_start("generation")
        self._start_ns = time.monotonic_ns()

    def end(self, tokens: int | None = None, prompt_tokens: int = 0) -> None:
        """End the generation that the last `begin` began.

        By default, ``tokens`` is the sum of the nested generations, and ``prompt_tokens`` is ignored.
        """
        if not self._open:
            self._warn("a generation ended without a start; this end is ignored")
            return
        nested_counts = self._open.pop()
        if tokens is None:
            tokens, prompt_tokens = nested_counts
        if not self._open:
            self.add_generation(tokens, time.monotonic_ns() - self._start_ns, prompt_tokens)
            if self._is_phase:
                self._phase_end()
        elif (counts := counts_of(tokens, prompt_tokens)) is not None:
            outer = self._open[-1]
            self._open[-1] = outer[0] + counts[0], outer[1] + counts[1]
        else:
            self._warn_of_counts()

    def add_generation(self, tokens: Any, time_ns: Any, prompt_tokens: Any = 0) -> None:
        """Count a completed generation; its time, prompts included, stays in the step or phase that includes it.

        If another hook may count the same generation, call `begin` and `end` around it instead.
        """
        counters = self._counters
        counts = counts_of(tokens, time_ns, prompt_tokens)
        if counts is not None:
            totals = (
                counters.generated_tokens + counts[0],
                self.total_ns + counts[1],
                counters.prompt_tokens + counts[2],
            )
            if max(totals) < MAX_TOTAL:
                counters.generated_tokens, self.total_ns, counters.prompt_tokens = totals
                self._changed()
                return
        self._warn_of_counts()

    def _warn_of_counts(self) -> None:
        self._counters.counts_rejected += 1
        self._changed()
        self._warn("generated tokens and their time must be counts of at least 0; a generation is not counted")
