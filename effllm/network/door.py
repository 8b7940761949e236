"""Admission of peers to an aggregator: authenticates them, reports rejected ones, detects descriptor exhaustion."""

from __future__ import annotations

import os
import resource

import zmq

from effllm.network.connections import Connections
from effllm.network.curve import Gate, ServerKeys
from effllm.network.rejections import OTHER_JOB, Rejections


class Door:
    """Everything about connections that is not a message.

    Args:
        context: the aggregator's; its door is made before its socket.
        keys: of the job; without them everybody is let in.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None) -> None:
        self._rejections = Rejections()
        self._gate = Gate(context, keys) if keys else None
        self._connections: Connections | None = None
        self._waited_on: list[zmq.Socket[bytes]] = []
        self._told_of_descriptors = False

    def watch(self, listening: zmq.Socket[bytes]) -> None:
        """Watch a socket that listens."""
        self._connections = Connections(listening, self._rejections if self._gate else None)

    def wait_with(self, poller: zmq.Poller) -> None:
        """Have a poller wake up for what happens at the door; to be called before each poll."""
        sockets = [one.socket for one in (self._gate, self._connections) if one is not None and one.socket is not None]
        for socket in self._waited_on:
            if socket not in sockets:
                poller.unregister(socket)
        for socket in sockets:
            if socket not in self._waited_on:
                poller.register(socket, zmq.POLLIN)
        self._waited_on = sockets

    def look(self, now_s: float) -> list[str]:
        """Admit or reject the peers that wait, and return the lines to report."""
        answers = self._gate.answer() if self._gate else []  # before the ends of the same connections
        for address, is_admitted in answers:
            if is_admitted:
                self._rejections.admit(address)
            else:
                self._rejections.reject(address, OTHER_JOB)
        if self._connections:
            self._connections.decided += len(answers)
            self._connections.look(now_s)
        lines = self._rejections.take()
        if self._connections and self._connections.accept_error and not self._told_of_descriptors:
            self._told_of_descriptors = True
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            reason = os.strerror(self._connections.accept_error)
            lines.append(f"no further rank can connect: {reason}; the limit of open files (ulimit -n) is {most}")
        return lines

    def take_repeated(self) -> int:
        """Return how many connections were rejected since the last call without a line of their own."""
        return self._rejections.take_repeated()

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were rejected, by the name of the count."""
        return {"strangers": self._rejections.count} if self._rejections.count else {}

    def close(self) -> None:
        """Close what belongs to the door; the socket that it watched is still open."""
        if self._connections:
            self._connections.close()
        if self._gate:
            self._gate.close()
