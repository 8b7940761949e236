"""Who each connection is: what its HELLO was accepted with, and how much it may say; pure.

A connection speaks for one rank and one agent.  What it says before its HELLO, for another rank or beyond
its rate is refused, counted by kind and told by the host of its HELLO.  A throttled peer is not heard until
it has introduced itself anew and sent again what was dropped: so nothing is lost that was honest.
"""

from __future__ import annotations

import time

from effllm.records.rank import Event
from effllm.records.wire import FromAgent, Hello, Reports, Supersede

# An honest agent sends a frame in 50 ms at most, and after an outage all that it kept, in frames of up to 128 kB.
FRAMES_PER_S = 50.0
BYTES_PER_S = 4.0 * 2**20
BURST_FRAMES = 512
BURST_BYTES = 16 * 2**20
ROW_BYTES = 16 * 1024  # a row with all gauges, phases and a wide histogram has 10 kB
STRANGER_FRAMES = 32  # before a connection has introduced itself, which takes one
STRANGER_BYTES = 2**20
MAX_UNSEEN_PEERS = 4096  # connections that are remembered though they never introduced themselves
AGAIN_EVERY_S = 1.0
AGAIN_FRAMES = 64  # are free again before a peer that sent too much is told to begin anew
TOLD_FROM = 3  # a reconnecting agent may say something before its HELLO, and says it again after it

STRANGER, IMPOSTOR, THROTTLED, GARBAGE = "stranger", "impostor", "throttled", "garbage"
TURNED_AWAY = "turned_away"
NOT_HEARD = "was not heard until it had sent again what was dropped"
STRANGE = "a connection without a HELLO"


class _Peer:
    """A connection: who it is, and what it may still say before its allowance is looked at again."""

    __slots__ = ("again_s", "agent", "frames", "host", "is_held", "num_bytes", "rank", "refused", "since_s")

    def __init__(self, now_s: float) -> None:
        self.agent = ""  # empty: it has not introduced itself
        self.rank = -1
        self.host = ""
        self.frames = STRANGER_FRAMES
        self.num_bytes = STRANGER_BYTES
        self.since_s = now_s  # of the allowance
        self.is_held = False  # nothing but a HELLO is heard: something of it was dropped
        self.again_s = -AGAIN_EVERY_S + now_s
        self.refused: dict[str, int] = {}  # by kind

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}" if self.agent else STRANGE


class Peers:
    """The connections of an aggregator.

    Args:
        history_size: how many reports an honest agent may have kept for us.
    """

    def __init__(self, history_size: int) -> None:
        self._burst_frames = BURST_FRAMES + history_size
        self._burst_bytes = BURST_BYTES + history_size * ROW_BYTES
        self._peers: dict[bytes, _Peer] = {}  # all that are known
        self._of_rank: dict[int, bytes] = {}  # those that were introduced
        self._events: list[Event] = []
        self._repeated = 0  # of what was refused without a line, since that was last asked
        self.refused: dict[str, int] = {}  # messages and dropped frames by kind

    def __len__(self) -> int:
        return len(self._peers)

    def admits(self, peer: bytes, num_bytes: int, now_s: float, is_hello: bool = False) -> bool:
        """Whether a frame may be decoded: ``False`` where its peer has sent too much, and no HELLO since."""
        one = self._peers.get(peer) or self._meet(peer, now_s)
        if one.is_held and not is_hello:
            self._refuse(one, THROTTLED, NOT_HEARD)
            return False  # what is dropped takes nothing away
        one.frames -= 1
        one.num_bytes -= num_bytes
        return (one.frames >= 0 <= one.num_bytes) or self._is_refilled(one, num_bytes, now_s)

    def objection(self, peer: bytes, message: FromAgent) -> str:
        """Return why a message is refused, or an empty string: it must speak for the rank of its connection's HELLO."""
        one = self._peers.get(peer)
        if isinstance(message, Reports) and one is not None and one.agent and not one.is_held:
            rank, agent = one.rank, one.agent  # ten thousand a second come here
            for row in message.rows:
                if row.rank != rank or row.agent != agent:
                    return self._impostor(one, row.rank)
            return ""
        if isinstance(message, Hello):
            if one is None or not one.agent or (one.rank == message.rank and one.agent == message.agent):
                return ""
            return self._refuse(one, IMPOSTOR, f"introduced itself as rank {message.rank} on {message.host} too")
        if isinstance(message, Supersede):  # from another aggregator, which is no rank
            return ""
        if one is None or not one.agent:
            return self._refuse(one, STRANGER, "sent something else first")
        if one.is_held:
            return self._refuse(one, THROTTLED, NOT_HEARD)
        if isinstance(message, Reports) or (message.rank == one.rank and message.agent == one.agent):
            return ""
        return self._impostor(one, message.rank)

    def _impostor(self, one: _Peer, rank: int) -> str:
        whose = f"rank {rank}" if rank != one.rank else "another agent of its rank"
        return self._refuse(one, IMPOSTOR, f"spoke for {whose}")

    def introduce(self, peer: bytes, message: Hello, now_s: float) -> None:
        """Take a connection as the rank and agent of its HELLO, in the place of an earlier one."""
        earlier = self._of_rank.get(message.rank)
        before = self._peers.pop(earlier, None) if earlier is not None and earlier != peer else None
        one = self._peers.get(peer) or self._meet(peer, now_s)
        if not one.agent:
            one.frames, one.num_bytes, one.since_s = self._burst_frames, self._burst_bytes, now_s
            if before is not None:  # a new connection is no new allowance
                one.frames, one.num_bytes, one.since_s = before.frames, before.num_bytes, before.since_s
        one.agent, one.rank, one.host = message.agent, message.rank, message.host
        one.is_held = False
        self._of_rank[message.rank] = peer

    def hold(self, peer: bytes) -> None:
        """Take nothing but a HELLO of a connection, with which it begins to send again what was not taken."""
        if (one := self._peers.get(peer)) is not None:
            one.is_held = True
            self._refuse(one, THROTTLED, "has more reports that wait for others than an agent keeps")

    def turn_away(self) -> None:
        """Count an introduction that was refused, whoever told why."""
        self.refused[TURNED_AWAY] = self.refused.get(TURNED_AWAY, 0) + 1

    def garbage(self, peer: bytes, reason: str) -> str:
        """Count a frame that was no message; return the reason with the name of who sent it."""
        one = self._peers.get(peer)
        if one is None:
            return f"{reason} (from {STRANGE})"
        one.refused[GARBAGE] = one.refused.get(GARBAGE, 0) + 1
        return f"{reason} (from {one.name})"

    def of_rank(self, rank: int) -> bytes | None:
        """Return the connection that speaks for a rank."""
        return self._of_rank.get(rank)

    def is_to_send_again(self, peer: bytes, now_s: float) -> bool:
        """Whether to tell a peer, whose frames were dropped, that it may begin anew; once a second at most."""
        one = self._peers.get(peer)
        if one is None or not one.is_held or now_s - one.again_s < AGAIN_EVERY_S:
            return False
        if one.frames + (now_s - one.since_s) * FRAMES_PER_S < AGAIN_FRAMES:
            return False
        one.again_s = now_s
        return True

    def take_events(self) -> list[Event]:
        """Return an event for each connection and kind of which messages were rejected first since the last call."""
        events, self._events = self._events, []
        return events

    def take_repeated(self) -> int:
        """Return how many messages were rejected since the last call beside the first of their connection and kind."""
        repeated, self._repeated = self._repeated, 0
        return repeated

    def _meet(self, peer: bytes, now_s: float) -> _Peer:
        if len(self._peers) - len(self._of_rank) >= MAX_UNSEEN_PEERS:
            # From the oldest on; half of them, so that a flood does not pay for this with every connection.
            strangers = [known for known, one in self._peers.items() if not one.agent]
            for known in strangers[: MAX_UNSEEN_PEERS // 2]:
                del self._peers[known]
        one = self._peers[peer] = _Peer(now_s)
        return one

    def _is_refilled(self, one: _Peer, num_bytes: int, now_s: float) -> bool:
        """Let the allowance grow by the time that has passed; say whether a frame that exceeded it may pass now."""
        passed_s = max(now_s - one.since_s, 0.0)
        most_frames = self._burst_frames if one.agent else STRANGER_FRAMES
        most_bytes = self._burst_bytes if one.agent else STRANGER_BYTES
        frames = min(one.frames + 1 + int(passed_s * FRAMES_PER_S), most_frames)
        left_bytes = min(one.num_bytes + num_bytes + int(passed_s * BYTES_PER_S), most_bytes)
        is_enough = frames >= 1 and left_bytes >= num_bytes
        if is_enough:
            one.frames, one.num_bytes, one.since_s = frames - 1, left_bytes - num_bytes, now_s
            return True
        one.frames += 1  # what is dropped takes nothing away
        one.num_bytes += num_bytes
        one.is_held = one.is_held or bool(one.agent)
        self._refuse(one, THROTTLED, "sends too much, and is not heard for a while")
        return False

    def _refuse(self, one: _Peer | None, kind: str, what: str) -> str:
        """Count a refusal, and tell of the first of its connection and kind; return it as a sentence."""
        self.refused[kind] = self.refused.get(kind, 0) + 1
        name = one.name if one else STRANGE
        text = f"{name} {what}"
        if one is not None:
            count = one.refused[kind] = one.refused.get(kind, 0) + 1
            told_from = TOLD_FROM if kind == STRANGER else 1
            if count == told_from:
                self._events.append(Event(time.time(), "refused", text, one.rank if one.agent else None))
            self._repeated += count > told_from
        return text
