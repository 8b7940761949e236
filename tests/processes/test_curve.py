"""Admission of peers over real sockets, and reports of rejected peers."""

import errno
import os
import resource
import socket
import subprocess
import sys
import time

import pytest
import zmq

from effllm.network.connections import Connections
from effllm.network.curve import AgentKeys, Gate, KeyPair, ServerKeys
from effllm.network.listening import listen
from effllm.network.rejections import (
    MAX_ADDRESSES,
    MAX_UNSEEN,
    NO_KEY,
    NO_PROTOCOL,
    OTHER_JOB,
    OTHER_SECRET,
    Rejections,
)
from effllm.network.transport import AgentLink, ServerSocket, make_context
from effllm.records.wire import Heartbeat

SECRET, JOB = b"s" * 64, "job-1"
BEAT = Heartbeat("agent", 0, 0, "step", 0.0)
WHERE = ("at 127.0.0.1", "with an unknown address")  # the text depends on the time at which the connection ends


class Listener:
    """A secured socket of an aggregator on a listening descriptor, as in the server."""

    def __init__(self, address="127.0.0.1", keys=None, gated=True):
        keys = keys or ServerKeys.of(SECRET, JOB)
        self.context, self.agents = make_context(), make_context()
        self.gate = Gate(self.context, keys) if gated else None
        self.server = ServerSocket(self.context, keys)
        self.rejections = Rejections()
        self.listener = listen(address)
        host = f"[{address}]" if ":" in address else address
        self.address, self.port = address, self.listener.getsockname()[1]
        self.endpoint = f"tcp://{host}:{self.port}"
        self.server.listen(self.endpoint, self.listener.detach())
        self.connections = Connections(self.server.socket, self.rejections)
        self.links, self.heard, self.refused, self.event_texts = [], 0, [], []

    def link(self, keys):
        link = AgentLink(self.agents, self.endpoint, keys)
        link.connect()
        self.links.append(link)
        return link

    def serve(self, until, within_s=30.0):
        """Serve until ``until`` returns a true value or time is up; return the last value."""
        deadline_s = time.monotonic() + within_s
        while not until() and time.monotonic() < deadline_s:
            poller = zmq.Poller()
            for one in (self.server.socket, self.connections.socket, self.gate and self.gate.socket):
                if one:
                    poller.register(one, zmq.POLLIN)
            poller.poll(20)
            for address, is_admitted in self.gate.answer() if self.gate else ():
                self.connections.decided += 1
                if is_admitted:
                    self.rejections.admit(address)
                else:
                    self.refused.append(address)
                    self.rejections.reject(address, OTHER_JOB)
            self.connections.poll(time.monotonic())
            self.event_texts += self.rejections.take()
            while self.server.receive():
                self.heard += 1
            for link in self.links:
                link.is_new()
                link.send(BEAT)
        return bool(until())

    def close(self):
        for link in self.links:
            link.close()
        self.connections.close()
        if self.gate:
            self.gate.close()
        self.server.close()
        for context in (self.agents, self.context):
            context.destroy(linger=0)


@pytest.fixture
def listener():
    made = []

    def make(*arguments, **more):
        made.append(Listener(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_agent_of_the_job_is_admitted_on_an_inherited_listener(listener, address):
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    secured = listener(address)
    secured.link(AgentKeys.of(SECRET, JOB))

    assert secured.serve(lambda: secured.heard)
    assert (secured.refused, secured.event_texts) == ([], [])


def test_peer_with_the_key_of_another_job_is_rejected_and_reported(listener):
    secured = listener()
    secured.link(AgentKeys.of(SECRET, "job-2"))

    assert secured.serve(lambda: secured.refused)
    assert secured.refused[0] == "127.0.0.1"
    assert secured.heard == 0


def test_random_key_is_rejected_by_the_zap_gate(listener):
    secured = listener()
    secured.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))

    assert secured.serve(lambda: secured.refused)
    assert secured.heard == 0


def test_every_key_is_admitted_if_the_zap_gate_and_domain_are_missing(listener):
    secured = listener(gated=False)
    secured.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))

    assert not secured.serve(lambda: secured.heard, within_s=0.5), (
        "ZeroMQ rejects all peers of a ZAP domain without a gate"
    )

    open_to_all = listener(gated=False, keys=_WithoutDomain())
    open_to_all.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))
    assert open_to_all.serve(lambda: open_to_all.heard)


class _WithoutDomain:
    def secure(self, server):
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, ServerKeys.of(SECRET, JOB).own.secret)


@pytest.mark.parametrize(
    ("keys", "why"), [(None, NO_KEY), (AgentKeys.of(b"x" * 64, JOB), OTHER_SECRET)], ids=["no key", "another secret"]
)
def test_peer_without_the_secret_is_rejected_and_counted(listener, keys, why):
    secured = listener()
    # A peer without CURVE can close its connection before the server has read its mechanism or its address.
    # ZeroMQ's client does not connect again after a failed handshake, so the test connects further peers.
    reasons = (why,) if keys else (why, NO_PROTOCOL)
    expected = {f"a peer {where} was rejected: {one}" for where in WHERE for one in reasons}
    for _ in range(2 * MAX_UNSEEN):
        secured.link(keys)
        if secured.serve(lambda: secured.event_texts, within_s=1.5):
            break

    assert set(secured.event_texts) & expected
    assert not set(secured.event_texts) - expected
    assert secured.rejections.count >= 1
    assert (secured.heard, secured.refused) == (0, [])


@pytest.mark.parametrize("word", [b"GET / HTTP/1.1\r\n\r\n", bytes(4000), b""], ids=["http", "zeros", "nothing"])
def test_agent_is_admitted_after_peers_with_other_protocols(listener, word):
    secured = listener()
    for _ in range(2 * MAX_UNSEEN):
        with socket.create_connection((secured.address, secured.port)) as raw:
            raw.sendall(word)
        if secured.serve(lambda: secured.event_texts, within_s=1.0):
            break
    assert secured.event_texts in [[f"a peer {where} was rejected: {NO_PROTOCOL}"] for where in WHERE]
    assert secured.rejections.count == 1

    secured.link(AgentKeys.of(SECRET, JOB))
    assert secured.serve(lambda: secured.heard), "the server must still admit agents"
    secured.links.pop().close()
    secured.serve(lambda: False, within_s=0.4)
    assert secured.rejections.count == 1, "an agent that ends is not rejected"


CONNECT_ON_COMMAND = """
import socket, sys, time
print(flush=True)
sys.stdin.readline()
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(64)]
sys.stdin.readline()
"""


def test_agent_is_admitted_after_exhausted_descriptors_are_freed(listener):
    secured = listener()
    command = [sys.executable, "-c", CONNECT_ON_COMMAND, str(secured.port)]
    connecting = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    connecting.stdout.readline()  # wait for the start of the process, without a timeout
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 48), hard))
    try:
        connecting.stdin.write(b"\n")
        connecting.stdin.flush()
        is_exhausted = secured.serve(lambda: secured.connections.accept_error, within_s=20.0)
        secured.serve(lambda: False, within_s=0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connecting.communicate(b"\n", timeout=10)
    assert is_exhausted
    assert secured.connections.accept_error == errno.EMFILE

    secured.link(AgentKeys.of(SECRET, JOB))
    assert secured.serve(lambda: secured.heard, within_s=20.0)


def test_text_of_a_key_object_does_not_contain_the_key():
    keys = ServerKeys.of(SECRET, JOB)

    assert keys.own.secret.decode() not in repr(keys)
    assert ServerKeys.of(SECRET, JOB).own == ServerKeys.of(SECRET, "job-2").own, (
        "a user has one server key; the gate distinguishes jobs"
    )
    assert AgentKeys.of(SECRET, JOB).own != AgentKeys.of(SECRET, "job-2").own
    assert AgentKeys.of(SECRET, JOB).server_public == keys.own.public


# --- reports of rejections, without sockets


def test_rejected_address_is_reported_once_per_reason_and_counted():
    rejections = Rejections()
    for why in (OTHER_JOB, OTHER_JOB, NO_KEY, OTHER_JOB):
        rejections.reject("10.9.0.7", why)

    expected = ["a peer at 10.9.0.7 was rejected: another job's key", "a peer at 10.9.0.7 was rejected: no key"]
    assert (rejections.take(), rejections.take()) == (expected, [])
    assert (rejections.count, rejections.take_repeated(), rejections.take_repeated()) == (4, 2, 0)


def test_rejected_addresses_above_a_thousand_are_only_counted():
    rejections = Rejections()
    for i in range(MAX_ADDRESSES + 10):
        rejections.reject(f"10.0.{i // 256}.{i % 256}", NO_KEY)
    lines = rejections.take()

    assert len(lines) == MAX_ADDRESSES + 1
    assert lines[-1] == "peers at 1000 addresses were rejected; further peers are only counted"
    assert rejections.count == MAX_ADDRESSES + 10


def test_agent_that_ends_in_its_handshake_is_not_counted_as_rejected():
    rejections = Rejections()
    rejections.admit("10.0.0.2")
    rejections.reject("10.0.0.2", NO_PROTOCOL)
    assert (rejections.take(), rejections.count) == ([], 0)

    for _ in range(MAX_UNSEEN):
        rejections.reject("", NO_PROTOCOL)
    assert (rejections.take(), rejections.count) == ([], 0)

    rejections.reject("10.0.0.2", NO_KEY)
    rejections.reject("", NO_PROTOCOL)
    assert rejections.take() == [
        "a peer at 10.0.0.2 was rejected: no key",
        f"a peer with an unknown address was rejected: {NO_PROTOCOL}",
    ]
