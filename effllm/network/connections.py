"""The connections of a listening socket: whether they can be accepted, and which fail at the handshake, from where."""

from __future__ import annotations

import contextlib
import time

import zmq

from effllm.network.descriptors import Reserve
from effllm.network.hangups import Hangups
from effllm.network.intake import Intake
from effllm.network.monitor import receive_event
from effllm.network.strangers import NO_KEY, NO_PROTOCOL, OTHER_SECRET, Strangers

_MECHANISM_MISMATCH = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH of zmq.h, which pyzmq does not name
_MOST_EVENTS = 200  # between two looks at everything else: a few ms
_AGAIN_S = 1.0
_FOUND_WITHIN_S = 0.1
_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Connections:
    """Watches a socket that listens, by ZeroMQ's monitor.

    Args:
        watched: the socket, which listens already, so that its port is known.
        strangers: is told of handshakes that fail; without it they are not looked at.
    """

    def __init__(self, watched: zmq.Socket[bytes], strangers: Strangers | None = None) -> None:
        self._watched = watched
        self._strangers = strangers
        self._why = ""  # of the failure whose end comes next
        self.accept_error = 0  # errno of the first connection that could not be accepted
        self._hangups: Hangups | None = None
        if strangers is not None:
            with contextlib.suppress(OSError):  # a sandbox that does not tell: then addresses are not known
                self._hangups = Hangups(_port(watched))
        self._events = _HANDSHAKES if strangers is not None else 0
        self._again_s = 0.0
        self.socket: zmq.Socket[bytes] | None = None
        self._attach(self._events | zmq.EVENT_ACCEPT_FAILED)
        self._reserve = Reserve()
        self._reserve.take()
        self._intake = Intake(_port(watched))
        until_s = time.monotonic() + _FOUND_WITHIN_S
        while not self._intake.find() and time.monotonic() < until_s:
            time.sleep(0.001)

    def _attach(self, events: int) -> None:
        address = f"inproc://connections-{id(self):x}-{events:x}"
        self._watched.monitor(address, events)
        monitor: zmq.Socket[bytes] = self._watched.context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.set(zmq.RCVHWM, 0)  # a full one would hold ZeroMQ's own thread
        monitor.connect(address)
        self.socket = monitor

    def look(self, now_s: float) -> None:
        """Take what has happened since the last call; the socket to wait on may be another after it, or none."""
        if self._intake.is_held and now_s >= self._again_s:
            self._again_s = now_s + _AGAIN_S
            if self._reserve.take():
                self._intake.resume()
        if self.socket is None and self._events and now_s >= self._again_s:
            self._again_s = now_s + _AGAIN_S
            with contextlib.suppress(zmq.ZMQError):  # still no descriptors
                self._attach(self._events)
        for _ in range(_MOST_EVENTS):
            if self.socket is None or not self.socket.poll(0):
                break
            self._take(*receive_event(self.socket), now_s)
        if self._hangups and self._strangers:
            for address in self._hangups.take():
                self._strangers.hang_up(address, now_s)

    def _take(self, event: int, value: int, now_s: float) -> None:
        if event == zmq.EVENT_ACCEPT_FAILED:
            self.accept_error = self.accept_error or value
            self._hold(now_s)
        elif self._strangers is None:
            return
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._why = NO_KEY if value == _MECHANISM_MISMATCH else OTHER_SECRET
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._why = NO_PROTOCOL
        elif event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_HANDSHAKE_FAILED_AUTH):
            self._strangers.account()
        elif self._why:  # of a handshake that fails, ZeroMQ's thread tells first why, and at once the end
            self._strangers.fail(self._why, now_s)
            self._why = ""
        else:
            self._strangers.end(now_s)

    def _hold(self, now_s: float) -> None:
        """Have nobody taken in for a second: what cannot be taken in is tried a hundred thousand times a second."""
        if self._intake.is_held:
            return  # of before it was
        is_held = self._intake.hold()
        self._reserve.release()  # for files
        if not is_held and not (self._intake.find() and self._intake.hold()):
            self._detach()
        self._again_s = now_s + _AGAIN_S

    def _detach(self) -> None:
        self._watched.disable_monitor()
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def close(self) -> None:
        """Look no more."""
        self._reserve.release()
        self._detach()
        if self._hangups:
            self._hangups.close()


def _port(listening: zmq.Socket[bytes]) -> int:
    address = listening.get(zmq.LAST_ENDPOINT)
    return int(bytes(address).rstrip(b"\0").rpartition(b":")[2]) if isinstance(address, bytes) else 0
