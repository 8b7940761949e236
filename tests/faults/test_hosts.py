"""The hosts of other fault tests have real addresses and real links."""

import socket
import subprocess
import sys
import time

import jobs
import pytest

pytestmark = pytest.mark.faults

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 7), family=socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as server:
    print("ready", flush=True)
    while True:
        peer, _ = server.accept()
        with peer:
            while data := peer.recv(65536):
                peer.sendall(data)
"""

ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7), timeout=float(sys.argv[2])) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    word, began_s = bytes(int(sys.argv[3])), time.monotonic()
    peer.sendall(word)
    left = len(word)
    while left:
        left -= len(peer.recv(65536))
    print(time.monotonic() - began_s)
"""


@pytest.fixture
def echo():
    """Start an echo server on both addresses of a host."""
    started = []

    def start(host):
        for address in (host.address, host.address6):
            process = host.start(sys.executable, "-c", ECHO, address, stdout=subprocess.PIPE)
            started.append(process)
            assert process.stdout.readline() == b"ready\n"

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def ask(host, address, timeout_s=30.0, num_bytes=4):
    done = host.run(sys.executable, "-c", ASK, address, str(timeout_s), str(num_bytes))
    return float(done.stdout) if done.returncode == 0 else None


def test_hosts_have_separate_names_and_addresses_until_removal(hosts, echo):
    one, two = hosts(2)
    echo(two)

    assert one.run("hostname").stdout == "host1\n"
    assert socket.gethostname() not in ("host1", "host2")
    assert ask(one, two.address) is not None
    assert ask(one, two.address6) is not None
    assert ask(one, "127.0.0.1") is None, "a loopback of its own"

    hosts.close()
    assert one.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_cut_link_drops_packets_until_it_is_restored(hosts, echo):
    one, two = hosts(2)
    echo(two)

    two.cut()
    began_s = time.monotonic()
    assert ask(one, two.address, timeout_s=1.0) is None
    assert time.monotonic() - began_s >= 1.0, "silence, not a refusal"

    two.heal()
    assert ask(one, two.address) is not None


def test_a_link_can_be_slow_and_lossy(hosts, echo):
    one, two = hosts(2)
    echo(two)
    jobs.until(lambda: ask(one, two.address) < 0.1)

    two.impair(delay_s=0.05, loss=0.02)
    assert ask(one, two.address) >= 0.1, "0.05 s each way"
    assert ask(one, two.address6, num_bytes=300_000) >= 0.1, "large frames come through too"

    two.heal()
    jobs.until(lambda: ask(one, two.address) < 0.1)  # a busy machine may need some attempts


def test_a_name_can_resolve_differently_on_each_host(hosts):
    one, two = hosts(2)
    two.resolve("head", "127.0.1.1")
    one.resolve("head", one.address)

    assert one.run("getent", "hosts", "head").stdout.split()[0] == one.address
    assert two.run("getent", "hosts", "head").stdout.split()[0] == "127.0.1.1"
