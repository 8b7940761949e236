"""Admission of peers to an aggregator: authenticates peers, reports rejected peers, detects descriptor exhaustion."""

from __future__ import annotations

import os
import resource

import zmq

from effllm.network.connections import Connections
from effllm.network.curve import Gate, ServerKeys
from effllm.network.rejections import OTHER_JOB, Rejections


class PeerAdmission:
    """Admission of the connections of one listening socket.

    Args:
        context: the aggregator's context; its socket is made after this object.
        keys: the job's keys; without keys every peer is admitted.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None) -> None:
        self._rejections = Rejections()
        self._gate = Gate(context, keys) if keys else None
        self._connections: Connections | None = None
        self._waited_on: list[zmq.Socket[bytes]] = []
        self._reported_descriptors = False

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        self._connections = Connections(listening, self._rejections if self._gate else None)

    def wait_with(self, poller: zmq.Poller) -> None:
        """Register the sockets of authentication and monitoring with a poller; call this before each poll."""
        sockets = [one.socket for one in (self._gate, self._connections) if one is not None and one.socket is not None]
        for socket in self._waited_on:
            if socket not in sockets:
                poller.unregister(socket)
        for socket in sockets:
            if socket not in self._waited_on:
                poller.register(socket, zmq.POLLIN)
        self._waited_on = sockets

    def poll(self, now_s: float) -> list[str]:
        """Admit or reject the waiting peers, and return the lines to report."""
        answers = self._gate.answer() if self._gate else []  # the gate decides before disconnections are processed
        for address, is_admitted in answers:
            if is_admitted:
                self._rejections.admit(address)
            else:
                self._rejections.reject(address, OTHER_JOB)
        if self._connections:
            self._connections.decided += len(answers)
            self._connections.poll(now_s)
        lines = self._rejections.take()
        if self._connections and self._connections.accept_error and not self._reported_descriptors:
            self._reported_descriptors = True
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = os.strerror(self._connections.accept_error)
            lines.append(f"no further rank can connect: {reason}; the limit of open files (ulimit -n) is {limit}")
        return lines

    def take_repeated(self) -> int:
        return self._rejections.take_repeated()

    @property
    def counts(self) -> dict[str, int]:
        return {"unauthenticated": self._rejections.count} if self._rejections.count else {}

    def close(self) -> None:
        """Close the sockets of authentication and monitoring; the watched socket stays open."""
        if self._connections:
            self._connections.close()
        if self._gate:
            self._gate.close()
