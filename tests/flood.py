"""Connect thousands of unauthenticated peers to a port: ``flood.py KIND PORT COUNT SECONDS [SERVER_KEY]``.

KIND: ``silent`` connects and sends nothing, ``garbage`` sends random bytes, ``null`` uses ZeroMQ without keys, ``key``
uses ZeroMQ with an unknown key. COUNT connections are open at a time; a connection that the other end closes is
replaced. The flood lasts at least SECONDS, and until COUNT connections were started (``key``: rejected), but at most
SECONDS + MAX_S. The program prints two numbers as JSON: the number of started connections, and the largest number of
open connections at one time.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import sys
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

#: A ZMTP 3.1 greeting with the mechanism NULL, and its READY command.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
AT_ONE_SOCKET = 100  # number of connections with keys per ROUTER socket
BATCH = 200  # number of connections that are started between two polls of the open connections
MAX_S = 120.0  # maximum time after SECONDS, because a busy machine may need long to start all connections


def first_bytes(kind: str) -> bytes:
    """Return the first bytes that a peer of this kind sends."""
    if kind == "garbage":
        return os.urandom(2000)
    return GREETING + READY if kind == "null" else b""


def flood(kind: str, port: int, count: int, seconds: float) -> dict[str, int]:
    """Keep `count` plain connections open for at least `seconds`, and until `count` connections were started."""
    selector, text = selectors.DefaultSelector(), first_bytes(kind)
    began = most = 0
    enough_s = time.monotonic() + seconds
    deadline_s = enough_s + MAX_S
    while time.monotonic() < (enough_s if began >= count else deadline_s):
        for _ in range(min(BATCH, count - len(selector.get_map()))):
            one = socket.socket()
            one.setblocking(False)
            if one.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS):
                one.close()
                break
            began += 1
            selector.register(one, selectors.EVENT_WRITE)
        most = max(most, len(selector.get_map()))
        for key, _ in selector.select(0.01):
            one = key.fileobj
            try:
                if key.events & selectors.EVENT_WRITE:
                    if text:
                        one.send(text)
                    selector.modify(one, selectors.EVENT_READ)
                elif not one.recv(4096):
                    raise ConnectionResetError
            except OSError:
                selector.unregister(one)
                one.close()
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    return {"began": began, "most": most}


def flood_with_keys(port: int, count: int, seconds: float, server_key: bytes) -> dict[str, int]:
    """Keep `count` connections with unknown keys open for at least `seconds`, and until `count` were rejected."""
    context = zmq.Context()
    peers, monitors = [], []
    for _ in range(0, count, AT_ONE_SOCKET):
        public, secret = zmq.curve_keypair()
        peer = context.socket(zmq.ROUTER)  # a ROUTER may connect to one address many times
        peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = server_key, public, secret
        peer.linger, peer.reconnect_ivl = 0, 500
        monitors.append(peer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH))
        peers.append(peer)
    for peer in peers:
        for _ in range(AT_ONE_SOCKET):
            peer.connect(f"tcp://127.0.0.1:{port}")
    rejected = 0
    enough_s = time.monotonic() + seconds
    deadline_s = enough_s + MAX_S
    while time.monotonic() < (enough_s if rejected >= count else deadline_s):
        for monitor in monitors:
            while monitor.poll(0):
                recv_monitor_message(monitor)
                rejected += 1
        time.sleep(0.05)
    for peer, monitor in zip(peers, monitors, strict=True):
        peer.disable_monitor()
        monitor.close(0)
    context.destroy(linger=0)
    return {"began": rejected, "most": len(peers) * AT_ONE_SOCKET}


if __name__ == "__main__":
    os.nice(19)  # low priority, because real peers run on other machines
    name, port, count, seconds, *rest = sys.argv[1:]
    if name == "key":
        done = flood_with_keys(int(port), int(count), float(seconds), rest[0].encode())
    else:
        done = flood(name, int(port), int(count), float(seconds))
    print(json.dumps(done))
