"""Clocks compared over real sockets: the true offset is within the reported error, for any delays."""

import contextlib
import random
import socket
import threading
import time

import pytest

from effllm.job.health.clock import MAX_EXCHANGES, Exchanges
from effllm.network.transport import AgentLink, ServerSocket, decode_from_agent, make_context
from effllm.records.wire import Clock, Heartbeat

pytestmark = pytest.mark.faults

SHIFT_NS = 3_600 * 10**9  # an hour, as between hosts that booted at different times


class Way:
    """A TCP proxy that delays data; each direction has its own delay function."""

    def __init__(self, port, there_s, back_s):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target, self._delays = port, (there_s, back_s)
        self._threads, self._ends = [], []
        self._spawn(self._accept)

    def _spawn(self, work, *arguments):
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self):
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", self._target))
        self._ends = [client, server]
        self._spawn(self._pass, client, server, self._delays[0])
        self._spawn(self._pass, server, client, self._delays[1])

    def _pass(self, source, target, delay_s):
        try:
            while data := source.recv(65536):
                time.sleep(delay_s())
                target.sendall(data)
        except OSError:
            pass

    def close(self):
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)


def exchanged(there_s, back_s, count=MAX_EXCHANGES):
    """Return the estimate after `count` exchanges with an aggregator whose clock is an hour ahead."""
    context = make_context()
    server = ServerSocket(context)
    address = server.listen("tcp://127.0.0.1:*")
    way = Way(int(address.rpartition(":")[2]), there_s, back_s)
    link = AgentLink(context, f"tcp://127.0.0.1:{way.port}")
    link.connect()
    clocks, answered = Exchanges(1), 0
    deadline_s = time.monotonic() + 30
    try:
        while answered < count:
            assert time.monotonic() < deadline_s
            link.is_new()
            if not link.send(Heartbeat("agent", 0, 1, "", 0.0, sent_ns=clocks.ask(time.monotonic_ns()))):
                time.sleep(0.01)
                continue
            assert server.socket.poll(10_000)
            peer, frame = server.receive()
            now_ns = time.monotonic_ns() + SHIFT_NS
            server.send(peer, Clock(decode_from_agent(frame).sent_ns, now_ns, now_ns))
            assert link.socket.poll(10_000)
            for clock in link.receive():
                answered += clocks.add(clock.sent_ns, clock.received_ns, clock.answered_ns, time.monotonic_ns())
        return clocks.offset(time.monotonic_ns())
    finally:
        link.close()
        server.close()
        context.destroy(linger=0)
        way.close()


WAYS = {
    "at once": (lambda luck: 0.0, lambda luck: 0.0),
    "jitter": (lambda luck: luck.expovariate(300), lambda luck: luck.expovariate(300)),
    "unequal": (lambda luck: 0.012, lambda luck: 0.001),
    "unequal with jitter": (lambda luck: 0.004 + luck.expovariate(500), lambda luck: luck.expovariate(500)),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", WAYS)
def test_true_offset_is_within_the_reported_error(way, seed):
    luck = random.Random(seed)
    there, back = WAYS[way]

    offset = exchanged(lambda: there(luck), lambda: back(luck))

    assert abs(offset.offset_s - SHIFT_NS * 1e-9) <= offset.error_s


def test_unequal_delays_are_covered_by_the_error():
    offset = exchanged(lambda: 0.012, lambda: 0.001, count=4)

    assert offset.error_s >= 0.0065  # half of the round trip of 13 ms
    # The estimate is wrong by half of the difference (5.5 ms), which no exchange can detect.
    assert 0.003 < offset.offset_s - SHIFT_NS * 1e-9 <= offset.error_s
