"""Admission of peers to an aggregator: authenticates peers, counts rejected peers, handles descriptor exhaustion."""

from __future__ import annotations

import os
import resource

import zmq

from effllm.network.curve import Gate, ServerKeys
from effllm.network.intake import Intake
from effllm.network.transport import receive_event

_MAX_EVENTS = 1000  # limit for one call of `poll`; this many events take a few ms
_RETRY_EVERY_S = 1.0


class PeerAdmission:
    """Admission of the connections of one listening socket.

    Args:
        context: the aggregator's context; its socket is made after this object.
        keys: the job's keys; without keys every peer is admitted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None) -> None:
        self._gate = Gate(context, keys) if keys else None
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.set(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's own thread
        self.sockets = [self._monitor, *([self._gate.socket] if self._gate else [])]  # `poll` handles their messages
        self._watched: zmq.Socket[bytes] | None = None
        self._intake: Intake | None = None
        self._retry_at_s = 0.0
        self._accept_error = 0  # errno of the first connection that could not be accepted
        self._rejected = 0

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        """Monitor a socket, which already listens on a port."""
        # The protocol of a handshake fails if the peer has no key, or another server's; the gate rejects other keys.
        failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self._gate else 0
        address = f"inproc://peer-admission-{id(self):x}"
        listening.monitor(address, zmq.EVENT_ACCEPT_FAILED | failed)
        self._monitor.connect(address)
        endpoint = listening.get(zmq.LAST_ENDPOINT)
        port = bytes(endpoint).rstrip(b"\0").rpartition(b":")[2] if isinstance(endpoint, bytes) else b""
        self._watched, self._intake = listening, Intake(int(port or 0))

    def poll(self, now_s: float) -> list[str]:
        """Admit or reject the waiting peers, and return the lines to report."""
        lines = []
        rejected = [address for address, is_admitted in (self._gate.answer() if self._gate else ()) if not is_admitted]
        for _ in range(_MAX_EVENTS):
            if not self._monitor.poll(0):
                break
            event, value = receive_event(self._monitor)
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                rejected.append("an unknown address")
            elif event == zmq.EVENT_ACCEPT_FAILED:
                if not self._accept_error:
                    self._accept_error, limit = value, resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                    reason = f"{os.strerror(value)}; the limit of open files (ulimit -n) is {limit}"
                    lines.append(f"no further rank can connect: {reason}")
                self._hold(now_s)
        if rejected and not self._rejected:
            lines.append(
                f"a peer at {rejected[0]} was rejected: it does not have the job's key; further peers are counted"
            )
        self._rejected += len(rejected)
        if self._intake is not None and self._intake.is_held and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            self._intake.resume()
        return lines

    @property
    def counts(self) -> dict[str, int]:
        return {"unauthenticated": self._rejected} if self._rejected else {}

    def close(self) -> None:
        """Close the sockets of authentication and monitoring; the watched socket stays open."""
        if self._watched is not None:
            self._watched.disable_monitor()
        if self._intake is not None:
            self._intake.close()
        for socket in self.sockets:
            socket.close()

    def _hold(self, now_s: float) -> None:
        """Accept no connections for a second, because ZeroMQ retries a failed accept 100,000 times a second."""
        if self._watched is None or self._intake is None or self._intake.is_held:
            return  # an event that is older than the pause
        self._retry_at_s = now_s + _RETRY_EVERY_S
        if not self._intake.hold():
            self._watched.disable_monitor()  # the events would fill the memory
            self._intake = None
