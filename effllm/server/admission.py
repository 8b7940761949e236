"""Admission of ranks: accepts or rejects HELLOs, and reports rejected peers."""

from __future__ import annotations

from collections.abc import Callable

from effllm.job.aggregator import Aggregator
from effllm.network.descriptors import needed, raise_limit
from effllm.network.peer_admission import PeerAdmission
from effllm.network.peers import Peers
from effllm.records.clock import Now
from effllm.records.wire import Hello, Rejected


class Admission:
    """Admits ranks, if the limit of open files allows a descriptor for every rank of the job.

    Args:
        aggregator: the aggregator, with the ranks of the job.
        peers: the connections.
        peer_admission: admission of connections.
        warn: reports an event with a text and a kind.
    """

    def __init__(
        self, aggregator: Aggregator, peers: Peers, peer_admission: PeerAdmission, warn: Callable[[str, str], None]
    ) -> None:
        self._aggregator = aggregator
        self._peers = peers
        self._peer_admission = peer_admission
        self._warn = warn
        self._has_room_for = 0  # number of ranks that the limit of open files allows
        self.has_shortage = False  # whether the job was rejected for lack of descriptors
        self.rejected_job = b""  # connection of a rejected job of one rank: no other agent will connect

    def hello(self, peer: bytes, message: Hello, objection: str, is_trainer_gone: bool, now: Now) -> Rejected | None:
        """Handle a HELLO; return the answer if the HELLO is rejected.

        Args:
            peer: connection of the HELLO.
            message: the HELLO.
            objection: reason for which `Peers` rejects the HELLO, or empty.
            is_trainer_gone: whether rank 0's trainer has ended.
            now: current time.
        """
        reason = objection
        if not reason and is_trainer_gone and self._aggregator.roster.is_too_late(message):
            reason = "this attempt is over"
        if not reason and (shortage := self._shortage(message, now.mono_s)):
            self._peers.count_rejected_hello()
            # In a larger job other agents would continue to search for an aggregator.
            if message.world_size == 1:
                self.rejected_job = peer
            return Rejected(shortage, whole_job=True)
        reason = reason or self._aggregator.hello(message, now)
        if reason:
            self._peers.count_rejected_hello()
            return Rejected(reason, again=is_trainer_gone)
        self._peers.introduce(peer, message, now.mono_s)
        return None

    def report(self) -> None:
        """Record the first rejection of each kind by each connection, since the last call."""
        for event in self._peers.take_events():
            self._aggregator.events.record(event)

    @property
    def counts(self) -> dict[str, int]:
        return {**self._peers.rejected, **self._peer_admission.counts}

    def _shortage(self, hello: Hello, now_s: float) -> str:
        """Raise the limit of open files for the world of a valid HELLO; return the reason of a failure."""
        world_size = hello.world_size
        if world_size <= self._has_room_for or self._aggregator.roster.objection(hello, now_s):
            return ""
        shortage = raise_limit(needed(world_size))
        if not shortage:
            self._has_room_for = world_size
        elif not self.has_shortage:
            self.has_shortage = True
            self._warn(f"a job of {world_size} ranks is rejected: {shortage}", "descriptors")
        return shortage
