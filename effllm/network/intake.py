"""Pauses ZeroMQ's acceptance of connections while no descriptor is free, and keeps some descriptors for files.

libzmq cannot pause acceptance.  When accept fails because no descriptor is free, libzmq polls its epoll at once, which
reports the same connection again: this takes 0.77 of a core, and no file can be opened, until a descriptor is free.  An
unbind would end all accepted connections, because they are children of the socket.  So the events in the socket's entry
in libzmq's epoll (a descriptor of this process) are removed, and restored later.  The entry's data is read from
/proc/self/fdinfo and kept.  Peers that connect during the pause wait in the kernel's queue.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import select
import socket
import struct
import time
from pathlib import Path
from typing import NamedTuple

RESERVED = 16  # a window and its summary need six open files at once
_FIND_TIMEOUT_S = 1.0
_MODIFY = 3  # EPOLL_CTL_MOD
_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"  # struct epoll_event, packed on x86_64 only
_ENTRY = re.compile(r"^tfd:\s+(\d+) events:\s+([0-9a-f]+) data:\s+([0-9a-f]+)", re.MULTILINE)


class _Entry(NamedTuple):
    epoll: int
    descriptor: int
    events: int
    data: int  # data of libzmq


class Intake:
    """Pauses and resumes the acceptance of connections by ZeroMQ's listening socket on a port."""

    def __init__(self, port: int) -> None:
        self._reserved: list[int] = []
        self._control = ctypes.CDLL(None, use_errno=True).epoll_ctl
        self.is_held = False
        until_s = time.monotonic() + _FIND_TIMEOUT_S
        # ZeroMQ's own thread makes the entry shortly after the bind.
        while (entry := _entry_of(port)) is None and time.monotonic() < until_s:
            time.sleep(0.001)
        self._entry = entry
        self._reserve()

    def hold(self) -> bool:
        """Accept no connections, and release the reserved descriptors for files; ``False`` if this is not possible."""
        self.is_held = self._set(0)
        self.close()
        return self.is_held

    def resume(self) -> None:
        """Accept connections again, also those that wait in the kernel's queue, if descriptors are free."""
        if self._entry is not None and self._reserve() and self._set(self._entry.events):
            self.is_held = False

    def close(self) -> None:
        """Release the reserved descriptors."""
        while self._reserved:
            os.close(self._reserved.pop())

    def _reserve(self) -> bool:
        """Reserve all descriptors, or none and return ``False`` if no other descriptor would be free."""
        if self._reserved:
            return True
        try:
            self._reserved.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            while len(self._reserved) <= RESERVED:
                self._reserved.append(os.dup(self._reserved[0]))
        except OSError:
            self.close()
            return False
        os.close(self._reserved.pop())
        return True

    def _set(self, events: int) -> bool:
        if self._entry is None:
            return False
        event = ctypes.create_string_buffer(struct.pack(_EVENT, events, self._entry.data))
        return bool(self._control(self._entry.epoll, _MODIFY, self._entry.descriptor, event) == 0)


def _entry_of(port: int) -> _Entry | None:
    """Return the entry of the socket that listens on a port; ``None`` if /proc does not list one such entry."""
    found = []
    for path in Path("/proc/self/fdinfo").glob("*"):
        with contextlib.suppress(OSError):
            for descriptor, events, data in _ENTRY.findall(path.read_text()):
                if int(events, 16) & select.EPOLLIN and _listens(int(descriptor), port):
                    found.append(_Entry(int(path.name), int(descriptor), int(events, 16), int(data, 16)))
    return found[0] if len(found) == 1 else None


def _listens(descriptor: int, port: int) -> bool:
    try:
        one = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # the descriptor is closed, or is no socket
        return False
    with one, contextlib.suppress(OSError):
        is_listening = one.family != socket.AF_UNIX and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(is_listening) and one.getsockname()[1] == port
    return False
