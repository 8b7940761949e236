"""Phases: periods that are excluded from the iterations, such as an evaluation."""

from __future__ import annotations

from typing import Any

PHASES = ("evaluation", "checkpoint", "other", "generation")


class Phases:
    """Times of all phases, and the parts of these times to subtract from the step and data wait of an iteration.

    A nested phase is a part of the outer phase.  If an iteration starts or ends during a phase, the phase is split
    there, so that every nanosecond is counted exactly once.
    """

    def __init__(self) -> None:
        self.total_ns = [0] * len(PHASES)
        self.depth = 0
        self.index = -1  # index of the open phase in `PHASES`
        self.between_ns = 0  # time of phases between the last iteration and the next
        self.inside_ns = 0  # time of phases in the running iteration
        self._start_ns = 0

    def begin(self, name: Any, now_ns: int) -> bool:
        """Begin a phase (an unknown name counts as ``other``); return whether it is not inside another phase."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.index = PHASES.index(name if isinstance(name, str) and name in PHASES else "other")
        self._start_ns = now_ns
        return True

    def end(self) -> bool:
        """End the newest phase; return whether no phase is open any more."""
        self.depth -= 1
        return self.depth == 0

    def cut(self, at_ns: int, *, is_inside: bool) -> int:
        """Add the open phase up to ``at_ns`` to the totals; return the start of the added part."""
        start_ns, self._start_ns = self._start_ns, at_ns
        self.add(self.index, at_ns - start_ns, is_inside=is_inside)
        return start_ns

    def add(self, index: int, spent_ns: int, *, is_inside: bool) -> None:
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
        paused_ns = self.between_ns, self.inside_ns
        self.between_ns = self.inside_ns = 0
        return paused_ns
