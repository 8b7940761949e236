"""Monitors the connections of a listening socket: failed handshakes with their addresses, exhausted descriptors."""

from __future__ import annotations

import contextlib
import socket
import time

import zmq

from effllm.network.descriptors import Reserve
from effllm.network.intake import Intake
from effllm.network.rejections import NO_KEY, NO_PROTOCOL, OTHER_SECRET, Rejections
from effllm.network.transport import receive_event

_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH of zmq.h, missing in pyzmq
_MAX_EVENTS = 200  # limit for one call of `poll`; this many events take a few ms
_RETRY_EVERY_S = 1.0
_FIND_TIMEOUT_S = 0.1
_HANDSHAKES = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


class Connections:
    """Monitors the connections of a listening socket with a ZeroMQ monitor.

    Args:
        watched: the socket, which already listens on a port.
        rejections: counts failed handshakes; with ``None`` handshakes are not monitored.
    """

    def __init__(self, watched: zmq.Socket[bytes], rejections: Rejections | None = None) -> None:
        self._watched = watched
        self._rejections = rejections
        self._events = _HANDSHAKES if rejections is not None else 0
        self._addresses: dict[int, str] = {}  # by descriptor
        self._unread: list[tuple[int, int]] = []
        self._why = ""  # reason of the last failed handshake, until its disconnection is reported
        self.decided = 0  # number of open connections that the gate has admitted or rejected
        self.accept_error = 0  # errno of the first connection that could not be accepted
        self._retry_at_s = 0.0
        self.socket: zmq.Socket[bytes] | None = None
        self._attach(self._events | zmq.EVENT_ACCEPT_FAILED)
        self._reserve = Reserve()
        self._reserve.take()
        self._intake = Intake(_port(watched))
        until_s = time.monotonic() + _FIND_TIMEOUT_S
        while not self._intake.find() and time.monotonic() < until_s:
            time.sleep(0.001)

    def _attach(self, events: int) -> None:
        address = f"inproc://connections-{id(self):x}-{events:x}"
        self._watched.monitor(address, events)
        monitor: zmq.Socket[bytes] = self._watched.context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.set(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's own thread
        monitor.connect(address)
        self.socket = monitor

    def poll(self, now_s: float) -> None:
        """Process the events since the last call; this may replace or remove `socket`."""
        if self._intake.is_held and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            if self._reserve.take():
                self._intake.resume()
        if self.socket is None and self._events and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            with contextlib.suppress(zmq.ZMQError):  # all descriptors are still in use
                self._attach(self._events)
        taken = 0
        while taken < _MAX_EVENTS and (events := self._unread or self._receive()):
            taken += len(events)
            found = {value: _peer_address(value) for event, value in events if event == zmq.EVENT_ACCEPTED}
            # ZeroMQ reports a disconnection before it closes the descriptor.  Until then the descriptor's
            # address is that of this connection.
            self._unread = self._receive()
            for event, value in events:
                self._take(event, value, now_s)
            again = {value for event, value in self._unread if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED)}
            ended = {value for event, value in events if event == zmq.EVENT_DISCONNECTED}
            self._addresses.update((one, address) for one, address in found.items() if one not in again | ended)

    def _receive(self) -> list[tuple[int, int]]:
        events: list[tuple[int, int]] = []
        while self.socket is not None and len(events) < _MAX_EVENTS and self.socket.poll(0):
            events.append(receive_event(self.socket))
        return events

    def _take(self, event: int, value: int, now_s: float) -> None:
        if event == zmq.EVENT_ACCEPT_FAILED:
            self.accept_error = self.accept_error or value
            self._hold(now_s)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._why = NO_KEY if value == _MECHANISM_MISMATCH else OTHER_SECRET
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._why = NO_PROTOCOL
        elif event == zmq.EVENT_DISCONNECTED and self._rejections is not None:
            address = self._addresses.pop(value, "")
            # ZeroMQ's thread reports the reason of a failed handshake first, and the disconnection directly afterwards.
            if self._why or not self.decided:  # 0: this connection ended before the gate's decision
                self._rejections.reject(address, self._why or NO_PROTOCOL)
                self._why = ""
            else:
                self.decided -= 1

    def _hold(self, now_s: float) -> None:
        """Accept no connections for a second, because ZeroMQ retries a failed accept 100,000 times a second."""
        if self._intake.is_held:
            return  # this event is older than the pause
        is_held = self._intake.hold()
        self._reserve.release()  # files may now use the reserved descriptors
        if not is_held and not (self._intake.find() and self._intake.hold()):
            self._detach()
        self._retry_at_s = now_s + _RETRY_EVERY_S

    def _detach(self) -> None:
        self._watched.disable_monitor()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def close(self) -> None:
        self._reserve.release()
        self._detach()


def _peer_address(descriptor: int) -> str:
    """Return the address of a connection's peer; empty if the connection has ended."""
    try:
        with socket.fromfd(descriptor, socket.AF_INET6, socket.SOCK_STREAM) as copy:
            name = copy.getpeername()
    except OSError:
        return ""
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else ""


def _port(listening: zmq.Socket[bytes]) -> int:
    address = listening.get(zmq.LAST_ENDPOINT)
    return int(bytes(address).rstrip(b"\0").rpartition(b":")[2]) if isinstance(address, bytes) else 0
