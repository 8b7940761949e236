"""The lines that an agent writes to the job's terminal when metrics are missing: once per host."""

from __future__ import annotations

import contextlib
import os
import time

from effllm.agent.events import AgentEvents
from effllm.agent.trainer import Trainer

NO_AGGREGATOR_AFTER_S = 10.0


def write_notice(text: str) -> None:
    """Write one line to the job's stderr, unless `silence_stderr` was called."""
    with contextlib.suppress(OSError):
        os.write(2, f"[EfficientLLM] {text}\n".encode())


def silence_stderr() -> None:
    """Close the job's stderr: with an inherited open descriptor, `torchrun ... 2>&1 | tee` would not end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


class Notices:
    """The notices of one agent; each notice is also an event.

    Args:
        trainer: the agent's trainer.
        events: receives an event for each notice.
    """

    def __init__(self, trainer: Trainer, events: AgentEvents) -> None:
        self._trainer, self._events = trainer, events
        self._started_s = time.monotonic()
        self._is_explained = False  # whether the reason of the missing aggregator was reported

    def no_metrics(self, text: str) -> None:
        self._events.report("agent", text)
        if self._trainer.is_first_of_host:
            self._is_explained = True
            write_notice(text)

    def refused_at_rank_0(self, reason: str) -> None:
        """Record why rank 0 has no aggregator; the trainer of rank 0 has already printed the reason."""
        self._is_explained = True
        self._events.report("agent", f"rank 0 has no aggregator: {reason}")

    def no_aggregator(self, now_s: float) -> None:
        """Report once that there was no aggregator for `NO_AGGREGATOR_AFTER_S`."""
        if self._is_explained or now_s - self._started_s < NO_AGGREGATOR_AFTER_S:
            return
        self._is_explained = True
        where = self._trainer.facts.endpoint
        text = f"no aggregator answers at {where}" if where else "rank 0 has not published its address"
        self._events.report("agent", text)
        if self._trainer.is_first_of_host:
            write_notice(f"{text}: no metrics without an aggregator; training goes on")

    def undelivered(self, num_reports: int) -> None:
        text = f"{num_reports} reports could not be delivered to {self._trainer.facts.endpoint or 'rank 0'}"
        self._events.report("agent", text)
        if self._trainer.is_first_of_host:
            write_notice(f"rank {self._trainer.rank}: {text}")
