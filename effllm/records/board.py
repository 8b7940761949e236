"""The board: the newest values of the job, from the agent to its training process; standard library alone."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from effllm.records.facts import from_document, to_document
from effllm.records.shared_memory import RingError, SharedDocument, make_memory

BOARD_BYTES = 32 * 1024


@dataclass(frozen=True)
class JobState:
    """What an agent has received of the job."""

    report: int = 0  # number of the newest report; 0 before the first
    iteration: int = 0  # the last of that report
    values: Mapping[str, float] = field(default_factory=dict)  # by tag
    welcome: str = ""  # endpoint of the aggregator that has admitted the agent


class Board:
    """The map of one `JobState`.

    Args:
        descriptor: of the map; a new one is made where not given.

    Raises:
        RingError: there is no memory for it, or the descriptor is of something else.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = make_memory("effllm-board", BOARD_BYTES) if descriptor is None else descriptor
        if os.fstat(self.descriptor).st_size < BOARD_BYTES:
            raise RingError("this is not a board of effllm: it is too short")
        self._map = mmap.mmap(self.descriptor, BOARD_BYTES)
        self._document = SharedDocument(self._map, 0, BOARD_BYTES)
        self._state = JobState()

    def write(self, state: JobState) -> bool:
        """Replace the state; ``False`` where it is too large."""
        return self._document.write(to_document(state))

    def read(self) -> JobState:
        """Return the newest whole state, at once."""
        if (document := self._document.take()) is not None:
            self._state = from_document(JobState, document)
        return self._state

    def welcome(self) -> str:
        """Return the endpoint at which the agent was admitted, or an empty string; any thread may call this.

        Raises:
            ValueError: the map is closed.
        """
        return from_document(JobState, self._document.read() or {}).welcome

    def close(self) -> None:
        """Close the map and the descriptor; may be called twice."""
        if self.descriptor >= 0:
            self._map.close()
            os.close(self.descriptor)
            self.descriptor = -1
