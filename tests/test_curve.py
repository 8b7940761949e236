"""effllm/network/curve.py, connections.py, strangers.py: who is let in over real sockets, and who is told of."""

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
from effllm.network.discovery import listen
from effllm.network.strangers import MOST_ADDRESSES, NO_KEY, NO_PROTOCOL, OTHER_JOB, OTHER_SECRET, Strangers
from effllm.network.transport import AgentLink, ServerSocket, make_context
from effllm.schema import Beat

SECRET, JOB = b"s" * 64, "job-1"
BEAT = Beat("agent", 0, 0, "step", 0.0)


class Door:
    """A secured aggregator's socket on a listening descriptor, as the server has it."""

    def __init__(self, address="127.0.0.1", keys=None, gated=True):
        keys = keys or ServerKeys.of(SECRET, JOB)
        self.context, self.agents = make_context(), make_context()
        self.gate = Gate(self.context, keys) if gated else None
        self.server = ServerSocket(self.context, keys)
        self.strangers = Strangers()
        self.listener = listen(address)
        host = f"[{address}]" if ":" in address else address
        self.address, self.port = address, self.listener.getsockname()[1]
        self.endpoint = f"tcp://{host}:{self.port}"
        self.server.listen(self.endpoint, self.listener.detach())
        self.connections = Connections(self.server.socket, self.strangers)
        self.links, self.heard, self.refused, self.told = [], 0, [], []

    def link(self, keys):
        link = AgentLink(self.agents, self.endpoint, keys)
        link.connect()
        self.links.append(link)
        return link

    def serve(self, until, within_s=30.0):
        """Serve until a condition holds; return whether it came to that."""
        deadline_s = time.monotonic() + within_s
        while not until() and time.monotonic() < deadline_s:
            poller = zmq.Poller()
            for one in (self.server.socket, self.connections.socket, self.gate and self.gate.socket):
                if one:
                    poller.register(one, zmq.POLLIN)
            poller.poll(20)
            self.connections.look(time.monotonic())
            if self.gate:
                answered = self.gate.answer()
                for address, is_admitted in answered:
                    if is_admitted:
                        self.strangers.admit(address)
                    else:
                        self.refused.append(address)
                        self.strangers.refuse(address, OTHER_JOB)
            self.told += self.strangers.take(time.monotonic())
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
def door(monkeypatch):
    monkeypatch.setattr("effllm.network.strangers.NAMED_WITHIN_S", 0.1)
    made = []

    def make(*arguments, **more):
        made.append(Door(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_an_agent_of_the_job_is_let_in_on_a_socket_that_listened_before(door, address):
    if address == "::1" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    secured = door(address)
    secured.link(AgentKeys.of(SECRET, JOB))

    assert secured.serve(lambda: secured.heard)
    assert (secured.refused, secured.told) == ([], [])


def test_another_jobs_key_is_refused_at_the_gate_and_its_address_is_known(door):
    secured = door()
    secured.link(AgentKeys.of(SECRET, "job-2"))

    assert secured.serve(lambda: secured.refused)
    assert secured.refused[0] == "127.0.0.1"
    assert secured.heard == 0


def test_a_key_that_somebody_made_up_is_refused_at_the_gate(door):
    secured = door()
    secured.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))

    assert secured.serve(lambda: secured.refused)
    assert secured.heard == 0


def test_without_a_gate_any_key_would_do(door):
    secured = door(gated=False)
    secured.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))

    assert not secured.serve(lambda: secured.heard, within_s=0.5), (
        "ZeroMQ itself refuses where a ZAP domain has no gate"
    )

    open_to_all = door(gated=False, keys=_WithoutDomain())
    open_to_all.link(AgentKeys(KeyPair.of(os.urandom(32)), AgentKeys.of(SECRET, JOB).server_public))
    assert open_to_all.serve(lambda: open_to_all.heard)


class _WithoutDomain:
    def secure(self, server):
        server.set(zmq.CURVE_SERVER, 1)
        server.set(zmq.CURVE_SECRETKEY, ServerKeys.of(SECRET, JOB).own.secret)


@pytest.mark.parametrize(
    ("keys", "why"), [(None, NO_KEY), (AgentKeys.of(b"x" * 64, JOB), OTHER_SECRET)], ids=["no key", "another secret"]
)
def test_who_does_not_know_the_secret_is_refused_counted_and_named(door, keys, why):
    secured = door()
    secured.link(keys)

    assert secured.serve(lambda: secured.told)
    # A peer without CURVE may hang up before it could be told from a knock.
    expected = [f"a stranger at 127.0.0.1 was refused: {one}" for one in ({why, NO_PROTOCOL} if not keys else {why})]
    assert secured.told[0] in expected
    assert secured.strangers.count >= 1
    assert (secured.heard, secured.refused) == (0, [])


@pytest.mark.parametrize("word", [b"GET / HTTP/1.1\r\n\r\n", bytes(4000), b""], ids=["http", "zeros", "nothing"])
def test_what_is_no_agent_is_counted_and_named_and_does_no_harm(door, word):
    secured = door()
    with socket.create_connection((secured.address, secured.port)) as raw:
        raw.sendall(word)
    assert secured.serve(lambda: secured.told)
    assert secured.told == [f"a stranger at 127.0.0.1 was refused: {NO_PROTOCOL}"]
    assert secured.strangers.count == 1

    secured.link(AgentKeys.of(SECRET, JOB))
    assert secured.serve(lambda: secured.heard), "it lives on"
    secured.links.pop().close()
    secured.serve(lambda: False, within_s=0.4)
    assert secured.strangers.count == 1, "an agent that goes is no stranger"


KNOCK = """
import socket, sys, time
print(flush=True)
sys.stdin.readline()
knocks = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(64)]
sys.stdin.readline()
"""


def test_descriptors_that_run_out_are_told_once_and_come_back(door):
    secured = door()
    command = [sys.executable, "-c", KNOCK, str(secured.port)]
    knocking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    knocking.stdout.readline()  # it has started, however long that takes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 48), hard))
    try:
        knocking.stdin.write(b"\n")
        knocking.stdin.flush()
        told = secured.serve(lambda: secured.connections.accept_error, within_s=20.0)
        secured.serve(lambda: False, within_s=0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        knocking.communicate(b"\n", timeout=10)
    assert told
    assert secured.connections.accept_error == errno.EMFILE

    secured.link(AgentKeys.of(SECRET, JOB))
    assert secured.serve(lambda: secured.heard, within_s=20.0)


def test_keys_are_not_shown():
    keys = ServerKeys.of(SECRET, JOB)

    assert keys.own.secret.decode() not in repr(keys)
    assert ServerKeys.of(SECRET, JOB).own == ServerKeys.of(SECRET, "job-2").own, "the user's: the gate tells jobs apart"
    assert AgentKeys.of(SECRET, JOB).own != AgentKeys.of(SECRET, "job-2").own
    assert AgentKeys.of(SECRET, JOB).server_public == keys.own.public


# --- what is told of them: pure


def test_an_address_is_told_once_for_each_reason_and_counted_each_time():
    strangers = Strangers()
    for why in (OTHER_JOB, OTHER_JOB, NO_KEY, OTHER_JOB):
        strangers.refuse("10.9.0.7", why)

    expected = ["a stranger at 10.9.0.7 was refused: another job's key", "a stranger at 10.9.0.7 was refused: no key"]
    assert strangers.take(0.0) == expected
    assert strangers.take(1.0) == []
    assert strangers.count == 4


def test_a_thousand_addresses_are_told_and_the_rest_counted():
    strangers = Strangers()
    for i in range(MOST_ADDRESSES + 10):
        strangers.refuse(f"10.0.{i // 256}.{i % 256}", NO_KEY)
    told = strangers.take(0.0)

    assert len(told) == MOST_ADDRESSES + 1
    assert told[-1] == "strangers at 1000 addresses were refused; further ones are only counted"
    assert strangers.count == MOST_ADDRESSES + 10


@pytest.mark.parametrize("failure_first", [True, False])
def test_a_failure_and_who_hung_up_are_put_together_whichever_is_seen_first(failure_first):
    strangers = Strangers()
    strangers.admit("10.0.0.2")
    if failure_first:
        strangers.fail(OTHER_SECRET, 1.0)
    strangers.hang_up("10.0.0.2", 1.1)  # an agent of ours, at the same time
    strangers.hang_up("10.9.0.7", 1.1)
    if not failure_first:
        assert strangers.take(1.2) == []
        strangers.fail(OTHER_SECRET, 1.3)

    assert strangers.take(1.9) == []
    assert strangers.take(2.4) == ["a stranger at 10.9.0.7 was refused: another secret"]
    assert strangers.take(9.0) == []
    assert strangers.count == 1


def test_of_two_that_fail_at_once_nobody_is_told_the_others_reason():
    strangers = Strangers()
    strangers.fail(OTHER_SECRET, 1.0)
    strangers.hang_up("10.9.0.7", 1.0)
    strangers.fail(NO_KEY, 1.1)
    strangers.hang_up("10.9.0.8", 1.1)

    told = strangers.take(2.0)
    assert told == []
    told = strangers.take(2.1)
    assert told == [f"a stranger at 10.9.0.{n} was refused: another secret or no key" for n in (7, 8)]
    assert strangers.count == 2


def test_a_stranger_on_a_host_of_agents_is_named_and_an_agent_that_breaks_off_is_none():
    strangers = Strangers()
    strangers.admit("10.0.0.2")
    strangers.fail(NO_KEY, 1.0)
    strangers.hang_up("10.0.0.2", 1.1)
    assert strangers.take(2.1) == ["a stranger at 10.0.0.2 was refused: no key"]

    strangers.fail(NO_PROTOCOL, 3.0)
    strangers.hang_up("10.0.0.2", 3.1)
    assert strangers.take(4.1) == []
    assert strangers.count == 1


def test_what_nobody_saw_is_counted_and_told_without_an_address():
    strangers = Strangers()
    strangers.fail(NO_KEY, 1.0)
    assert strangers.take(1.9) == []
    assert strangers.take(5.9) == []
    assert strangers.take(6.1) == ["a stranger whose address could not be seen was refused: no key"]

    strangers.account()  # an agent is let in, and leaves
    strangers.end(7.0)
    assert (strangers.take(9.0), strangers.count) == ([], 1)
    strangers.end(10.0)  # one more has ended than was let in
    assert (strangers.take(11.1), strangers.count) == ([], 2)
    assert strangers.take(15.1) == [f"a stranger whose address could not be seen was refused: {NO_PROTOCOL}"]
    assert strangers.count == 2


def test_who_tries_again_and_again_is_told_one_reason():
    strangers = Strangers()
    for i in range(20):
        strangers.fail(OTHER_SECRET, 1.0 + 0.2 * i)
        strangers.hang_up("10.9.0.7", 1.02 + 0.2 * i)
    told = [line for i in range(100) for line in strangers.take(1.0 + 0.1 * i)]

    assert told == ["a stranger at 10.9.0.7 was refused: another secret"]
    assert strangers.count == 20


def test_an_address_that_comes_late_is_still_the_failures():
    strangers = Strangers()
    strangers.fail(OTHER_SECRET, 1.0)
    assert (strangers.take(2.5), strangers.count) == ([], 1)
    strangers.hang_up("10.9.0.7", 3.0)
    assert strangers.take(4.6) == ["a stranger at 10.9.0.7 was refused: another secret"]
    assert (strangers.take(9.0), strangers.count) == ([], 1)


def test_one_that_ends_unnoticed_beside_agents_is_counted_once():
    strangers = Strangers()
    strangers.account()
    strangers.end(1.0)  # a stranger's, taken for the agent's
    strangers.hang_up("10.9.0.7", 1.0)
    assert strangers.take(2.6) == [f"a stranger at 10.9.0.7 was refused: {NO_PROTOCOL}"]
    strangers.end(5.0)  # the agent's
    assert strangers.take(9.0) == []
    assert strangers.count == 1
