"""Forwards frames between two interfaces with a delay, and drops a share of the frames, like the kernel module
sch_netem.

``slow_wire.py NEAR FAR DELAY_S LOSS``; prints "ready" when it forwards frames, and runs until it is killed.
"""

import random
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
MAX_BYTES = 70_000  # segmentation offload makes frames of up to 64 kB

near, far, delay_s, loss = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])


def opened(interface):
    """Return a socket for all frames of an interface, also for frames without a checksum (checksum offload)."""
    frames = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
    frames.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)  # a header marks frames without a checksum, in both directions
    frames.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    frames.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 * 1024 * 1024)
    frames.bind((interface, 0))
    frames.setblocking(False)
    return frames


ends = opened(near), opened(far)
others = dict(zip(ends, reversed(ends), strict=True))
waiting = deque()  # (time, destination, frame), in order, because all frames have the same delay
print("ready", flush=True)
while True:
    timeout_s = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
    for end in select.select(ends, [], [], timeout_s)[0]:
        while True:
            try:
                frame = end.recv(MAX_BYTES)
            except BlockingIOError:
                break
            if random.random() >= loss:
                waiting.append((time.monotonic() + delay_s, others[end], frame))
    while waiting and waiting[0][0] <= time.monotonic():
        _, end, frame = waiting.popleft()
        try:
            end.send(frame)
        except OSError:  # no buffer space (the frame is lost), or the interface is being removed
            continue
