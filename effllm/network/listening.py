"""The address and the socket on which rank 0 listens, and the limit of open files: each connection takes one file.

Standard library only.
"""

from __future__ import annotations

import contextlib
import resource
import socket

from effllm.config.place import Place
from effllm.config.settings import Config
from effllm.network import interface

BACKLOG = 4096  # 4000 agents reconnect at once when an aggregator is replaced
_PORT_TAKEN = (98, 13)  # EADDRINUSE; EACCES, below 1024
_UNLIMITED = resource.RLIM_INFINITY
_MAX_OWN = 256  # open files for sinks, ZeroMQ, and connections before their handshake
_MIN_OWN = 96  # an aggregator of two ranks has 21 open files


class DiscoveryError(RuntimeError):
    """The aggregator cannot be found or cannot listen; the message is one line with the remedy."""


def own_address(place: Place, config: Config) -> str:
    """Return the address on which rank 0 listens: reachable from the other ranks, never a wildcard.

    Raises:
        DiscoveryError: no address is found; the message names the setting to use.
    """
    if place.one_host:
        # Settings are ignored here: without keys the aggregator listens on loopback only.
        if not (loopback := interface.loopback_address()):
            raise DiscoveryError(
                "the loopback interface of this host is down: `ip link set lo up` (as root) sets it up"
            )
        return loopback
    if config.interface:
        address = interface.address_of(config.interface)
        if not address:
            raise DiscoveryError(f"EFFICIENTLLM_INTERFACE={config.interface}: this host has no such interface")
        if interface.is_wildcard(address):
            raise DiscoveryError(f"EFFICIENTLLM_INTERFACE={config.interface} is every interface: name one interface")
        return address
    if place.master_addr:
        try:
            address = interface.address_towards(place.master_addr)
        except OSError as error:
            raise DiscoveryError(
                f"MASTER_ADDR={place.master_addr} cannot be reached ({error.strerror or error}): "
                "set EFFICIENTLLM_INTERFACE to the interface on which rank 0 must listen"
            ) from error
        if address:
            return address
    # Debian writes 127.0.1.1 into /etc/hosts, so the host's own name in MASTER_ADDR may resolve to loopback.
    address = interface.address_on_default_route()
    if not address:
        raise DiscoveryError(
            f"MASTER_ADDR={place.master_addr} leads to no address that other hosts can reach, and there is no default "
            "route: set EFFICIENTLLM_INTERFACE to the interface on which rank 0 must listen"
        )
    return address


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on a port; 0 means any free port.

    Raises:
        OSError: the address is not this host's, or the port is in use.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port:  # the kernel may still be closing connections of an earlier aggregator on this port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        # Accepted connections inherit this option, so the next aggregator can listen here before all connections
        # are closed.  The option is set after bind.  If it were set before bind, port 0 could get a port on which
        # another process will listen.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {interface.endpoint(address, port)}: {error.strerror}") from error
    return listener


def listen_within(address: str, ports: str) -> socket.socket:
    """Return a socket that listens on the first free port of ``lo-hi``, or on any free port for an empty range.

    Raises:
        DiscoveryError: all ports of the range are in use.
        OSError: the address is not this host's.
    """
    if not ports:
        return listen(address)
    low, _, high = ports.partition("-")
    for port in range(int(low), int(high) + 1):
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno not in _PORT_TAKEN:
                raise
    raise DiscoveryError(f"no port of EFFICIENTLLM_PORTS={ports} is free on {address}")


def num_open_files_needed(peers: int) -> int:
    """Return the number of open files that an aggregator needs.

    Each peer needs one file, reconnections need a fifth more, and the aggregator has up to 256 other files.
    """
    return peers + -(-peers // 5) + min(_MAX_OWN, _MIN_OWN + peers)


def open_files_remedy(peers: int) -> str:
    """Return the remedy if this process' limits are too low for an aggregator of ``peers``, else an empty text.

    A higher hard limit is tried and set back, because the caller is a trainer; the aggregator raises its own limits.
    """
    needed = num_open_files_needed(peers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == _UNLIMITED or hard >= needed:
        return ""
    remedy = raise_open_files_limit(needed)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return remedy


def raise_open_files_limit(needed: int = 0) -> str:
    """Raise the soft and, if permitted, the hard limit; return the remedy if it stays below ``needed``, else ""."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != _UNLIMITED and hard < needed:
        with contextlib.suppress(ValueError, OSError):  # not permitted, or beyond the kernel's own limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
            return ""
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    if soft == _UNLIMITED or soft >= needed:
        return ""
    return (
        f"{needed} open files are needed and {soft} are allowed: raise the hard limit, by ulimit -Hn {needed} in "
        f"the shell of root, nofile in /etc/security/limits.conf, or LimitNOFILE={needed} of the systemd service"
    )
