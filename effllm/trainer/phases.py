"""Phases: stretches of a loop that are not iteration; standard library alone."""

from __future__ import annotations

from typing import Any

PHASES = ("evaluation", "checkpoint", "other", "generation")


class Phases:
    """Times of all phases, and what they take from steps and data waits.

    A phase inside another belongs to the outer. An iteration that starts or ends inside an open phase cuts it in two,
    so that every nanosecond belongs to exactly one class.
    """

    def __init__(self) -> None:
        self.total_ns = [0] * len(PHASES)
        self.depth = 0
        self.index = -1  # of the open one in `PHASES`
        self.between_ns = 0  # of phases since the last iteration
        self.inside_ns = 0  # of phases in the running iteration
        self._start_ns = 0

    def begin(self, name: Any, now_ns: int) -> bool:
        """Begin a phase, one of an unknown name as ``other``; return whether it lies in no other."""
        self.depth += 1
        if self.depth > 1:
            return False
        self.index = PHASES.index(name if isinstance(name, str) and name in PHASES else "other")
        self._start_ns = now_ns
        return True

    def end(self) -> bool:
        """End the phase that began last; return whether none is open any more."""
        self.depth -= 1
        return self.depth == 0

    def cut(self, at_ns: int, *, is_inside: bool) -> int:
        """Count the open phase until now, as one that lies inside of an iteration or not; return when it began."""
        start_ns, self._start_ns = self._start_ns, at_ns
        self.add(self.index, at_ns - start_ns, is_inside=is_inside)
        return start_ns

    def add(self, index: int, spent_ns: int, *, is_inside: bool) -> None:
        """Count a stretch."""
        self.total_ns[index] += spent_ns
        if is_inside:
            self.inside_ns += spent_ns
        else:
            self.between_ns += spent_ns

    def start_iteration(self) -> None:
        """Begin an iteration: what a start that it replaces had inside lies before it."""
        self.between_ns, self.inside_ns = self.between_ns + self.inside_ns, 0

    def end_iteration(self) -> tuple[int, int]:
        """Return what phases took from the data wait and from the step of the iteration that ends."""
        paused_ns = self.between_ns, self.inside_ns
        self.between_ns = self.inside_ns = 0
        return paused_ns
