"""The socket between a training process and its agent: it wakes the agent, and carries the report that it measures.

Standard library only.
"""

from __future__ import annotations

import os
import socket

# Not `socket.socketpair`: eventlet and gevent replace it, and their sockets may switch to another green thread.
from _socket import socketpair


class Waker:
    """The trainer's end of the socket.

    The script may close all descriptors and open files with their numbers, as a daemon does.  So the socket's inode is
    compared before each use of the number; an eventfd could not be recognised, because all eventfds have one inode.
    """

    __slots__ = ("_first_inode", "_socket", "agents_end")

    def __init__(self) -> None:
        self._socket, other = socketpair()
        self._socket.setblocking(False)
        self.agents_end = other.detach()  #: descriptor for the agent, until `close_agents_end`
        self._first_inode = self._inode()

    def _inode(self) -> tuple[int, int]:
        status = os.fstat(self._socket.fileno())
        return status.st_dev, status.st_ino

    def close_agents_end(self) -> None:
        """Close this process's copy of the agent's end: then the agent's death ends `wait_for_agent_end`."""
        if self.agents_end >= 0:
            os.close(self.agents_end)
            self.agents_end = -1

    def wait_for_agent_end(self, limit_s: float) -> bool:
        """Wait until the agent measures, ends, or the time is over; return whether it has ended."""
        # Not `select.poll`, which eventlet removes.
        self._socket.settimeout(limit_s)
        try:
            return not self._socket.recv(1)
        except TimeoutError:
            return False
        except OSError:
            return True
        finally:
            self._socket.setblocking(False)

    def wake(self) -> None:
        """Wake the agent, without waiting."""
        try:
            if self._inode() == self._first_inode:
                # Without MSG_NOSIGNAL, a script with the default SIGPIPE would be killed after the agent's death.
                self._socket.send(b"\1", socket.MSG_NOSIGNAL)
        except OSError:  # closed by the script, or no agent, or a full socket: the agent is awake
            pass

    def close(self) -> None:
        """Close the socket, if its number is still that of the socket."""
        self.close_agents_end()
        try:
            if self._inode() == self._first_inode:
                self._socket.close()
        except OSError:
            pass
        self._socket.detach()
