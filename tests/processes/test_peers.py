"""effllm/network/peers.py: a connection may send only for the rank and agent of its HELLO, and within a rate."""

import os
import subprocess
import sys
import time
from itertools import accumulate, pairwise

import jobs
import msgspec
import pytest
import zmq
from builders import gpu, hello, reports, row

from effllm.config.settings import Config
from effllm.job.aggregator import Aggregator
from effllm.network.peers import (
    AGAIN_EVERY_S,
    BURST_BYTES,
    BYTES_PER_S,
    FRAME_BYTES,
    MAX_PEERS_WITHOUT_HELLO,
    NO_HELLO,
    NO_HELLO_FRAMES,
    REJECTED_HELLO,
    REPORT_BYTES,
    THROTTLED,
    WRONG_RANK,
    Peers,
)
from effllm.network.transport import (
    MAGIC,
    MAX_BYTES,
    MAX_ROWS,
    MAX_ROWS_BYTES,
    ServerSocket,
    decode_from_agent,
    decode_from_aggregator,
    encode,
    is_hello,
    make_context,
)
from effllm.records.clock import Now
from effllm.records.events import MAX_PER_MINUTE
from effllm.records.rank import MAX_DEVICES, Event
from effllm.records.wire import Ack, AgentEvent, Bye, ByeSeen, Heartbeat, Hello, Reports, Supersede, Welcome

HISTORY = 1000
ROOM_BYTES = BURST_BYTES + HISTORY * REPORT_BYTES
BURST = ROOM_BYTES // FRAME_BYTES
FRAMES_PER_S = BYTES_PER_S // FRAME_BYTES


@pytest.fixture
def peers():
    """Return peers with the connections a (rank 0) and b (rank 1)."""
    peers = Peers(HISTORY)
    for rank, peer in enumerate((b"a", b"b")):
        assert peers.admit_frame(peer, 300, 0.0)
        peers.register_hello(peer, hello(rank, host=f"node-{rank}"), 0.0)
    return peers


def of_rank(rank, agent=None):
    agent = agent or f"agent-{rank}"
    return [
        reports(row(rank, agent=agent)),
        Heartbeat(agent, rank, 1, "in an iteration", 0.0),
        AgentEvent(agent, rank, Event(0.0, "agent", "text")),
        Bye(agent, rank, "completed", 10),
    ]


@pytest.mark.parametrize("message", of_rank(0), ids=lambda message: type(message).__name__)
def test_connection_may_send_for_the_rank_of_its_hello(peers, message):
    assert peers.check_sender(b"a", message) == ""
    assert peers.take_events() == []
    assert peers.rejected == {}


@pytest.mark.parametrize(
    "message",
    [*of_rank(1), *of_rank(0, "agent-1"), reports(row(0), row(1))],
    ids=lambda message: type(message).__name__,
)
def test_message_for_another_rank_or_agent_is_rejected_and_reported(peers, message):
    assert peers.check_sender(b"a", message).startswith("rank 0 on node-0 sent a message of ")
    assert peers.check_sender(b"a", message)

    (event,) = peers.take_events()
    assert (event.kind, event.rank) == ("rejected", 0)
    assert "node-0" in event.text
    assert peers.rejected == {WRONG_RANK: 2}


def test_hello_of_a_second_rank_or_agent_is_rejected(peers):
    assert peers.check_sender(b"a", hello(0)) == ""
    assert "sent a HELLO of rank 1" in peers.check_sender(b"a", hello(1))
    assert peers.check_sender(b"a", hello(0, agent="other"))


@pytest.mark.parametrize("message", of_rank(0), ids=lambda message: type(message).__name__)
def test_message_before_hello_is_rejected(peers, message):
    peers.admit_frame(b"unknown", 10, 1.0)

    refused = [peers.check_sender(b"unknown", message) for _ in range(5)]

    assert all(refused)
    assert peers.rejected == {NO_HELLO: 5}
    (event,) = peers.take_events()
    assert (event.kind, event.rank) == ("rejected", None)
    assert event.text == "a connection without a HELLO sent another message first"


def test_request_of_the_next_attempt_is_accepted_without_a_hello(peers):
    peers.admit_frame(b"next", 10, 1.0)

    assert peers.check_sender(b"next", Supersede("run", "job")) == ""


def test_new_connection_of_an_agent_replaces_the_old_one(peers):
    peers.admit_frame(b"new", 300, 5.0)
    assert peers.check_sender(b"new", hello(0)) == ""
    peers.register_hello(b"new", hello(0), 5.0)

    assert peers.peer_by_rank[0] == b"new"
    assert peers.check_sender(b"new", of_rank(0)[0]) == ""
    assert peers.check_sender(b"a", of_rank(0)[0]), "the old connection belongs to no agent now"
    assert len(peers) == 2


def test_number_of_connections_without_hello_is_limited(peers):
    for number in range(30_000):
        assert peers.admit_frame(b"x%d" % number, 10, 1.0)

    assert len(peers) <= MAX_PEERS_WITHOUT_HELLO + 2
    assert peers.check_sender(b"a", of_rank(0)[0]) == "", "connections of ranks are kept"


# --- rates ---


def test_reports_kept_during_an_outage_are_accepted_immediately(peers):
    frames, in_a_frame = -(-HISTORY // MAX_ROWS), 250 * MAX_ROWS

    assert all(peers.admit_frame(b"a", in_a_frame, 100.0) for _ in range(frames))
    # Reports of 16 kB are also accepted, in frames of 128 kB.
    assert all(
        peers.admit_frame(b"b", MAX_ROWS_BYTES, 100.0) for _ in range(HISTORY * REPORT_BYTES // MAX_ROWS_BYTES + 1)
    )


def test_peer_that_sends_within_its_rate_is_never_throttled(peers):
    assert all(peers.admit_frame(b"a", 300, number / FRAMES_PER_S) for number in range(20_000))


def test_frames_above_the_rate_are_dropped_and_reported_once(peers):
    passed = sum(peers.admit_frame(b"a", 10, 0.0) for _ in range(BURST + 500))

    assert passed == BURST
    assert peers.rejected == {THROTTLED: 500}
    (event,) = peers.take_events()
    assert (event.rank, event.text) == (0, "rank 0 on node-0 exceeds its rate limit; its frames are now dropped")


def test_frames_above_the_byte_rate_are_dropped(peers):
    passed = sum(peers.admit_frame(b"a", MAX_BYTES, 0.0) for _ in range(1000))

    assert passed == ROOM_BYTES // MAX_BYTES
    # In ten seconds the allowance grows by 40 MB: 152 frames of 256 KiB.
    peers.admit_frame(b"a", MAX_BYTES, 10.0, is_hello=True)
    peers.register_hello(b"a", hello(0), 10.0)
    assert 1 + sum(peers.admit_frame(b"a", MAX_BYTES, 10.0) for _ in range(1000)) == pytest.approx(
        10 * BYTES_PER_S / MAX_BYTES, abs=1
    )


def test_peer_without_hello_has_a_lower_rate_limit(peers):
    assert sum(peers.admit_frame(b"unknown", 10, 0.0) for _ in range(1000)) == NO_HELLO_FRAMES
    assert (
        sum(peers.admit_frame(b"loud", MAX_BYTES, 0.0) for _ in range(100))
        == NO_HELLO_FRAMES * FRAME_BYTES // MAX_BYTES
    )


def test_throttled_peer_does_not_affect_another_peer(peers):
    for _ in range(10 * BURST):
        peers.admit_frame(b"a", 1000, 0.0)

    assert all(peers.admit_frame(b"b", 300, 0.0) for _ in range(BURST))


def test_frames_after_a_drop_are_rejected_until_a_new_hello(peers):
    while peers.admit_frame(b"a", 10, 0.0):
        pass
    late = of_rank(0)[0]
    assert not peers.admit_frame(b"a", 10, 1.0), "50 more frames could pass the rate, but no frame is decoded"
    assert "dropped frames again" in peers.check_sender(b"a", late)
    assert peers.admit_frame(b"a", 300, 1.0, is_hello=True)
    assert not peers.claim_resend_request(b"a", 1.0), "resending would exceed the rate again"
    assert peers.claim_resend_request(b"a", 3.0)
    assert not peers.claim_resend_request(b"a", 3.0 + AGAIN_EVERY_S / 2), "at most once a second"

    assert peers.check_sender(b"a", hello(0)) == ""
    peers.register_hello(b"a", hello(0), 4.0)

    assert peers.check_sender(b"a", late) == ""
    assert not peers.claim_resend_request(b"a", 9.0)


def test_rate_limit_of_a_rank_is_not_reset_by_a_new_connection(peers):
    while peers.admit_frame(b"a", 10, 0.0):
        pass
    assert peers.admit_frame(b"new", 300, 1.0, is_hello=True)
    peers.register_hello(b"new", hello(0), 1.0)

    allowed = sum(peers.admit_frame(b"new", 10, 1.0) for _ in range(BURST))
    assert allowed <= FRAMES_PER_S


@pytest.mark.parametrize("message", [hello(), hello(facts={"a": "b"}), *of_rank(0)], ids=lambda one: type(one).__name__)
def test_hello_frame_is_recognized_before_it_is_decoded(message):
    assert is_hello(encode(message)) == isinstance(message, Hello)


# --- limits for members of the job ---


def aggregator_of(*hellos):
    aggregator = Aggregator(Config(), "job", 1, 1000.0)
    for one in hellos:
        assert aggregator.hello(one, Now(0.0, 1000.0)) == ""
    return aggregator


def test_text_from_a_rank_becomes_one_line_without_escapes():
    aggregator = aggregator_of(hello(0))
    forged = Event(1.0, "warning", "\x1b[2J\r\n[EfficientLLM] Run completed")
    aggregator.agent_event(AgentEvent("agent-0", 0, forged), Now(1.0, 1001.0))

    assert aggregator.events.take_events()[-1].text == "rank 0: [2J [EfficientLLM] Run completed"


def test_limit_on_events_of_one_rank_does_not_affect_other_ranks():
    aggregator = aggregator_of(hello(0), hello(1))
    for number in range(5000):
        aggregator.agent_event(AgentEvent("agent-0", 0, Event(1.0, "agent", f"line {number}")), Now(1.0, 1001.0))
    aggregator.agent_event(AgentEvent("agent-1", 1, Event(1.0, "warning", "the loss is nan")), Now(1.0, 1001.0))
    aggregator.reject_frame(1001.0, "no frame")

    texts = [event.text for event in aggregator.events.take_events()]
    assert sum(text.startswith("rank 0: ") for text in texts) == MAX_PER_MINUTE
    assert texts[-2:] == ["rank 1: the loss is nan", "a frame was rejected: no frame"]


def test_rank_with_too_many_devices_is_rejected():
    aggregator = aggregator_of(hello(0))
    answers = [aggregator.hello(hello(0, devices=(gpu(f"GPU-new-{n}"),)), Now(0.0, 1000.0)) for n in range(MAX_DEVICES)]

    assert answers[: MAX_DEVICES - 1] == [""] * (MAX_DEVICES - 1)
    assert answers[-1] == f"the rank has reported more than {MAX_DEVICES} devices"
    known = gpu(f"GPU-new-{MAX_DEVICES - 2}")
    assert aggregator.hello(hello(0, devices=(known,)), Now(0.0, 1000.0)) == "", (
        "a known device can be introduced again"
    )


# --- a real aggregator ---


class HandAgent:
    """An agent whose messages the test sends, connected to a real aggregator."""

    def __init__(self, context, port):
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, *messages):
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self, kind, within_s=60.0):
        """Return the next message of a kind."""
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if self.socket.poll(50):
                message = decode_from_aggregator(self.socket.recv())
                if type(message).__name__ == kind:
                    return message
        raise AssertionError(f"no {kind} arrived")


@pytest.fixture
def hand_agent():
    context, voices = zmq.Context(), []

    def connect(port):
        voices.append(HandAgent(context, port))
        return voices[-1]

    yield connect
    for one in voices:
        one.socket.close()
    context.term()


def introduction(rank, world_size=2):
    return hello(rank, world_size=world_size, devices=(), agent=f"secret-{rank}")


@pytest.mark.faults
@pytest.mark.fault("unauthenticated-peers")
def test_rank_that_sends_for_another_rank_is_reported(launch, hand_agent):
    aggregator = launch.aggregator()
    zero, one = hand_agent(aggregator.port), hand_agent(aggregator.port)
    for rank, agent in enumerate((zero, one)):
        agent.send(introduction(rank))
        agent.receive("Welcome")

    other = hand_agent(aggregator.port)
    other.send(introduction(5), msgspec.structs.replace(introduction(1), job="another"))
    assert other.receive("Rejected").reason.startswith("rank 5 lies outside")
    assert other.receive("Rejected").reason == "the agent belongs to another job"

    # Rank 0 is a member of the job and uses the secret agent id of rank 1.
    stolen = row(1, agent="secret-1", tokens=10**9, devices=())
    zero.send(reports(stolen), Bye("secret-1", 1, "failed", 10))
    zero.send(reports(row(0, agent="secret-0", devices=())))
    one.send(reports(row(1, agent="secret-1", devices=())))
    one.receive("Ack")
    for rank, agent in enumerate((zero, one)):
        agent.send(Bye(f"secret-{rank}", rank, "completed", 10))
        agent.receive("ByeSeen")
    assert not aggregator.job.left(within_s=8.0)

    summary = aggregator.ledger.summary
    assert (summary.status, summary.tokens) == ("completed", 2000)
    assert summary.events[WRONG_RANK] == 2
    assert summary.events[REJECTED_HELLO] == 2
    texts = " ".join(aggregator.ledger.event_texts("rejected"))
    assert "lies outside a world of 2" in texts and "belongs to another job" in texts
    assert "sent a message of rank 1" in texts


@pytest.mark.faults
def test_windows_are_written_between_the_frames_of_a_burst(launch, hand_agent):
    aggregator = launch.aggregator(log_interval=10)
    agent = hand_agent(aggregator.port)
    agent.send(introduction(0, 1))
    agent.receive("Welcome")
    rows = [row(0, number, agent="secret-0", devices=()) for number in range(1, 2001)]

    agent.send(*[reports(*rows[first : first + 10]) for first in range(0, 2000, 10)])
    confirmed = [0]
    while confirmed[-1] < 2000:
        confirmed.append(agent.receive("Ack", within_s=120.0).sequence)

    # If the aggregator read all waiting frames at once, it would also confirm all these frames at once.
    # Older acknowledgements may come between newer ones.
    assert max(after - before for before, after in pairwise(accumulate(confirmed, max))) < 1000
    agent.send(Bye("secret-0", 0, "completed", 20_000))
    agent.receive("ByeSeen")
    assert not aggregator.job.left()


@pytest.mark.faults
@pytest.mark.fault("hostile-frames")
def test_throttled_rank_resends_dropped_reports(launch, hand_agent):
    aggregator = launch.aggregator(history_size=16, log_interval=10)
    agent = hand_agent(aggregator.port)
    agent.send(introduction(0, 1))
    agent.receive("Welcome")
    rows = [row(0, number, agent="secret-0", devices=()) for number in range(1, 21)]
    agent.send(reports(*rows[:10]))
    agent.receive("Ack")

    agent.send(*[MAGIC + b"\xc1"] * 3000)  # more frames than the burst limit
    agent.send(reports(*rows[10:]))

    def must_send_again():
        agent.send(Heartbeat("secret-0", 0, 1, "x", 0.0))
        while agent.socket.poll(100):  # acknowledgements can arrive at any time
            message = decode_from_aggregator(agent.socket.recv())
            if isinstance(message, Welcome):
                return message.again
        return False

    jobs.until(must_send_again)
    agent.send(introduction(0, 1), reports(*rows), Bye("secret-0", 0, "completed", 200))
    agent.receive("ByeSeen")
    assert not aggregator.job.left(within_s=8.0)

    summary = aggregator.ledger.summary
    assert summary.events[THROTTLED] >= 1000
    assert summary.tokens == 20_000
    assert [window.window for window in aggregator.ledger.windows] == list(range(1, 21))


@pytest.mark.faults
@pytest.mark.fault("hostile-frames")
def test_agent_resends_hello_and_unconfirmed_reports_on_request(launch):
    context = make_context()
    server = ServerSocket(context)
    port = server.listen("tcp://127.0.0.1:*").rpartition(":")[2]
    received_frames = []

    def receive():
        while received := server.receive():
            received_frames.append((received[0], decode_from_agent(received[1])))
        return received_frames

    def sequences(since=0):
        of_rows = [message.rows for _, message in received_frames[since:] if isinstance(message, Reports)]
        return [row.sequence for rows in of_rows for row in rows]

    try:
        job = launch.python("loop.py", "--iterations", 400, endpoint=f"127.0.0.1:{port}")
        peer, message = jobs.until(receive)[0]
        assert isinstance(message, Hello)
        server.send(peer, Welcome(1))
        jobs.until(lambda: receive() and len(set(sequences())) >= 3)
        server.send(peer, Ack(1))
        before, at = sequences(), len(received_frames)
        server.send(peer, Welcome(1, again=True))
        jobs.until(lambda: receive() and {2, 3} <= set(sequences(at)))
        again = next(number for number, (_, message) in enumerate(received_frames[at:]) if isinstance(message, Hello))
        after = sequences(at + again)
    finally:
        job.end()
        server.close()
        context.destroy(linger=0)

    assert before[:3] == [1, 2, 3]
    assert after[:2] == [2, 3], "the confirmed report must not be sent again"


LOOP = """
import pathlib, time
import effllm
collector = effllm.initialize_efficientllm_metrics(1000)
while not pathlib.Path("hello").exists():
    time.sleep(0.01)
collector.set_model_parameters(2000)
pathlib.Path("set").touch()
while not pathlib.Path("welcome").exists():
    collector.record_iteration_start()
    time.sleep(0.01)
    collector.record_iteration_end(tokens_processed=7, samples_processed=1)
effllm.finalize_efficientllm_metrics()
"""


def test_parameters_set_before_the_answer_to_hello_are_received(tmp_path):
    context = make_context()
    socket = ServerSocket(context)
    port = socket.listen("tcp://127.0.0.1:*").rpartition(":")[2]
    settings = {"ENDPOINT": f"tcp://127.0.0.1:{port}", "SECURITY": "none", "DEVICE": "simulated", "RUN_DIR": tmp_path}
    environ = {**os.environ, **{f"EFFICIENTLLM_{name}": str(value) for name, value in settings.items()}}
    trainer = subprocess.Popen([sys.executable, "-c", LOOP], env=environ, cwd=tmp_path)
    parameters, is_over, until_s = [], False, time.monotonic() + 150

    while not is_over and time.monotonic() < until_s:
        if not socket.socket.poll(100):
            continue
        peer, frame = socket.receive()
        message = decode_from_agent(frame)
        if isinstance(message, Hello):
            parameters.append(message.parameters.total)
            (tmp_path / "hello").touch()
            jobs.until((tmp_path / "set").exists)
            time.sleep(0.2)  # time for the agent to read the new parameters before the answer
            socket.send(peer, Welcome(1))
            (tmp_path / "welcome").touch()
        elif isinstance(message, Reports):
            socket.send(peer, Ack(message.rows[-1].sequence))
        elif isinstance(message, Bye):
            is_over = True
            socket.send(peer, ByeSeen(message.rank))

    assert trainer.wait(60) == 0
    assert (parameters[0], parameters[-1]) == (1000, 2000)
    socket.close()
    context.destroy(linger=0)
