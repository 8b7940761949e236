"""CURVE on ZeroMQ's sockets: the keys, made from the user's secret, and the list of who is let in.

Without the list CURVE encrypts and admits whatever key a peer makes up (RFC 26 leaves that to ZAP, RFC 27).  There is
one key in it: that of this job's agents, who all know the secret.  The server's key is the user's, not the job's, so
that an agent of another job gets as far as the list and can be told apart from a stranger.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from effllm.network.secret import derive

DOMAIN = b"effllm"
_ZAP = "inproc://zeromq.zap.01"
_MAX_REQUESTS = 100  # between two looks at everything else: a few ms
_FRAMES = 9  # of a request: two of the router's, then version, id, domain, address, identity, mechanism, key


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key and its public half, as Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, seed: bytes) -> KeyPair:
        """Return the keys that 32 bytes make."""
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True)
class AgentKeys:
    """What an agent needs to be let in, and to know whom it talks to."""

    own: KeyPair
    server_public: bytes

    @classmethod
    def of(cls, secret: bytes, job: str) -> AgentKeys:
        """Return the keys of a job's agents; an aggregator that knows no job has the empty one."""
        return cls(KeyPair.of(derive(secret, "agents", job)), KeyPair.of(derive(secret, "server")).public)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options that make a socket encrypt, before it connects."""
        socket.set(zmq.CURVE_SERVERKEY, self.server_public)
        socket.set(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.set(zmq.CURVE_SECRETKEY, self.own.secret)


@dataclass(frozen=True)
class ServerKeys:
    """What an aggregator needs to be known, and to know its agents."""

    own: KeyPair
    agents_public: bytes

    @classmethod
    def of(cls, secret: bytes, job: str) -> ServerKeys:
        """Return the keys of a job's aggregator."""
        return cls(KeyPair.of(derive(secret, "server")), KeyPair.of(derive(secret, "agents", job)).public)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set the options that make a socket encrypt and ask a `Gate`, before it listens."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate nobody is let in; the default is everybody


class Gate:
    """Answers ZeroMQ's question whether a peer is let in (ZAP): who has the agents' key is, nobody else.

    One per context, made before the socket that asks it; served from the poller of whoever has the socket.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._admitted = z85.decode(keys.agents_public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def answer(self) -> list[tuple[str, bool]]:
        """Answer all who wait; return their addresses, and whether they were let in."""
        answered = []
        for _ in range(_MAX_REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) < 5 or frames[2] != b"1.0":
                continue  # not a question of this protocol: ZeroMQ asks no other
            mechanism, key = (frames[7], frames[8]) if len(frames) == _FRAMES else (b"", b"")
            is_admitted = frames[4] == DOMAIN and mechanism == b"CURVE" and key == self._admitted
            answered.append((frames[5].decode(errors="replace").removeprefix("::ffff:"), is_admitted))
            status, text, user = (b"200", b"OK", b"agent") if is_admitted else (b"400", b"not of this job", b"")
            self.socket.send_multipart([frames[0], b"", b"1.0", frames[3], status, text, user, b""])
        return answered

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
