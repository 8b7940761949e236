"""Consecutive spans of time of this rank, with the readings of its devices, which the agent returns.

This code runs on the training thread: standard library only, no wait.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from effllm.records.board import Board
from effllm.records.ring import MAX_CHAINS, SPAN
from effllm.records.spans import ALONE, SpanPart
from effllm.trainer.lifecycle import Lifecycle
from effllm.trainer.recorder import Recorder

#: If this many requests have no answer, the agent has ended or hangs; then spans do not end until an answer arrives.
MAX_WAITING = 1024
NEAR_NS = 10_000_000  # an iteration that ended within this time ends a span
# Numbers common to all chains of this process, whose answers are in one memory: chains, and requests so far.
_next_chain = _newest_request = 0


@dataclass(frozen=True)
class AnsweredSpan:
    """The readings in one span, with a part for each device; without parts, the rank has no device."""

    number: int  # of the request
    start_ns: int
    end_ns: int
    parts: tuple[SpanPart, ...]


class SpanChain:
    """A chain of spans: each begins where the last span has ended."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        global _next_chain
        self._chain = 1 + _next_chain % (MAX_CHAINS - 1)  # its number; 0 (`ALONE`) is for other spans
        _next_chain += 1
        self._lifecycle = lifecycle
        self._recorder: Recorder | None = None  # the one that ran at the last `begin`
        self.last_end_ns = 0  #: end of the last span, on the monotonic clock
        self._last_read = 0  # running number of the last answer that was read
        self._unanswered: set[int] = set()  # numbers of the requests without an answer
        self._parts_by_request: dict[int, list[SpanPart]] = {}  # of the requests with some answers
        self._spans: list[AnsweredSpan] = []  # answered, and not yet taken
        self.devices: list[dict[str, Any]] = []  #: facts of the devices, by `SpanPart.device`
        self.unavailable: list[str] = []  #: reasons why the agent has not opened a device
        self.num_lost = 0  #: number of lost requests: the request or its answer was overwritten before it was read

    @property
    def num_unanswered(self) -> int:
        return len(self._unanswered)

    def begin(self) -> bool:
        """Begin the first span now; ``False`` if no agent runs."""
        self._recorder = recorder = self._lifecycle.recorder
        board = self._lifecycle.board
        if recorder is None or board is None:
            return False
        self._last_read = board.spans.newest
        self._unanswered.clear()
        self._parts_by_request.clear()
        self.last_end_ns = _put_request(recorder, self._chain, 0, None)
        self._lifecycle.span_chains.add(self)
        return self.last_end_ns > 0

    def end_span(self) -> int:
        """End the span, and begin the next span; return the number of the request, 0 without an agent."""
        return self._request(self._chain, self.last_end_ns)

    def request_past_span(self, start_ns: int, end_ns: int) -> int:
        """Request a span of past time that is not a part of the chain; return the number, 0 without an agent."""
        return self._request(ALONE, start_ns, end_ns) if start_ns < end_ns else 0

    def take_answers(self) -> list[AnsweredSpan]:
        """Return the new answers, oldest first, without waiting."""
        if self._running_recorder() is not None and (board := self._lifecycle.board) is not None:
            self.read_answers(board)
        spans, self._spans = self._spans, []
        return spans

    def read_answers(self, board: Board) -> None:
        """Read the new answers from a board."""
        parts, self._last_read = board.spans.read_parts(self._last_read)
        if any(not 0 <= part.device < len(self.devices) for part in parts):
            document = board.devices.read_document() or {}
            self.devices, self.unavailable = document.get("devices", []), document.get("unavailable", [])
        for part in parts:
            if part.number in self._unanswered:
                self._add_part(part)
        # Answers have the order of their requests, so an older request without an answer has lost its answer.
        for number in [number for number in self._unanswered if parts and number < parts[-1].number]:
            self._unanswered.discard(number)
            self._parts_by_request.pop(number, None)
            self.num_lost += 1

    def _add_part(self, part: SpanPart) -> None:
        parts = self._parts_by_request.setdefault(part.number, [])
        if part.num_devices:
            parts.append(part)
        if len(parts) == part.num_devices:
            self._unanswered.discard(part.number)
            self._spans.append(
                AnsweredSpan(part.number, part.start_ns, part.end_ns, tuple(self._parts_by_request.pop(part.number)))
            )

    def _running_recorder(self) -> Recorder | None:  # None if the run of the last `begin` has ended
        return self._recorder if self._recorder is not None and self._recorder is self._lifecycle.recorder else None

    def _request(self, chain: int, start_ns: int, end_ns: int | None = None) -> int:  # its number; 0 if it is not sent
        global _newest_request
        recorder = self._running_recorder()
        if len(self._unanswered) >= MAX_WAITING:
            return 0
        if recorder is None or not (end_ns := _put_request(recorder, chain, _newest_request + 1, start_ns, end_ns)):
            return 0
        _newest_request += 1
        self._unanswered.add(_newest_request)
        if chain != ALONE:
            self.last_end_ns = end_ns
        return _newest_request


def _put_request(recorder: Recorder, chain: int, number: int, start_ns: int | None, end_ns: int | None = None) -> int:
    """Request the readings of the devices in a span, without waiting; return the span's end, or 0 after the run.

    Without ``end_ns``, the span ends now, or at the end of an iteration that has just ended: then spans and windows
    have the same edges.  Without ``start_ns``, the request begins a chain.
    """
    if not recorder.is_on:
        return 0
    if end_ns is None:
        end_ns, earliest_start_ns = time.monotonic_ns(), recorder.earliest_start_ns
        if start_ns is not None and start_ns < earliest_start_ns and end_ns - earliest_start_ns < NEAR_NS:
            end_ns = earliest_start_ns
    recorder.put(SPAN, chain, number, end_ns if start_ns is None else start_ns, end_ns, 0.0)
    recorder.wake()
    return end_ns
