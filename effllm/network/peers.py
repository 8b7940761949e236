"""The identity of each connection, taken from its HELLO, and its rate limit. No I/O.

A connection sends the messages of one rank and one agent.  Messages before the HELLO, of another rank or above the rate
limit are rejected, counted by kind, and reported with the host in the HELLO.  The frames of a throttled peer are
dropped until the peer sends another HELLO and then the dropped reports.  So an honest agent loses no report.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from effllm.records.rank import Event
from effllm.records.wire import FromAgent, Hello, Reports, Supersede

# An honest agent sends at most one frame in 50 ms.  After an outage it sends all kept reports, in frames up to 128 kB.
BYTES_PER_S = 4_000_000
FRAME_BYTES = 80_000  # a smaller frame counts as this many bytes, because each frame takes time: 50 frames a second
BURST_BYTES = 40_000_000  # in addition to the reports that an agent keeps
REPORT_BYTES = 16_000  # a report with all gauges, phases and a wide histogram has 10 kB
NO_HELLO_FRAMES = 32  # allowance up to and including the HELLO, in the smallest frames
MAX_PEERS_WITHOUT_HELLO = 4096
AGAIN_EVERY_S = 1.0
AGAIN_FRAMES = 64  # dropped frames are requested again when the peer's allowance is this many frames
REPORTED_FROM = 3  # two messages without a HELLO cause no event: a reconnecting agent may send such a message

NO_HELLO, WRONG_RANK, THROTTLED, GARBAGE = "no_hello", "wrong_rank", "throttled", "garbage"
REJECTED_HELLO = "rejected_hello"
NOT_RESENT = "sent new frames before it sent the dropped frames again"
UNKNOWN_PEER = "a connection without a HELLO"


@dataclass(slots=True)
class _Peer:
    """A connection: its rank and agent, and its remaining allowance."""

    refilled_s: float  # time of the last refill
    resend_requested_s: float  # time of the last request to send dropped frames again
    agent: str = ""  # empty before the HELLO
    rank: int = -1
    host: str = ""
    allowance_bytes: float = NO_HELLO_FRAMES * FRAME_BYTES
    needs_hello: bool = False  # whether only a HELLO is accepted, because a frame was dropped
    rejected: Counter[str] = field(default_factory=Counter)  # by kind

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.agent else UNKNOWN_PEER


class Peers:
    """The connections of an aggregator; ``history_size``: number of unacknowledged reports that an agent keeps."""

    def __init__(self, history_size: int) -> None:
        self._burst_bytes = BURST_BYTES + history_size * REPORT_BYTES
        self._peers: dict[bytes, _Peer] = {}  # by ZeroMQ's routing id of the connection, as all arguments `peer`
        self.peer_by_rank: dict[int, bytes] = {}  # connections with a HELLO
        self._events: list[Event] = []
        self.rejected: Counter[str] = Counter()  # rejected messages and dropped frames, by kind

    def __len__(self) -> int:
        return len(self._peers)

    def admit_frame(self, peer: bytes, num_bytes: int, now_s: float, is_hello: bool = False) -> bool:
        """Count a frame against its peer's allowance; return whether it may be decoded, when throttled only a HELLO."""
        sender = self._peers.get(peer) or self._add_peer(peer, now_s)
        if sender.needs_hello and not is_hello:
            self._count_rejection(sender, THROTTLED, NOT_RESENT)
            return False
        cost_bytes = max(num_bytes, FRAME_BYTES)
        if sender.allowance_bytes < cost_bytes:
            max_bytes = self._burst_bytes if sender.agent else NO_HELLO_FRAMES * FRAME_BYTES
            refill_bytes = max(now_s - sender.refilled_s, 0.0) * BYTES_PER_S
            sender.allowance_bytes, sender.refilled_s = min(sender.allowance_bytes + refill_bytes, max_bytes), now_s
            if sender.allowance_bytes < cost_bytes:  # a dropped frame does not reduce the allowance
                sender.needs_hello = sender.needs_hello or bool(sender.agent)
                self._count_rejection(sender, THROTTLED, "exceeds its rate limit; its frames are now dropped")
                return False
        sender.allowance_bytes -= cost_bytes
        return True

    def check_sender(self, peer: bytes, message: FromAgent) -> str:
        """Return an error text if a peer may not send a message, which then counts as rejected; else an empty text."""
        sender = self._peers.get(peer)
        if isinstance(message, Reports) and sender is not None and sender.agent and not sender.needs_hello:
            rank, agent = sender.rank, sender.agent  # local names are faster: there are ten thousand calls a second
            for row in message.rows:
                if row.rank != rank or row.agent != agent:
                    return self._reject_rank(sender, row.rank)
            return ""
        if isinstance(message, Hello):
            if sender is None or not sender.agent or (sender.rank == message.rank and sender.agent == message.agent):
                return ""
            what = f"also sent a HELLO of rank {message.rank} on {message.host}"
            return self._count_rejection(sender, WRONG_RANK, what)
        if isinstance(message, Supersede):  # the sender is another aggregator and has no rank
            return ""
        if sender is None or not sender.agent:
            return self._count_rejection(sender, NO_HELLO, "sent another message first")
        if sender.needs_hello:
            return self._count_rejection(sender, THROTTLED, NOT_RESENT)
        if isinstance(message, Reports) or (message.rank == sender.rank and message.agent == sender.agent):
            return ""
        return self._reject_rank(sender, message.rank)

    def _reject_rank(self, sender: _Peer, rank: int) -> str:
        whose = f"rank {rank}" if rank != sender.rank else "another agent of its rank"
        return self._count_rejection(sender, WRONG_RANK, f"sent a message of {whose}")

    def register_hello(self, peer: bytes, message: Hello, now_s: float) -> None:
        """Set the rank and agent of a connection from its HELLO; replace an earlier connection of the rank."""
        earlier_id = self.peer_by_rank.get(message.rank)
        earlier = self._peers.pop(earlier_id, None) if earlier_id is not None and earlier_id != peer else None
        sender = self._peers.get(peer) or self._add_peer(peer, now_s)
        if not sender.agent:
            sender.allowance_bytes, sender.refilled_s = self._burst_bytes, now_s
            if earlier is not None:  # a reconnection keeps the earlier allowance
                sender.allowance_bytes, sender.refilled_s = earlier.allowance_bytes, earlier.refilled_s
        sender.agent, sender.rank, sender.host = message.agent, message.rank, message.host
        sender.needs_hello = False
        self.peer_by_rank[message.rank] = peer

    def require_hello(self, peer: bytes) -> None:
        """Accept only a HELLO from a connection; after the HELLO the agent sends the dropped reports again."""
        if (sender := self._peers.get(peer)) is not None:
            sender.needs_hello = True
            self._count_rejection(sender, THROTTLED, "has more waiting reports than an agent keeps")

    def count_undecodable(self, peer: bytes, reason: str) -> str:
        """Count a frame that was not decoded; return the reason with the peer's name."""
        sender = self._peers.get(peer)
        if sender is None:
            return f"{reason} (from {UNKNOWN_PEER})"
        sender.rejected[GARBAGE] += 1
        return f"{reason} (from {sender.name})"

    def claim_resend_request(self, peer: bytes, now_s: float) -> bool:
        """Whether to request the dropped frames of a peer, or its HELLO, again now; ``True`` at most once a second."""
        sender = self._peers.get(peer)
        if sender is None or now_s - sender.resend_requested_s < AGAIN_EVERY_S:
            return False
        is_refilled = sender.allowance_bytes + (now_s - sender.refilled_s) * BYTES_PER_S >= AGAIN_FRAMES * FRAME_BYTES
        if sender.agent and not (sender.needs_hello and is_refilled):
            return False
        sender.resend_requested_s = now_s
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call: one for the first rejection of each kind by each connection."""
        events, self._events = self._events, []
        return events

    def _add_peer(self, peer: bytes, now_s: float) -> _Peer:
        if len(self._peers) - len(self.peer_by_rank) >= MAX_PEERS_WITHOUT_HELLO:
            # Half of these peers are removed at once: in a flood, a scan of all peers per connection takes too long.
            without_hello = [other for other, sender in self._peers.items() if not sender.agent]
            for removed in without_hello[: MAX_PEERS_WITHOUT_HELLO // 2]:
                del self._peers[removed]
        sender = self._peers[peer] = _Peer(now_s, now_s - AGAIN_EVERY_S)
        return sender

    def _count_rejection(self, sender: _Peer | None, kind: str, what: str) -> str:
        """Count a rejection and return a sentence; the first rejection of a kind also makes an event."""
        self.rejected[kind] += 1
        name = sender.name if sender else UNKNOWN_PEER
        text = f"{name} {what}"
        if sender is not None:
            sender.rejected[kind] += 1
            if sender.rejected[kind] == (REPORTED_FROM if kind == NO_HELLO else 1):
                self._events.append(Event(time.time(), "rejected", text, sender.rank if sender.agent else None))
        return text
