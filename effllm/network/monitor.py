"""The events of a monitored socket.  pyzmq's own reader imports asyncio, which takes a third of an agent's imports."""

from __future__ import annotations

import struct

import zmq

_EVENT = struct.Struct("=hi")  # zmq_socket_monitor(3); the endpoint is a second frame


def receive_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Return the next event of a monitor and its value, one of ``zmq.Event`` and its number; waits for it."""
    event, value = _EVENT.unpack(monitor.recv_multipart()[0])
    return event, value
