"""Admission of peers over real sockets, and reports of rejected peers."""

import itertools
import os
import resource
import socket
import subprocess
import sys
import time

import pytest
import zmq

from effllm.network.curve import AgentKeys, KeyPair, ServerKeys
from effllm.network.listening import listen
from effllm.network.peer_admission import PeerAdmission
from effllm.network.transport import Link, ServerSocket, make_context
from effllm.records.wire import Heartbeat

SECRET, JOB = b"s" * 64, "job-1"
BEAT = Heartbeat("agent", 0, 0, "step", 0.0)
REJECTED = "a peer at {} was rejected: it does not have the job's key; further peers are counted"


class Listener:
    """A secured socket of an aggregator on a listening descriptor, as in the server."""

    def __init__(self, address="127.0.0.1", gated=True):
        keys = ServerKeys.from_secret(SECRET, JOB)
        self.context, self.agents = make_context(), make_context()
        self.admission = PeerAdmission(self.context, keys if gated else None)
        self.server = ServerSocket(self.context, keys)
        self.listener = listen(address)
        host = f"[{address}]" if ":" in address else address
        self.address, self.port = address, self.listener.getsockname()[1]
        self.endpoint = f"tcp://{host}:{self.port}"
        self.server.listen(self.endpoint, self.listener.detach())
        self.admission.monitor_socket(self.server.socket)
        self.links, self.heard, self.event_texts = [], 0, []

    @property
    def rejected(self):
        return self.admission.counts.get("unauthenticated", 0)

    def link(self, keys):
        link = Link(self.agents, self.endpoint, keys)
        link.connect()
        self.links.append(link)
        return link

    def serve(self, until, within_s=30.0):
        """Serve until ``until`` returns a true value or time is up; return the last value."""
        poller = zmq.Poller()
        for one in (self.server.socket, *self.admission.sockets):
            poller.register(one, zmq.POLLIN)
        deadline_s = time.monotonic() + within_s
        while not until() and time.monotonic() < deadline_s:
            poller.poll(20)
            self.event_texts += self.admission.admit_waiting_peers(time.monotonic())
            while self.server.receive():
                self.heard += 1
            for link in self.links:
                link.has_new_connection()
                link.send(BEAT)
        return bool(until())

    def close(self):
        for link in self.links:
            link.close()
        self.admission.close()
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
    secured.link(AgentKeys.from_secret(SECRET, JOB))

    assert secured.serve(lambda: secured.heard)
    assert (secured.rejected, secured.event_texts) == (0, [])


@pytest.mark.parametrize(
    "keys",
    [
        AgentKeys.from_secret(SECRET, "job-2"),
        AgentKeys(KeyPair.from_seed(os.urandom(32)), AgentKeys.from_secret(SECRET, JOB).server_public),
    ],
    ids=["another job", "random"],
)
def test_peer_with_another_key_is_rejected_and_its_address_is_reported(listener, keys):
    secured = listener()
    secured.link(keys)

    assert secured.serve(lambda: secured.rejected)
    assert secured.event_texts == [REJECTED.format("127.0.0.1")]
    assert secured.heard == 0


def test_no_key_is_admitted_if_the_zap_gate_is_missing(listener):
    secured = listener(gated=False)
    secured.link(AgentKeys(KeyPair.from_seed(os.urandom(32)), AgentKeys.from_secret(SECRET, JOB).server_public))

    assert not secured.serve(lambda: secured.heard, within_s=0.5)


#: A greeting of ZMTP 3.1 without keys.  A ZeroMQ peer may close its connection before the server has read this.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_peers_without_a_key_are_counted_and_one_is_reported(listener):
    secured = listener()
    for number in range(1, 4):
        with socket.create_connection((secured.address, secured.port)) as raw:
            raw.sendall(GREETING)
            assert secured.serve(lambda number=number: secured.rejected == number)

    assert secured.event_texts == [REJECTED.format("an unknown address")]


def test_peer_with_another_secret_is_rejected(listener):
    secured = listener()
    secured.link(AgentKeys.from_secret(b"x" * 64, JOB))

    assert secured.serve(lambda: secured.rejected)
    assert (secured.heard, secured.event_texts) == (0, [REJECTED.format("an unknown address")])


@pytest.mark.parametrize("word", [b"GET / HTTP/1.1\r\n\r\n", bytes(4000), b""], ids=["http", "zeros", "nothing"])
def test_agent_is_admitted_after_peers_with_other_protocols(listener, word):
    secured = listener()
    for _ in range(20):
        with socket.create_connection((secured.address, secured.port)) as raw:
            raw.sendall(word)
    secured.link(AgentKeys.from_secret(SECRET, JOB))

    assert secured.serve(lambda: secured.heard), "the server must still admit agents"
    secured.links.pop().close()
    secured.serve(lambda: False, within_s=0.4)
    assert (secured.rejected, secured.event_texts) == (0, []), "an agent that ends is not rejected"


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
    # The process of the tests has open files already; 32 more numbers include those that effllm reserves.
    taken = set(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    limit = next(n for n in itertools.count() if len(set(range(n)) - taken) == 32)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        connecting.stdin.write(b"\n")
        connecting.stdin.flush()
        is_exhausted = secured.serve(lambda: secured.event_texts, within_s=20.0)
        began_s = time.process_time()
        secured.serve(lambda: False, within_s=0.5)
        busy_s = time.process_time() - began_s
        with open(os.devnull):  # noqa: PTH123 - a descriptor was kept for files
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        connecting.communicate(b"\n", timeout=10)
    assert is_exhausted
    assert secured.event_texts == [
        f"no further rank can connect: Too many open files; the limit of open files (ulimit -n) is {limit}"
    ]
    assert busy_s < 0.25, "ZeroMQ does not try to accept all the time"

    secured.link(AgentKeys.from_secret(SECRET, JOB))
    assert secured.serve(lambda: secured.heard, within_s=20.0)


def test_text_of_a_key_object_does_not_contain_the_key():
    keys = ServerKeys.from_secret(SECRET, JOB)

    assert keys.own.secret.decode() not in repr(keys)
    assert ServerKeys.from_secret(SECRET, JOB).own == ServerKeys.from_secret(SECRET, "job-2").own, (
        "a user has one server key; the gate distinguishes jobs"
    )
    assert AgentKeys.from_secret(SECRET, JOB).own != AgentKeys.from_secret(SECRET, "job-2").own
    assert AgentKeys.from_secret(SECRET, JOB).server_public == keys.own.public
