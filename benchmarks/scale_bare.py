"""The reference for the aggregator: a loop that only receives and decodes every frame, with pyzmq and msgspec."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
import zmq

from effllm.config.spawn import spawn
from effllm.network import listening, secret
from effllm.network.curve import Gate, ServerKeys
from effllm.network.listening import raise_open_files_limit
from effllm.network.transport import ServerSocket, decode_from_agent, encode, make_context
from effllm.records.wire import Ack, Bye, ByeSeen, Hello, Welcome

EVERYTHING = 2**61  # a sequence number that acknowledges all reports


class Bare:
    """Runs the loop in a separate process.

    Args:
        secret_file: file of the keys' secret; empty without keys.
    """

    def __init__(self, secret_file: str) -> None:
        listener = listening.listen("127.0.0.1")
        self.folder = Path(os.devnull)  # the loop writes nothing
        self.endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        arguments = json.dumps([self.endpoint, listener.fileno(), secret_file, os.getpid()])
        self.process = spawn("benchmarks.scale_bare", [arguments], [listener.fileno()])
        listener.close()
        self.psutil_process = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        times = self.psutil_process.cpu_times()
        return float(times.user + times.system)

    def close(self, is_waited_for: bool) -> None:  # noqa: ARG002
        self.process.kill()
        self.process.wait()


def main(arguments: list[str]) -> None:
    """Serve on the socket with this descriptor until the benchmark ends."""
    endpoint, descriptor, secret_file, parent = json.loads(arguments[0])
    raise_open_files_limit()
    context = make_context()
    keys = ServerKeys.from_secret(secret.read(Path(secret_file)), "") if secret_file else None
    gate = Gate(context, keys) if keys else None
    server = ServerSocket(context, keys)
    server.listen(endpoint, descriptor)
    socket, poller = server.socket, zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    if gate:
        poller.register(gate.socket, zmq.POLLIN)
    while os.getppid() == parent:
        poller.poll(500)
        if gate:
            gate.answer_requests()
        try:
            while True:
                peer, frame = socket.recv_multipart(zmq.NOBLOCK)
                message = decode_from_agent(frame)
                if isinstance(message, Hello):
                    socket.send_multipart((peer, encode(Welcome(1))))
                elif isinstance(message, Bye):
                    socket.send_multipart((peer, encode(Ack(EVERYTHING))))
                    socket.send_multipart((peer, encode(ByeSeen(message.rank))))
        except zmq.Again:
            pass


if __name__ == "__main__":
    main(sys.argv[1:])
