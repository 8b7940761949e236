"""Messages over ZeroMQ: frames, socket options, and the agent's outbox.

Frames are typed, versioned and bounded, and pickle is never used.  ``Outbox`` does no I/O.
"""

from __future__ import annotations

import errno
import random
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

import msgspec
import zmq
from msgspec.structs import astuple

from effllm.network.curve import AgentKeys, ServerKeys
from effllm.records.rank import RankReport
from effllm.records.timeline import KINDS
from effllm.records.wire import MAX_ROWS, FromAgent, FromAggregator, Hello, Reports

MAGIC = b"EFL1"  # the version of the messages
MAX_BYTES = 256 * 1024
MAX_ROWS_BYTES = MAX_BYTES // 2  # a report with all gauges, phases and a wide histogram has 10 kB
KNOWN_KINDS = frozenset(KINDS)

# These are plain numbers, because pyzmq's enumerations are slow.
_NOBLOCK, _NOBLOCK_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS_OPTION, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)

_EVENT_FRAME = struct.Struct("=hi")  # first frame of an event of zmq_socket_monitor(3); the second is the endpoint

_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_aggregator: msgspec.msgpack.Decoder[FromAggregator] = msgspec.msgpack.Decoder(FromAggregator)

#: The defaults of a report's fields, from the last field.
_LAST_DEFAULTS = tuple(reversed(RankReport.__struct_defaults__))

Message = TypeVar("Message")


class FrameError(ValueError):
    """A frame that another program or another version of effllm sent, or that has impossible values."""


def encode(message: FromAgent | FromAggregator) -> bytes:
    return MAGIC + _encoder.encode(message)


def encode_report(row: RankReport) -> msgspec.Raw:
    """Encode a report without the defaults at its end, with which the receiver fills it."""
    values = list(astuple(row))
    for default in _LAST_DEFAULTS:
        if values[-1] != default:
            break
        del values[-1]
    return msgspec.Raw(_encoder.encode(values))


def decode_from_agent(frame: bytes | memoryview) -> FromAgent:
    """Return the message of an agent's frame.

    Raises:
        FrameError: the frame is not an agent's, or has impossible values, such as a negative count or
            infinite seconds.
    """
    message = _decode(_from_agent, frame)  # the bounds of every field are in the schema
    if isinstance(message, Reports):
        for row in message.rows:
            if row.iteration_last - row.iteration_first < -2:
                raise FrameError("the count of iterations in a report is negative")
            if row.profile is not None and not KNOWN_KINDS.issuperset(row.profile.kinds):
                raise FrameError("a kind of communication is unknown")
    elif isinstance(message, Hello) and not _is_printable(message):
        raise FrameError("a name in a HELLO has control characters")
    return message


def is_hello(frame: bytes | memoryview) -> bool:
    """Whether the first bytes of a frame belong to a HELLO: a msgpack array of more than 15 items, and its tag."""
    return len(frame) > 7 and frame[4] == 0xDC and frame[7] == 1


def decode_from_aggregator(frame: bytes) -> FromAggregator:
    """Return the message of an aggregator's frame.

    Raises:
        FrameError: the frame is not an aggregator's.
    """
    return _decode(_from_aggregator, frame)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes | memoryview) -> Message:
    if frame[: len(MAGIC)] != MAGIC:
        raise FrameError(
            f"a frame begins with {bytes(frame[:4])!r}, not with {MAGIC!r}: install one version on all hosts"
        )
    try:
        return decoder.decode(memoryview(frame)[len(MAGIC) :])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FrameError(str(error)[:200]) from error


def _is_printable(message: Hello) -> bool:
    devices = [text for device in message.devices for text in (device.key, device.name, device.driver)]
    texts = (message.job, message.agent, message.host, message.role, message.gpus_source, *devices)
    return "".join(texts).isprintable()


class Outbox:
    """The unacknowledged reports of one agent, oldest first, limited in number; each report is encoded once."""

    def __init__(self, max_reports: int) -> None:
        self._rows: deque[tuple[int, msgspec.Raw]] = deque()  # a report's sequence number, and the encoded report
        self._max_reports = max_reports
        self._num_in_flight = 0  # number of reports in flight, counted from the oldest
        self._newest_sent = 0  # sequence number of the newest sent report
        self.num_lost = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add_report(self, row: RankReport) -> None:
        """Append a report.  A full outbox drops the oldest report, and counts it as lost if the report was never sent.

        A sent report may have arrived; if it has not, the aggregator detects the gap.
        """
        if len(self._rows) >= self._max_reports:
            oldest, _ = self._rows.popleft()
            self._num_in_flight = max(self._num_in_flight - 1, 0)
            self.num_lost += oldest > self._newest_sent
        self._rows.append((row.sequence, encode_report(row)))

    @property
    def num_unsent(self) -> int:
        return len(self._rows) - self._num_in_flight

    def next_unsent(self) -> Sequence[RankReport]:
        """Return the oldest encoded reports that are not in flight, up to the size of one frame."""
        rows: list[Any] = []  # msgspec puts encoded reports into a frame unchanged
        left_bytes = MAX_ROWS_BYTES
        for _, encoded in islice(self._rows, self._num_in_flight, self._num_in_flight + MAX_ROWS):
            left_bytes -= len(memoryview(encoded))
            if rows and left_bytes < 0:
                break
            rows.append(encoded)
        return rows

    def mark_sent(self, count: int) -> None:
        self._num_in_flight = min(self._num_in_flight + count, len(self._rows))
        if self._num_in_flight:
            self._newest_sent = max(self._newest_sent, self._rows[self._num_in_flight - 1][0])

    def drop_acknowledged(self, sequence: int) -> None:
        """Drop the reports up to ``sequence``: the aggregator has stored them."""
        while self._rows and self._rows[0][0] <= sequence:
            self._rows.popleft()
            self._num_in_flight = max(self._num_in_flight - 1, 0)

    def mark_all_unsent(self) -> None:
        """Mark all reports as unsent, because the connection is new."""
        self._num_in_flight = 0


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose termination never blocks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.BLOCKY, 0)
    return context


def _set_common_options(socket: zmq.Socket[bytes]) -> None:
    options = {
        zmq.IPV6: 1,  # without this option an IPv6 address fails silently
        zmq.MAXMSGSIZE: MAX_BYTES,  # without a limit one peer can take all memory
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: 60_000,  # timeout for data in flight, during which keep-alive sends no probes
        zmq.HANDSHAKE_IVL: 30_000,  # ten thousand concurrent handshakes with keys take seconds of processor time
        zmq.SNDBUF: 64 * 1024,  # limits a peer's messages in the kernel to about 200
        zmq.RCVBUF: 64 * 1024,
    }
    for option, value in options.items():
        socket.set(option, value)


def receive_event(monitor: zmq.Socket[bytes]) -> tuple[int, int]:
    """Wait for the next event of a monitored socket; return the event (a ``zmq.Event``) and its value.

    pyzmq's own reader imports asyncio, which takes a third of the time of an agent's imports.
    """
    event, value = _EVENT_FRAME.unpack(monitor.recv_multipart()[0])
    return event, value


def _has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits; without one, a receive would raise an exception, which takes three times as long."""
    return bool(socket.getsockopt(_EVENTS_OPTION) & _POLLIN)  # type: ignore[operator]


class Link:
    """An agent's end of the connection, which detects new connections if it is monitored; its methods never wait."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: AgentKeys | None = None,
        *,
        is_monitored: bool = True,
    ) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _set_common_options(self.socket)
        if keys:
            keys.secure(self.socket)
        # The kernel's probes detect a lost connection.  ZeroMQ's heartbeats are not used: libzmq 4.3.5 scans all timers
        # to stop a timer, which takes half a core for ten thousand peers.  In addition, libzmq aborts (`!_io_error`)
        # if a connection with a full queue breaks while a heartbeat waits in this queue.
        self.socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
        self.socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        self.socket.set(zmq.TCP_KEEPALIVE_CNT, 4)
        self.socket.set(zmq.TCP_MAXRT, 30_000)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.IMMEDIATE, 1)  # without a connection no message is queued
        self.socket.set(zmq.SNDHWM, 8)  # a full ZeroMQ queue keeps the oldest messages; the outbox keeps the newest
        self.socket.set(zmq.RCVHWM, 32)
        self.socket.set(zmq.RECONNECT_IVL, random.randint(100, 500))  # noqa: S311 - spreads the load, protects nothing
        self.socket.set(zmq.RECONNECT_IVL_MAX, 5000)
        self._endpoint = endpoint
        self.sent_bytes = 0
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor: zmq.Socket[bytes] | None = self.socket.get_monitor_socket(events) if is_monitored else None
        self.connected = False

    def connect(self) -> None:
        self.socket.connect(self._endpoint)

    def send(self, message: FromAgent) -> bool:
        """Send a message; ``False`` if this is not possible at once."""
        frame = encode(message)
        try:
            self.socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        self.sent_bytes += len(frame)
        return True

    def receive(self) -> list[FromAggregator]:
        """Return the messages that have arrived; foreign frames are dropped."""
        messages = []
        while _has_message(self.socket):
            try:
                messages.append(decode_from_aggregator(self.socket.recv(_NOBLOCK)))
            except zmq.Again:
                break
            except FrameError:
                continue
        return messages

    def send_reports(self, outbox: Outbox, *costs: Any) -> int:
        """Send the unsent reports until the socket is full; return their number.  ``costs``: fields of `Reports`."""
        count = 0
        while (rows := outbox.next_unsent()) and self.send(Reports(tuple(rows), outbox.num_lost, *costs)):
            outbox.mark_sent(len(rows))
            count += len(rows)
        return count

    def has_new_connection(self) -> bool:
        """Read the waiting events of the connection; return whether a connection was made since the last call."""
        is_new = False
        while self.monitor is not None and _has_message(self.monitor):
            event, _ = receive_event(self.monitor)
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            is_new = is_new or self.connected
        return is_new

    def close(self) -> None:
        """Close the socket; unsent messages are still sent for half a second."""
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
        self.socket.close()


class ServerSocket:
    """The aggregator's end of all connections: one ROUTER socket for all agents."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys | None = None) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _set_common_options(self.socket)
        if keys:
            keys.secure(self.socket)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.BACKLOG, 4096)
        self.socket.set(zmq.RCVHWM, 32)  # per peer; with the default, 1000 peers took 2.5 GB
        self.socket.set(zmq.SNDHWM, 32)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # a message to a disconnected peer is reported, not dropped
        self.received_bytes = 0

    def listen(self, endpoint: str, descriptor: int | None = None) -> str:
        """Serve an address, or a socket that already listens on this address; return the address.

        Raises:
            zmq.ZMQError: the address is in use, or is not an address of this host.
        """
        if descriptor is not None:
            self.socket.set(zmq.USE_FD, descriptor)
        self.socket.bind(endpoint)
        address = self.socket.get(zmq.LAST_ENDPOINT)
        return address.decode().rstrip("\0") if isinstance(address, bytes) else endpoint

    def receive(self) -> tuple[bytes, memoryview] | None:
        """Return (peer, frame), or ``None`` if no frame waits; a malformed message becomes an empty frame."""
        # A frame object has a flag for a following part.  In pyzmq the socket option RCVMORE takes 2 us, four times
        # as long as the receive itself, and recv_multipart reads this option twice.
        recv = self.socket.recv
        try:
            peer = recv(_NOBLOCK)
            part = recv(_NOBLOCK, False)  # messages are complete: a part follows the peer's part
        except zmq.Again:
            return None
        frame = part.buffer
        self.received_bytes += len(frame)
        while part.more:
            part = recv(_NOBLOCK, False)
            self.received_bytes += len(part.buffer)
            frame = memoryview(b"")
        return peer, frame

    def send(self, peer: bytes, message: FromAggregator) -> bool:
        """Send a message; drop it if the peer does not read; return ``False`` only if the peer is disconnected."""
        return self.send_frame(peer, encode(message))

    def send_frame(self, peer: bytes, frame: bytes) -> bool:
        """Send an encoded message to a peer; a message to ten thousand peers is encoded only once."""
        try:
            self.socket.send(peer, _NOBLOCK_MORE)
            self.socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def close(self) -> None:
        """Close the socket; unsent messages are still sent for half a second."""
        self.socket.close()
