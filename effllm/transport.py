"""Messages over ZeroMQ: frames, the options that the defaults get wrong, and the agent's outbox.

Frames are typed, versioned and bounded; nothing is ever unpickled.  ``Outbox`` is pure.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from effllm.schema import (
    Beat,
    Bye,
    Device,
    DeviceWindow,
    FromAgent,
    FromAggregator,
    Hello,
    Integrals,
    Profile,
    RankReport,
    Reports,
)
from effllm.timeline import KINDS

MAGIC = b"EFL1"
MOST_BYTES = 256 * 1024
MOST_ROWS = 64  # rows in one frame: about 40 kB of plain ones ...
MOST_ROWS_BYTES = MOST_BYTES // 2  # ... and a row with all gauges, phases and a wide histogram has 10 kB

_encoder = msgspec.msgpack.Encoder()
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)
_from_aggregator: msgspec.msgpack.Decoder[FromAggregator] = msgspec.msgpack.Decoder(FromAggregator)

Message = TypeVar("Message")


class FrameError(ValueError):
    """A frame that is not ours, not of this version, or says what cannot be."""


def encode(message: FromAgent | FromAggregator) -> bytes:
    """Return the frame of a message."""
    return MAGIC + _encoder.encode(message)


def decode_from_agent(frame: bytes) -> FromAgent:
    """Return the message of an agent's frame.

    Raises:
        FrameError: it is no such frame, or a number in it is negative, infinite or not a number.
    """
    message = _decode(_from_agent, frame)
    if isinstance(message, Reports):
        _check_numbers(message.lost, message.agent_cpu_s)
        for row in message.rows:
            _check_row(row)
    elif isinstance(message, Hello):
        parameters = message.parameters
        _check_numbers(parameters.total, parameters.trainable, parameters.active)
        _check_numbers(message.total_iterations, message.flops_per_token, message.hardware_flops_per_token)
        for device in message.devices:
            _check_sensor(device)
    elif isinstance(message, (Beat, Bye)):
        _check_numbers(message.lost, message.since_s if isinstance(message, Beat) else message.agent_cpu_s)
    return message


def decode_from_aggregator(frame: bytes) -> FromAggregator:
    """Return the message of an aggregator's frame.

    Raises:
        FrameError: it is no such frame.
    """
    return _decode(_from_aggregator, frame)


def _decode(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    if not frame.startswith(MAGIC):
        raise FrameError("not a frame of this version of effllm")
    try:
        return decoder.decode(memoryview(frame)[len(MAGIC) :])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FrameError(str(error)[:200]) from error


def _check_numbers(*numbers: float | None) -> None:
    if not all(number is None or (math.isfinite(number) and number >= 0) for number in numbers):
        raise FrameError("a number is negative or not finite")


def _check_row(row: RankReport) -> None:
    counts = (
        row.tokens,
        row.tokens_processed,
        row.tokens_loss,
        row.samples,
        row.generated_tokens,
        row.prompt_tokens,
        row.sequence,
        row.iterations + 1,
        row.window,
    )
    times = (row.wall_s, row.busy_s, row.wait_s, row.generation_s, *row.phases_s.values())
    if min(counts) < 0 or max(counts) >= 2**62:
        raise FrameError("a count is negative or beyond reason")
    if not all(math.isfinite(value) for value in (*times, row.start_time_s, row.end_time_s)):
        raise FrameError("a time is not a finite number")
    if min(times) < 0:
        raise FrameError("a time is negative")
    if row.loss is not None and not math.isfinite(row.loss):
        raise FrameError("the loss is not a finite number")
    if row.profile is not None:
        _check_profile(row.profile)
    _check_numbers(row.device_steps, row.device_step_s)
    for device in row.devices:
        _check_device(device)


def _check_profile(profile: Profile) -> None:
    times = (profile.time_s, profile.communication_s, profile.exposed_s, profile.computing_s, profile.cost_s)
    _check_numbers(profile.iterations, *times, *(seconds for pair in profile.kinds.values() for seconds in pair))
    if not set(KINDS).issuperset(profile.kinds):
        raise FrameError("a kind of communication is not known")


def _check_device(device: DeviceWindow) -> None:
    numbers = [device.memory_peak_bytes, device.power_peak_w, device.energy_gain_error]
    for integrals in (device.wall, *device.phases.values()):
        numbers += _numbers(integrals)
    for gauge in device.gauges.values():
        numbers += [gauge.covered_s]
        if not all(math.isfinite(value) for value in (gauge.value_seconds, gauge.least, gauge.most)):
            raise FrameError("a gauge is not a finite number")
    numbers += [device.throttle_covered_s, *device.throttled_s.values(), *device.power_histogram_s.values()]
    if not all(number is None or (math.isfinite(number) and number >= 0) for number in numbers):
        raise FrameError("a device's integral is negative or not a finite number")


def _check_sensor(device: Device) -> None:
    numbers = (device.memory_total_bytes, device.power_limit_w, device.baseline_w, device.sensor.gain_error)
    if not all(number is None or (math.isfinite(number) and number >= 0) for number in numbers):
        raise FrameError("a device's size, limit or error is negative or not a finite number")


def _numbers(integrals: Integrals) -> list[float | None]:
    return [getattr(integrals, name) for name in integrals.__struct_fields__]


class Outbox:
    """The reports of one agent that nobody has confirmed yet, oldest first, bounded."""

    def __init__(self, most: int) -> None:
        self._rows: deque[RankReport] = deque()
        self._most = most
        self._sent = 0  # how many of them, from the oldest, are under way
        self.lost = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: RankReport) -> None:
        """Append a report; where there is no room the oldest goes, and is counted."""
        if len(self._rows) >= self._most:
            self._rows.popleft()
            self._sent = max(self._sent - 1, 0)
            self.lost += 1
        self._rows.append(row)

    def unsent(self) -> Sequence[RankReport]:
        """Return the next reports that are not under way, as many as one frame takes."""
        rows: list[RankReport] = []
        room = MOST_ROWS_BYTES
        for i in range(self._sent, min(len(self._rows), self._sent + MOST_ROWS)):
            room -= len(_encoder.encode(self._rows[i]))
            if rows and room < 0:
                break
            rows.append(self._rows[i])
        return rows

    def sent(self, count: int) -> None:
        """Note that so many more are under way."""
        self._sent = min(self._sent + count, len(self._rows))

    def acknowledged(self, sequence: int) -> None:
        """Forget the reports up to ``sequence``: they are safe."""
        while self._rows and self._rows[0].sequence <= sequence:
            self._rows.popleft()
            self._sent = max(self._sent - 1, 0)

    def send_again(self) -> None:
        """Take nothing as under way any more: the connection is new."""
        self._sent = 0


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return a context whose end never blocks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.BLOCKY, 0)
    return context


def _set_common(socket: zmq.Socket[bytes]) -> None:
    options = {
        zmq.IPV6: 1,  # a v6 address without it fails silently
        zmq.MAXMSGSIZE: MOST_BYTES,  # the default lets one peer take all memory
        zmq.HEARTBEAT_IVL: 10_000,
        zmq.HEARTBEAT_TIMEOUT: 30_000,
        zmq.HEARTBEAT_TTL: 60_000,  # at most 65.5 s: libzmq#4226
        zmq.TCP_KEEPALIVE: 1,
        zmq.HANDSHAKE_IVL: 10_000,
        zmq.SNDBUF: 64 * 1024,  # bounds what a peer parks in the kernel to about 200 messages
        zmq.RCVBUF: 64 * 1024,
    }
    for option, value in options.items():
        socket.set(option, value)


class AgentLink:
    """An agent's end of the connection: it never waits, and tells when a connection is new."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        _set_common(self.socket)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.IMMEDIATE, 1)  # nothing queues for a connection that does not exist
        self.socket.set(zmq.SNDHWM, 8)  # ZeroMQ keeps the oldest when full; the outbox decides instead
        self.socket.set(zmq.RCVHWM, 32)
        self.socket.set(zmq.RECONNECT_IVL, random.randint(100, 500))  # noqa: S311 - spreads a storm, hides nothing
        self.socket.set(zmq.RECONNECT_IVL_MAX, 5000)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._endpoint = endpoint
        self.connected = False

    def connect(self) -> None:
        """Begin to connect, for as long as it takes."""
        self.socket.connect(self._endpoint)

    def send(self, message: FromAgent) -> bool:
        """Hand over a message; ``False`` where it cannot go at once."""
        try:
            self.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[FromAggregator]:
        """Return what has arrived; frames that are not ours are dropped."""
        messages = []
        while True:
            try:
                messages.append(decode_from_aggregator(self.socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages
            except FrameError:
                continue

    def is_new(self) -> bool:
        """Whether a connection has come into being since the last call."""
        new = False
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            new = new or self.connected
        return new

    def close(self) -> None:
        """Close the sockets; what is unsent gets half a second."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()


class ServerSocket:
    """The aggregator's end: one ROUTER for all agents."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        _set_common(self.socket)
        self.socket.set(zmq.LINGER, 500)
        self.socket.set(zmq.BACKLOG, 4096)
        self.socket.set(zmq.RCVHWM, 32)  # per peer: 1000 peers at the default took 2.5 GB
        self.socket.set(zmq.SNDHWM, 32)

    def listen(self, endpoint: str, descriptor: int | None = None) -> str:
        """Serve an address, or a socket that already listens on it; return the address.

        Raises:
            zmq.ZMQError: the address is in use or not this host's.
        """
        if descriptor is not None:
            self.socket.set(zmq.USE_FD, descriptor)
        self.socket.bind(endpoint)
        address = self.socket.get(zmq.LAST_ENDPOINT)
        return address.decode().rstrip("\0") if isinstance(address, bytes) else endpoint

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return (peer, frame), or ``None`` where nothing waits; malformed parts become an empty frame."""
        try:
            parts = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return parts[0], parts[1] if len(parts) == 2 else b""

    def send(self, peer: bytes, message: FromAggregator) -> None:
        """Answer a peer; one that is gone, or does not read, gets nothing."""
        try:
            self.socket.send_multipart((peer, encode(message)), zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        """Close the socket; answers under way get half a second."""
        self.socket.close()
