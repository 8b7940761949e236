"""network/transport.py: invalid and implausible frames raise an error; an outbox counts dropped reports."""

import select
import time

import msgspec
import pytest
import zmq
from builders import device_window, full, gpu, hello, reports, row
from cases import cases
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from effllm.network import transport
from effllm.network.transport import (
    MAGIC,
    MAX_BYTES,
    MAX_ROWS,
    FrameError,
    Link,
    Outbox,
    ServerSocket,
    decode_from_agent,
    decode_from_aggregator,
    encode,
    encode_report,
    make_context,
)
from effllm.records.energy import EnergyAmount
from effllm.records.rank import (
    GAUGES,
    Event,
    Gauge,
    Integrals,
    ParameterCount,
    RankReport,
    Sensor,
    ValueStatistics,
)
from effllm.records.wire import Ack, AgentEvent, Bye, ByeSeen, Heartbeat, Rejected, Reports, Welcome

FROM_AGENT = [
    hello(
        devices=(gpu(memory_total_bytes=80 * 2**30, not_measured=("no power",)),),
        facts={"a": "b", "list": ["c"], "n": None},
    ),
    reports(row(loss=3.5, devices=(device_window(phases={"startup": full(1.0), "shutdown": Integrals()}),)), row(1)),
    Heartbeat("agent", 3, 17, "in an iteration", 0.5, 2),
    AgentEvent("agent", 3, Event(1000.0, "agent", "größer")),
    Bye("agent", 3, "completed", 20, 0, 1.25),
]
FROM_AGGREGATOR = [
    Welcome(2, "/runs/a"),
    Ack(7, 70, {"aec_watts": 612.5}, 3),
    Rejected("the agent belongs to another job"),
    ByeSeen(3),
]


def test_decoded_message_equals_the_encoded_message():
    assert [decode_from_agent(encode(message)) for message in FROM_AGENT] == FROM_AGENT
    assert [decode_from_aggregator(encode(message)) for message in FROM_AGGREGATOR] == FROM_AGGREGATOR


@cases(
    "frame",
    [
        b"",
        MAGIC,
        b"EFL2" + encode(FROM_AGENT[0])[4:],
        encode(FROM_AGGREGATOR[0]),
        encode(FROM_AGENT[1])[:-1],
        encode(FROM_AGENT[1]) + b"\0",
        MAGIC + b"\xdd\xff\xff\xff\xff",  # an array of four billion items
        MAGIC + b"\x91" * 100_000,
        MAGIC + b"\x94\x04\xa5agent\x03\xa5agent",
    ],
)
def test_invalid_frame_raises_frame_error(frame):
    with pytest.raises(FrameError):
        decode_from_agent(frame)


NAN, INFINITE = float("nan"), float("inf")
BAD_AMOUNTS = (NAN, INFINITE, -1.0)


def report_with(**changes):
    return reports(row(), msgspec.structs.replace(row(busy_s=9.0, wait_s=1.0), **changes))


def device_with(**changes):
    return reports(row(devices=(device_window(**changes),)))


def with_impossible_integrals():
    """Yield reports with one impossible number in the integrals of a window or of a phase."""
    whole = full(1.0)
    for bad in BAD_AMOUNTS:
        broken = [msgspec.structs.replace(whole, **{name: bad}) for name in Integrals.__struct_fields__[1:]]
        amounts = [msgspec.structs.replace(whole.energy, **{name: bad}) for name in EnergyAmount.__struct_fields__]
        broken += [msgspec.structs.replace(whole, energy=energy) for energy in amounts]
        for integrals in broken:
            yield device_with(wall=integrals)
            yield device_with(phases={"evaluation": integrals})


def numbered(count, value):
    return dict.fromkeys(map(str, range(count)), value)


COUNTS = ("tokens", "tokens_processed", "tokens_loss", "samples", "sequence", "window")
GAUGE = Gauge(1.0, 1.0, 1.0, 1.0)
#: Messages that are rejected, by a part of the reason.
REJECTED = {
    "Expected `int`": [
        *(report_with(**{name: bad}) for name in COUNTS for bad in (-1, 2**62)),
        hello(parameters=ParameterCount(total=-1)),
        hello(total_iterations=-5),
    ],
    "<= ": [
        *(report_with(**{name: 2e8}) for name in ("wall_s", "busy_s", "wait_s", "generation_s")),  # above six years
        report_with(phases_s={"evaluation": 2e8}),
        report_with(sequence=2 * 10**9),
        *(report_with(**{name: 10**13}) for name in ("window", "iteration_first", "iteration_last")),
        reports(row(), lost=2**62 - 1),
    ],
    "Expected `float": [
        *(report_with(**{name: bad}) for name in ("wall_s", "busy_s", "wait_s") for bad in (*BAD_AMOUNTS, -INFINITE)),
        *(report_with(**{name: bad}) for name in ("start_time_s", "loss") for bad in (NAN, INFINITE, -INFINITE)),
        *(report_with(phases_s={"evaluation": bad}) for bad in (*BAD_AMOUNTS, -INFINITE)),
        *(reports(row(), agent_cpu_s=bad) for bad in (*BAD_AMOUNTS, -INFINITE)),
        *with_impossible_integrals(),
        device_with(memory_peak_bytes=NAN),
        device_with(power_peak_w=-1.0),
        device_with(throttled_s={"any": -1.0}),
        device_with(throttle_covered_s=NAN),
        device_with(power_histogram_s={30: INFINITE}),
        device_with(gauges={"sm_clock_hz": Gauge(NAN, 1.0, 1.0, 1.0)}),
        device_with(gauges={"sm_clock_hz": Gauge(1.0, -1.0, 1.0, 1.0)}),
        hello(flops_per_token=NAN),
    ],
    "Expected `.*str": [hello(facts={"nested": {"a": 1}})],
    "length <=|matching": [
        device_with(gauges=numbered(65, GAUGE)),
        device_with(phases=numbered(33, Integrals())),
        device_with(power_histogram_s=dict.fromkeys(range(1001), 1.0)),
        device_with(throttled_s=numbered(65, 1.0)),
        reports(row(devices=(device_window(),) * 65)),
        reports(row(devices=(device_window("x" * 256),))),
        reports(row(phases_s=numbered(65, 0.0))),
        reports(row(agent="x" * 256)),
        hello(host="x" * 256),
        hello(devices=(gpu(name="x" * 256),)),
        hello(devices=(gpu(),) * 65),
        hello(facts=numbered(501, 1)),
        hello(facts={"x" * 256: 1}),
        hello(style="x" * 256),
        Heartbeat("agent", 3, 17, "x" * 256, 0.5),
        AgentEvent("agent", 3, Event(1.0, "agent", "x" * 8001)),
        AgentEvent("agent", 3, Event(1.0, "x" * 41, "text")),
        Bye("agent", 3, "x" * 256, 20),
    ],
    "control characters": [
        made
        for text in ("a\x1b[2Jb", "a\nb", "a\x00b", "a\x9bb", "a\u202eb")
        for made in (
            *(hello(**{name: text}) for name in ("host", "role", "agent", "job")),
            hello(devices=(gpu(text),)),
            hello(devices=(gpu(name=text),)),
        )
    ],
}


@cases(("reason", "message"), [(reason, message) for reason, messages in REJECTED.items() for message in messages])
def test_message_with_an_impossible_value_or_above_a_limit_is_rejected(reason, message):
    with pytest.raises(FrameError, match=reason):
        decode_from_agent(encode(message))


def test_lag_of_a_sensor_may_be_negative():
    ahead = msgspec.structs.replace(gpu(), sensor=Sensor(lag_s=-0.0372))

    assert decode_from_agent(encode(hello(devices=(ahead,)))).devices[0].sensor.lag_s == -0.0372


def crowded_row(sequence=1):
    """Return a report with all quantities of a GPU and two sensors of its node."""
    part = full(1 / 3)
    phases = dict.fromkeys(("evaluation", "checkpoint", "other", "startup", "shutdown"), part)
    gauges = dict.fromkeys(GAUGES, Gauge(1 / 3, 1 / 3, 1 / 3, 1 / 3))
    histogram_s = dict.fromkeys(range(300), 1 / 3)
    everything = {"phases": phases, "gauges": gauges, "power_histogram_s": histogram_s}
    return row(sequence=sequence, devices=tuple(device_window("x" * 40, 1 / 3, **everything) for _ in range(3)))


def sequences(outbox):
    return [msgspec.msgpack.decode(encoded, type=RankReport).sequence for encoded in outbox.next_unsent()]


def test_a_full_frame_is_well_below_the_limit():
    outbox = Outbox(1000)
    for sequence in range(1, 101):
        outbox.add_report(crowded_row(sequence))

    sizes = []
    while rows := outbox.next_unsent():
        sizes.append(len(encode(reports(*rows))))
        outbox.mark_sent(len(rows))

    assert len(sizes) > 2
    assert max(sizes) < 0.6 * MAX_BYTES


def test_frames_are_filled_and_a_large_report_is_sent_alone(monkeypatch):
    outbox = Outbox(1000)
    for sequence in range(1, 401):
        outbox.add_report(row(sequence=sequence))
    assert len(outbox.next_unsent()) == MAX_ROWS

    monkeypatch.setattr(transport, "MAX_ROWS_BYTES", 10)
    assert sequences(outbox) == [1]


# --- the outbox ----------------------------------------------------------------------------------


@pytest.mark.fault("network-cut")
@pytest.mark.parametrize("changes", [{}, {"final": True}, {"values": {"loss": ValueStatistics(2, 3.0, 0.5, 1.0, 2.0)}}])
def test_report_is_sent_without_the_defaults_at_its_end(changes):
    one = msgspec.structs.replace(row(), **changes)
    whole, short = msgspec.msgpack.encode(one), encode_report(one)

    frame = encode(Reports((short,)))
    assert decode_from_agent(frame).rows == (one,)
    assert (len(memoryview(short)) < len(whole)) is (one.values is None)


@pytest.mark.fault("duplicates")
def test_unconfirmed_reports_are_resent_on_a_new_connection_only():
    outbox = Outbox(10)
    for sequence in (1, 2, 3):
        outbox.add_report(row(sequence=sequence))
    outbox.mark_sent(2)
    assert sequences(outbox) == [3]

    outbox.drop_acknowledged(1)
    outbox.mark_all_unsent()

    assert sequences(outbox) == [2, 3]


class OutboxMachine(RuleBasedStateMachine):
    """Compares an outbox with two plain lists: sent reports, and unsent reports."""

    MOST = 100

    def __init__(self):
        super().__init__()
        self.outbox = Outbox(self.MOST)
        self.under_way, self.waiting = [], []
        self.next, self.lost, self.newest_sent = 1, 0, 0

    @rule(count=st.integers(1, 80))
    def add(self, count):
        for _ in range(count):
            self.outbox.add_report(row(sequence=self.next))
            self.waiting.append(self.next)
            self.next += 1
            if len(self.under_way) + len(self.waiting) > self.MOST:
                self.lost += (self.under_way or self.waiting).pop(0) > self.newest_sent

    @rule()
    def send(self):
        count = len(self.outbox.next_unsent())
        self.outbox.mark_sent(count)
        self.under_way += self.waiting[:count]
        self.newest_sent = max([self.newest_sent, *self.under_way[-1:]])
        del self.waiting[:count]

    @rule(back=st.integers(0, 120))
    def acknowledge(self, back):
        sequence = max(self.next - 1 - back, 0)
        self.outbox.drop_acknowledged(sequence)
        self.under_way = [one for one in self.under_way if one > sequence]
        self.waiting = [one for one in self.waiting if one > sequence]

    @rule()
    def connect_again(self):
        self.outbox.mark_all_unsent()
        self.under_way, self.waiting = [], self.under_way + self.waiting

    @invariant()
    def agrees_with_the_lists(self):
        assert sequences(self.outbox) == self.waiting[:MAX_ROWS]
        assert len(self.outbox) == len(self.under_way) + len(self.waiting) <= self.MOST
        assert self.outbox.num_lost == self.lost


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(stateful_step_count=30)


# --- the sockets -----------------------------------------------------------------------------------


@pytest.fixture
def context():
    context = make_context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server(context):
    server = ServerSocket(context)
    server.address = server.listen("tcp://127.0.0.1:*")
    yield server
    server.close()


def receive(receiver, within_s=30.0):
    """Return the first message that a socket receives; fail after `within_s`."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        receiver.socket.poll(50)
        if got := receiver.receive():
            return got
    raise AssertionError("nothing came")


def connected(link, within_s=30.0):
    link.connect()
    deadline_s = time.monotonic() + within_s
    while not link.has_new_connection():
        assert time.monotonic() < deadline_s, "no connection"
        select.select([], [], [], 0.005)


def test_agent_and_aggregator_send_messages_to_each_other(context, server):
    link = Link(context, server.address)
    connected(link)
    assert link.send(FROM_AGENT[0])

    peer, frame = receive(server)
    assert decode_from_agent(frame) == FROM_AGENT[0]
    server.send(peer, FROM_AGGREGATOR[0])
    assert receive(link) == [FROM_AGGREGATOR[0]]
    assert not link.has_new_connection(), "only once"
    link.close()


def test_1000_sends_without_a_peer_fail_at_once(context):
    link = Link(context, "tcp://127.0.0.1:9")
    link.connect()

    assert not any(link.send(FROM_AGENT[2]) for _ in range(1000))
    link.close()


def test_invalid_answer_is_dropped_by_the_agent(context, server):
    link = Link(context, server.address)
    connected(link)
    link.send(FROM_AGENT[2])
    peer, _ = receive(server)
    server.socket.send_multipart((peer, b"rubbish"))
    server.send(peer, FROM_AGGREGATOR[3])

    assert receive(link) == [FROM_AGGREGATOR[3]]
    link.close()


def test_message_with_a_wrong_number_of_parts_is_an_empty_frame(context, server):
    raw = context.socket(zmq.DEALER)
    raw.connect(server.address)
    raw.send_multipart((b"", b"a", b"b"))

    assert receive(server)[1] == b""
    raw.close(0)


@pytest.mark.fault("hostile-frames")
def test_a_message_beyond_the_limit_never_arrives(context, server):
    raw, link = context.socket(zmq.DEALER), Link(context, server.address)
    raw.connect(server.address)
    raw.send(b"x" * (MAX_BYTES + 1))
    connected(link)
    link.send(FROM_AGENT[2])

    assert decode_from_agent(receive(server)[1]) == FROM_AGENT[2]
    raw.close(0)
    link.close()


def test_answer_to_a_closed_connection_is_dropped(server):
    server.send(b"closed", FROM_AGGREGATOR[0])

    assert server.receive() is None
