"""Strangers by the thousand at a port, until they are told to stop: ``flood.py KIND PORT COUNT SECONDS [SERVER_KEY]``.

KIND: ``silent`` connects and says nothing, ``garbage`` sends random bytes, ``null`` speaks ZeroMQ without keys, ``key``
speaks it with a key that nobody knows.  COUNT connections are kept open at once: for each that the other end closes
another one comes.  Prints how many there were, and the most at once, as JSON.
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

#: A ZMTP 3.1 greeting of the mechanism NULL, and its READY command.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
BATCH = 200  # connections begun between two looks at the others


def says(kind: str) -> bytes:
    """Return what a stranger of a kind says as soon as it is connected."""
    if kind == "garbage":
        return os.urandom(2000)
    return GREETING + READY if kind == "null" else b""


def flood(kind: str, port: int, count: int, seconds: float) -> dict[str, int]:
    """Keep so many plain connections open for so long."""
    selector, text = selectors.DefaultSelector(), says(kind)
    began = most = 0
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
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
    """Keep so many peers with keys of their own at it for so long."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 10)
    peers = []
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        if len(peers) < count:
            public, secret = zmq.curve_keypair()
            peer = context.socket(zmq.DEALER)
            peer.curve_serverkey, peer.curve_publickey, peer.curve_secretkey = server_key, public, secret
            peer.linger, peer.reconnect_ivl = 0, 500
            peer.connect(f"tcp://127.0.0.1:{port}")
            peers.append(peer)
        else:
            time.sleep(0.05)
    context.destroy(linger=0)
    return {"began": len(peers), "most": len(peers)}


if __name__ == "__main__":
    name, port, count, seconds, *rest = sys.argv[1:]
    if name == "key":
        done = flood_with_keys(int(port), int(count), float(seconds), rest[0].encode())
    else:
        done = flood(name, int(port), int(count), float(seconds))
    print(json.dumps(done))
