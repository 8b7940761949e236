"""CURVE on ZeroMQ's sockets: the keys, derived from the user's secret, and the list of admitted keys.

Without this list CURVE encrypts, but admits any key that a peer creates (RFC 26 leaves admission to ZAP, RFC 27).
The list has one key, which is derived from the secret and shared by all agents of the job.  The server's key belongs
to the user, not to the job: so an agent of another job differs from an unauthenticated peer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from effllm.network.secret import derive

DOMAIN = b"effllm"
_ZAP = "inproc://zeromq.zap.01"
_MAX_REQUESTS = 100  # limit for one call of `answer_requests`; this many requests take a few ms
_FRAMES = 9  # frames of a request: two of the router, version, id, domain, address, identity, mechanism, key


@dataclass(frozen=True)
class KeyPair:
    """An X25519 key and its public half, as Z85."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def from_seed(cls, seed: bytes) -> KeyPair:
        secret = z85.encode(seed)
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True)
class AgentKeys:
    """The key of an agent, and the public key of its aggregator."""

    own: KeyPair
    server_public: bytes

    @classmethod
    def from_secret(cls, secret: bytes, job: str) -> AgentKeys:
        """Return the keys of a job's agents; the job is empty for an aggregator without a job."""
        return cls(KeyPair.from_seed(derive(secret, "agents", job)), KeyPair.from_seed(derive(secret, "server")).public)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        socket.set(zmq.CURVE_SERVERKEY, self.server_public)
        socket.set(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.set(zmq.CURVE_SECRETKEY, self.own.secret)


@dataclass(frozen=True)
class ServerKeys:
    """The key of an aggregator, and the public key of its agents."""

    own: KeyPair
    agents_public: bytes

    @classmethod
    def from_secret(cls, secret: bytes, job: str) -> ServerKeys:
        return cls(KeyPair.from_seed(derive(secret, "server")), KeyPair.from_seed(derive(secret, "agents", job)).public)

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Set a socket to encrypt and to ask a `Gate` for each admission; the socket must not listen yet."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.set(zmq.ZAP_DOMAIN, DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate no peer is admitted; ZeroMQ's default admits all peers


class Gate:
    """Answers ZeroMQ's requests for authentication (ZAP): only peers with the agents' key are admitted.

    A context has one gate, created before the socket that uses it.  The gate and this socket use the same poller.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._admitted_key = z85.decode(keys.agents_public)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.bind(_ZAP)

    def answer_requests(self) -> list[tuple[str, bool]]:
        """Answer all waiting peers; return each peer's address, and whether the peer was admitted."""
        answered = []
        for _ in range(_MAX_REQUESTS):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) < 5 or frames[2] != b"1.0":
                continue  # not a ZAP request; ZeroMQ sends only ZAP requests
            mechanism, key = (frames[7], frames[8]) if len(frames) == _FRAMES else (b"", b"")
            is_admitted = frames[4] == DOMAIN and mechanism == b"CURVE" and key == self._admitted_key
            answered.append((frames[5].decode(errors="replace").removeprefix("::ffff:"), is_admitted))
            status, text, user = (b"200", b"OK", b"agent") if is_admitted else (b"400", b"not of this job", b"")
            self.socket.send_multipart([frames[0], b"", b"1.0", frames[3], status, text, user, b""])
        return answered
