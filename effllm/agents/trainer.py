"""The training process as the agent beside it sees it: settings, place, and facts that become known over time."""

from __future__ import annotations

import os
import uuid
from typing import Any

from effllm.config import Config
from effllm.training.ring import Board, RingReader


class Trainer:
    """The training process of one rank.

    Args:
        ring: what it records; its facts must be there.
        board: shows it the values of the whole job.
        descriptor: a pidfd of it, or -1 where the kernel has none.
    """

    def __init__(self, ring: RingReader, board: Board, descriptor: int) -> None:
        self.ring, self.board, self.descriptor = ring, board, descriptor
        self.facts: dict[str, Any] = ring.facts() or {}
        self.config = Config.from_dict(self.facts["config"])
        self.place: dict[str, Any] = self.facts["place"]
        self.rank: int = self.place["rank"]
        self.pid: int = self.facts["trainer_pid"]
        self.agent = uuid.uuid4().hex[:16]  # names the agent in all messages
        self._address: dict[str, str] = {}  # found after the start

    @property
    def is_first_of_host(self) -> bool:
        """Whether its agent is the one that reports for the whole host."""
        return bool(self.place["local_rank"] == 0)

    @property
    def endpoint(self) -> str:
        """Address of the aggregator, empty as long as it is not known."""
        return str(self.facts.get("endpoint", ""))

    @property
    def job(self) -> str:
        """Name of the job that the aggregator at `endpoint` serves."""
        return str(self.facts.get("job", ""))

    @property
    def first_iteration(self) -> int:
        """What is added to the ordinal of an iteration for the number that is shown."""
        return int(self.facts.get("first_iteration", 0))

    def is_gone(self) -> bool:
        """Whether it has ended, where no pidfd shows that."""
        return self.descriptor < 0 and os.getppid() != self.pid

    def take_address(self) -> dict[str, str]:
        """Return what rank 0 has published since the last call; `failed` or `refused` is why there is no address."""
        address: dict[str, str] = self.ring.address() or {}
        if address and not address.keys() & {"failed", "refused"}:
            self._address = address
            self.facts.update(address)
        return address

    def take_facts(self) -> list[str] | None:
        """Take facts that have changed; return new warnings of the trainer, or ``None`` where no fact has changed."""
        facts = self.ring.facts()
        if facts is None:
            return None
        num_known = len(self.facts.get("warnings", []))
        self.facts = facts | self._address
        new: list[str] = facts.get("warnings", [])[num_known:]
        return new
