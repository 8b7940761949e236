"""The agent's view of its training process: settings, place, and facts that may change."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

import msgspec

from effllm.agent.proc import ExitStatus
from effllm.records.board import Board
from effllm.records.facts import FoundAddress, RankFacts
from effllm.records.ring import RingReader
from effllm.records.shared_memory import RingError


class Trainer:
    """The training process of one rank; ``descriptor`` is its pidfd, or -1 if the kernel does not support pidfds.

    Raises:
        RingError: the ring has no facts.
    """

    def __init__(self, ring: RingReader, board: Board, descriptor: int) -> None:
        self.ring, self.board, self.descriptor = ring, board, descriptor
        facts = msgspec.convert(ring.take_facts() or {}, RankFacts)
        if facts.place is None:
            raise RingError("the ring has no facts of its rank")
        self.facts = facts
        self.config = facts.config
        self.place = facts.place
        self.rank = self.place.rank
        self.is_first_of_host = self.place.local_rank == 0  # whether the rank's agent reports for the whole host
        self.pid = facts.trainer_pid
        self.exit_status = ExitStatus(self.pid, descriptor)
        self.agent = uuid.uuid4().hex[:16]  # identifies the agent in all messages
        self._address = FoundAddress()  # result of the search for the aggregator

    def is_gone(self) -> bool:
        """Whether a trainer without a pidfd has ended; with a pidfd, the agent's poll reports the end."""
        return self.descriptor < 0 and os.getppid() != self.pid

    def take_address(self) -> FoundAddress:
        """Return a new result of the address search, or an empty record."""
        try:
            address = msgspec.convert(self.ring.take_address() or {}, FoundAddress)
        except msgspec.ValidationError as error:
            return FoundAddress(failed=f"no metrics of this rank: its address cannot be read: {error}")
        if address.endpoint:
            self._address = address
            self.facts = self._with_address(self.facts)
        return address

    def take_facts(self) -> tuple[str, ...] | None:
        """Read the facts; return the new warnings of the trainer, or ``None`` if the facts have not changed."""
        if (document := self.ring.take_facts()) is None:
            return None
        try:
            facts = msgspec.convert(document, RankFacts)
        except msgspec.ValidationError as error:
            return (f"the new facts of a training process are dropped, because they cannot be read: {error}",)
        num_reported = len(self.facts.warnings)
        self.facts = self._with_address(facts)
        return facts.warnings[num_reported:]

    def _with_address(self, facts: RankFacts) -> RankFacts:
        address = self._address
        return replace(facts, endpoint=address.endpoint, job=address.job) if address.endpoint else facts
