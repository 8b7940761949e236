"""Generated tokens of a rank and their time; no call raises."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from effllm.records.counters import Counters
from effllm.trainer.counts import MAX_TOTAL, counts_of


class Generations:
    """Counts and times generations; a nested generation is a part of the outer generation.

    Args:
        counters: totals to which tokens are added.
        phase_start: called with ``generation`` at the start of a generation that is a phase.
        phase_end: called at the end of a generation that is a phase.
        changed: called after each change of the totals.
        warn: called with a line for the user.
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
        self._open: list[tuple[int, int]] = []  # generated tokens and prompt tokens of each open generation
        self._start_ns = 0
        self._is_phase = False
        self.total_ns = 0  #: time of all generations, also of those that are not in the phase ``generation``

    @property
    def depth(self) -> int:
        """Number of open generations."""
        return len(self._open)

    def start(self, is_phase: bool = False) -> None:
        """Begin a generation.

        Args:
            is_phase: whether the generation is a phase; AL and T exclude phases.
        """
        self._open.append((0, 0))
        if len(self._open) > 1:
            return
        self._is_phase = is_phase
        if is_phase:
            self._phase_start("generation")
        self._start_ns = time.monotonic_ns()

    def end(self, tokens: int | None = None, prompt_tokens: int = 0) -> None:
        """End the generation that the last `start` began.

        Args:
            tokens: generated tokens on this rank; by default the sum of the nested generations.
            prompt_tokens: tokens of the prompts; ignored if ``tokens`` is not given.
        """
        if not self._open:
            self._warn("a generation ended without a start; this end is ignored")
            return
        inside = self._open.pop()
        if tokens is None:
            tokens, prompt_tokens = inside
        if not self._open:
            self.add(tokens, time.monotonic_ns() - self._start_ns, prompt_tokens)
            if self._is_phase:
                self._phase_end()
        elif (counts := counts_of(tokens, prompt_tokens)) is not None:
            outer = self._open[-1]
            self._open[-1] = outer[0] + counts[0], outer[1] + counts[1]
        else:
            self._warn_of_counts()

    def add(self, tokens: Any, time_ns: Any, prompt_tokens: Any = 0) -> None:
        """Count a completed generation; its time stays in the step or phase that includes it.

        If another hook may count the same generation, call `start` and `end` around it instead.

        Args:
            tokens: generated tokens, without prompts.
            time_ns: time of the generation, including prompts.
            prompt_tokens: tokens of the prompts.
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
        self._warn("generated tokens and their time must be counts of at least 0; a generation is not counted")
