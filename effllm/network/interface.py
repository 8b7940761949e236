"""The address under which other hosts of a job reach this host, never a wildcard.  Standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

_ANY_PORT = 9  # nothing is sent to this port
_REMOTE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation: only a default route leads to them
_SIOCGIFADDR = 0x8915
_INET6 = Path("/proc/net/if_inet6")


def is_loopback(address: str) -> bool:
    """Whether an address is loopback, which other hosts cannot reach."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def loopback_address() -> str:
    """Return the loopback address of this host, IPv4 if possible; empty if the interface is down."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError):
            return _source_address(family, (address, _ANY_PORT))  # a bind would succeed even if the interface is down
    return ""


def is_wildcard(address: str) -> bool:
    """Whether an address is a wildcard, which means every interface of the host."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_unspecified
    except ValueError:
        return address in ("", "*")


def endpoint(address: str, port: int) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def address_towards(host: str) -> str:
    """Return this host's address on the route to ``host``, which may be this host; empty if all routes use loopback.

    Raises:
        OSError: the host's name is unknown, or no route exists.
    """
    candidates = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    error: OSError | None = None
    for family, _, _, _, address in candidates:
        try:
            own = _source_address(family, address)
        except OSError as failed:
            error = failed
            continue
        error = None
        if _is_usable(own):
            return own
    if error is not None:
        raise error
    return ""


def address_on_default_route() -> str:
    """Return this host's address on the default route; empty without a default route."""
    for family, address in zip((socket.AF_INET, socket.AF_INET6), _REMOTE, strict=True):
        with contextlib.suppress(OSError):
            if _is_usable(own := _source_address(family, (address, _ANY_PORT))):
                return own
    return ""


def address_of(name: str) -> str:
    """Return the address of an interface, or a given address unchanged; empty for an unknown interface."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return next(_usable_addresses(name), "")


def interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def is_on_this_host(name: str) -> bool:
    """Whether this host has an interface of this name, or this address."""
    address = address_of(name)
    if not address:
        return False
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))  # succeeds only for an address of this host
        except OSError:
            return False
    return True


def _source_address(family: int, remote: tuple[object, ...]) -> str:  # this host's address on the route to `remote`
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(remote)  # sends nothing
        return str(probe.getsockname()[0])


def _is_usable(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)


def _usable_addresses(name: str) -> Iterator[str]:
    """Yield the addresses of an interface, IPv4 first, without link-local addresses: other hosts cannot use these."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            ifreq = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            yield socket.inet_ntoa(ifreq[20:24])  # see netdevice(7): the name, then a sockaddr_in with the address
        except OSError:
            pass
    try:
        lines = _INET6.read_text().splitlines()
    except OSError:
        return
    for digits, *_, interface in map(str.split, lines):
        address = str(ipaddress.ip_address(bytes.fromhex(digits)))
        if interface == name and _is_usable(address):
            yield address
