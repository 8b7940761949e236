"""Pauses the acceptance of connections on a listening socket of ZeroMQ while accept fails, and resumes it.

libzmq cannot pause acceptance.  When accept fails because no descriptor is free, libzmq polls its epoll at once,
which reports the same connection again: this takes 0.77 of a core until a descriptor is free.  An unbind would end
all accepted connections, because they are children of the socket.  So the events in the socket's entry in libzmq's
epoll (a descriptor of this process) are removed, and restored later.  The entry's data is read from /proc/self/fdinfo
and kept.  Peers that connect during the pause wait in the kernel's queue.
"""

from __future__ import annotations

import ctypes
import os
import platform
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MODIFY = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event, packed on x86_64 only
_DESCRIPTORS, _ABOUT = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


class _Entry(NamedTuple):
    epoll: int
    descriptor: int
    events: int
    data: int  # data of libzmq


class Intake:
    """Pauses and resumes the acceptance of connections by ZeroMQ's listening socket on a port."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._entry: _Entry | None = None
        self._control = ctypes.CDLL(None, use_errno=True).epoll_ctl
        self.is_held = False

    def find(self) -> bool:
        """Return whether the socket's entry exists; ZeroMQ's own thread creates the entry shortly after the bind."""
        if self._entry is None:
            found = [one for one in _entries() if one.events & select.EPOLLIN and _listens(one.descriptor, self._port)]
            self._entry = found[0] if len(found) == 1 else None
        return self._entry is not None

    def hold(self) -> bool:
        """Pause the acceptance of connections; ``False`` if this is not possible."""
        self.is_held = self.is_held or self._set(0)
        return self.is_held

    def resume(self) -> None:
        """Accept connections again, also those that wait in the kernel's queue."""
        if self.is_held and self._entry and self._set(self._entry.events):
            self.is_held = False

    def _set(self, events: int) -> bool:
        if self._entry is None:
            return False
        event = ctypes.create_string_buffer(struct.pack(_EVENT, events, self._entry.data))
        return bool(self._control(self._entry.epoll, _MODIFY, self._entry.descriptor, event) == 0)


def _entries() -> Iterator[_Entry]:
    """Yield the entries of this process's epolls; none if /proc does not list them."""
    try:
        numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]  # noqa: PTH208 - Path makes an object for each name
    except OSError:
        return
    for number in numbers:
        try:
            lines = (_ABOUT / str(number)).read_text().splitlines() if _is_epoll(number) else []
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[:1] == ["tfd:"] and words[2::2][:2] == ["events:", "data:"]:
                yield _Entry(number, int(words[1]), int(words[3], 16), int(words[5], 16))


def _is_epoll(number: int) -> bool:
    try:
        return (_DESCRIPTORS / str(number)).readlink().name == "anon_inode:[eventpoll]"
    except OSError:
        return False


def _listens(descriptor: int, port: int) -> bool:
    copy = -1
    try:
        copy = os.dup(descriptor)
        one = socket.socket(fileno=copy)
    except OSError:  # the descriptor is closed, or is no socket
        if copy >= 0:
            os.close(copy)
        return False
    with one:
        try:
            is_listening = one.family != socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return bool(is_listening) and one.getsockname()[1] == port
        except OSError:
            return False
