"""Admission of peers to an aggregator: authenticates peers, counts rejected peers, handles descriptor exhaustion."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import resource
import select
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

import zmq

from effllm.network.curve import Gate, ServerKeys
from effllm.network.transport import receive_event

RESERVED = 16  # a window and its summary need six open files at once
_FIND_TIMEOUT_S = 1.0
_MODIFY = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event, packed on x86_64 only
_ENTRY = re.compile(r"^tfd:\s+(\d+) events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)", re.MULTILINE)
_MAX_EVENTS = 1000  # limit for one call of `admit_waiting_peers`; this many events take a few ms
_RETRY_EVERY_S = 1.0


class _Entry(NamedTuple):  # of a socket in an epoll of libzmq
    epoll: int  # descriptor of the epoll
    descriptor: int  # of the socket
    events: int  # for which the epoll waits
    data: int  # data of libzmq


class Intake:
    """Pauses and resumes the acceptance of connections by ZeroMQ's listening socket on a port.

    libzmq cannot pause acceptance.  When accept fails because no descriptor is free, libzmq polls its epoll at once,
    which reports the same connection again: this takes 0.77 of a core, and no file can be opened, until a descriptor is
    free.  An unbind would end all accepted connections, because they are children of the socket.  So the events in the
    socket's entry in libzmq's epoll (a descriptor of this process) are removed, and restored later.  The entry's data
    is read from /proc/self/fdinfo and kept.  Peers that connect during the pause wait in the kernel's queue.
    """

    def __init__(self, port: int) -> None:
        self._reserved: list[int] = []  # descriptors
        self._epoll_ctl = ctypes.CDLL(None, use_errno=True).epoll_ctl
        self.is_paused = False
        deadline_s = time.monotonic() + _FIND_TIMEOUT_S
        # ZeroMQ's own thread makes the entry shortly after the bind.
        while (entry := _epoll_entry_of(port)) is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        self._entry = entry
        self._reserve_descriptors()

    def pause(self) -> bool:
        """Accept no connections, and release the reserved descriptors for files; ``False`` if this is not possible."""
        self.is_paused = self._set_events(0)
        self.close()
        return self.is_paused

    def resume(self) -> None:
        """Accept connections again, also those that wait in the kernel's queue, if descriptors are free."""
        if self._entry is not None and self._reserve_descriptors() and self._set_events(self._entry.events):
            self.is_paused = False

    def close(self) -> None:
        """Release the reserved descriptors."""
        while self._reserved:
            os.close(self._reserved.pop())

    def _reserve_descriptors(self) -> bool:
        """Reserve all descriptors, or none and return ``False`` if no other descriptor would be free."""
        if self._reserved:
            return True
        try:
            self._reserved.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._reserved) <= RESERVED:  # one more, which is closed again, so that it is free
                self._reserved.append(os.dup(self._reserved[0]))
        except OSError:
            self.close()
            return False
        os.close(self._reserved.pop())
        return True

    def _set_events(self, events: int) -> bool:  # with 0, libzmq's epoll ignores the listening socket
        if self._entry is None:
            return False
        event = ctypes.create_string_buffer(struct.pack(_EVENT, events, self._entry.data))
        return bool(self._epoll_ctl(self._entry.epoll, _MODIFY, self._entry.descriptor, event) == 0)


def _epoll_entry_of(port: int) -> _Entry | None:
    """Return the entry of the socket that listens on a port; ``None`` if /proc does not list one such entry."""
    entries = []
    for path in Path("/proc/self/fdinfo").glob("*"):
        with contextlib.suppress(OSError):
            for descriptor, events, data in _ENTRY.findall(path.read_text()):
                if int(events, 16) & select.EPOLLIN and _listens(int(descriptor), port):
                    entries.append(_Entry(int(path.name), int(descriptor), int(events, 16), int(data, 16)))
    return entries[0] if len(entries) == 1 else None


def _listens(descriptor: int, port: int) -> bool:  # whether this is a socket that listens on the port
    try:
        listener = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # the descriptor is closed, or is no socket
        return False
    with listener, contextlib.suppress(OSError):
        if listener.family == socket.AF_UNIX or not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return bool(listener.getsockname()[1] == port)
    return False


class PeerAdmission:
    """Admission of the peers of a listening socket, which is made after this object; without keys, all are admitted."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None) -> None:
        self._gate = Gate(context, keys) if keys else None
        self._monitor: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._monitor.set(zmq.LINGER, 0)
        self._monitor.set(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's own thread
        self.sockets = [self._monitor, *([self._gate.socket] if self._gate else [])]  # read by `admit_waiting_peers`
        self._monitored: zmq.Socket[bytes] | None = None  # the listening socket
        self._intake: Intake | None = None
        self._retry_at_s = 0.0  # when a paused intake resumes
        self._accept_error = 0  # errno of the first connection that could not be accepted
        self._num_rejected = 0

    def monitor_socket(self, listening: zmq.Socket[bytes]) -> None:
        """Monitor a socket, which already listens on a port."""
        # The protocol of a handshake fails if the peer has no key, or another server's; the gate rejects other keys.
        handshake_failed = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if self._gate else 0
        address = f"inproc://peer-admission-{id(self):x}"
        listening.monitor(address, zmq.EVENT_ACCEPT_FAILED | handshake_failed)
        self._monitor.connect(address)
        endpoint = listening.get(zmq.LAST_ENDPOINT)
        port = bytes(endpoint).rstrip(b"\0").rpartition(b":")[2] if isinstance(endpoint, bytes) else b""
        self._monitored, self._intake = listening, Intake(int(port or 0))

    def admit_waiting_peers(self, now_s: float) -> list[str]:
        """Admit or reject the waiting peers, resume a pause that is over, and return the lines to report."""
        lines = []
        answered = self._gate.answer_requests() if self._gate else []
        rejected = [address for address, is_admitted in answered if not is_admitted]
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
                self._pause_intake(now_s)
        if rejected and not self._num_rejected:
            reason = "it does not have the job's key; further peers are counted"
            lines.append(f"a peer at {rejected[0]} was rejected: {reason}")
        self._num_rejected += len(rejected)
        if self._intake is not None and self._intake.is_paused and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + _RETRY_EVERY_S
            self._intake.resume()
        return lines

    @property
    def counts(self) -> dict[str, int]:  # by kind of event
        return {"unauthenticated": self._num_rejected} if self._num_rejected else {}

    def close(self) -> None:
        """Close the sockets of authentication and monitoring; the listening socket stays open."""
        if self._monitored is not None:
            self._monitored.disable_monitor()
        if self._intake is not None:
            self._intake.close()
        for own_socket in self.sockets:
            own_socket.close()

    def _pause_intake(self, now_s: float) -> None:
        """Accept no connections for a second, because ZeroMQ retries a failed accept 100,000 times a second."""
        if self._monitored is None or self._intake is None or self._intake.is_paused:
            return  # an event that is older than the pause
        self._retry_at_s = now_s + _RETRY_EVERY_S
        if not self._intake.pause():
            self._monitored.disable_monitor()  # the events would fill the memory
            self._intake = None
