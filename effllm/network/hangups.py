"""Who was at the other end of connections that are over, as the kernel tells of every TCP socket that it destroys.

ZeroMQ's monitor names a connection by a descriptor, which is closed by the time one asks whose it was.  The kernel's
multicast groups of NETLINK_SOCK_DIAG (Linux 4.3, what ``ss -E`` listens to; open to every user) come with addresses.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import struct

_NETLINK_SOCK_DIAG = 4
_TCP_DESTROYED = 1 << 0 | 1 << 2  # SKNLGRP_INET_TCP_DESTROY and SKNLGRP_INET6_TCP_DESTROY of linux/sock_diag.h
_SO_ATTACH_FILTER = 26
_FAMILY_AT, _PORT_AT, _PEER_AT = 16, 20, 40  # of struct inet_diag_msg behind struct nlmsghdr
_LEAST_BYTES = 56
_MOST = 500  # between two looks at everything else: a few ms
_LOAD_HALF, _JUMP_IF_EQUAL, _RETURN = 0x28, 0x15, 0x06  # of classic BPF


class Hangups:
    """Listens to the end of connections to one local port.

    Raises:
        OSError: this kernel, or the sandbox, does not tell.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        try:
            self._keep_to(port)
            self._socket.setblocking(False)
            self._socket.bind((0, _TCP_DESTROYED))
        except OSError:
            self._socket.close()
            raise

    def _keep_to(self, port: int) -> None:
        # In the kernel, as other processes' connections may end a thousand times a second.
        program = (
            struct.pack("HBBI", _LOAD_HALF, 0, 0, _PORT_AT)
            + struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, port)
            + struct.pack("HBBI", _RETURN, 0, 0, 0xFFFF)
            + struct.pack("HBBI", _RETURN, 0, 0, 0)
        )
        buffer = ctypes.create_string_buffer(program, len(program))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 4, ctypes.addressof(buffer)))

    def take(self) -> list[str]:
        """Return the addresses of those whose connections have ended since the last call, in order."""
        addresses = []
        for _ in range(_MOST):
            try:
                message = self._socket.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                continue  # ENOBUFS: some were lost, which is counted nowhere else than in what stays nameless
            if len(message) >= _LEAST_BYTES:
                num_bytes = 4 if message[_FAMILY_AT] == socket.AF_INET else 16
                address = ipaddress.ip_address(message[_PEER_AT : _PEER_AT + num_bytes])
                addresses.append(str(getattr(address, "ipv4_mapped", None) or address))
        return addresses

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
