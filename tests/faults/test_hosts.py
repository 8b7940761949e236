"""The hosts of other fault tests have real addresses and real links."""

import subprocess
import sys
import time

import jobs
import pytest

pytestmark = pytest.mark.faults

FETCH = """
import sys, time, urllib.request
began_s = time.monotonic()
urllib.request.urlopen(f"http://{sys.argv[1]}/file", timeout=float(sys.argv[2])).read()
print(time.monotonic() - began_s)
"""


@pytest.fixture
def pair(hosts, tmp_path):
    """Return two hosts; the second one serves a file of 300 kB on all its addresses."""
    one, two = hosts(2)
    (tmp_path / "file").write_bytes(bytes(300_000))
    command = [sys.executable, "-m", "http.server", "--bind", "::", "--directory", str(tmp_path), "80"]
    with two.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        jobs.until(lambda: fetched_s(two, "127.0.0.1"))
        yield one, two
        server.kill()


def fetched_s(host, address, timeout_s=30.0):
    done = host.run(sys.executable, "-c", FETCH, address, str(timeout_s))
    return float(done.stdout) if done.returncode == 0 else None


def test_hosts_have_separate_names_and_addresses_until_removal(pair, hosts):
    one, two = pair

    assert one.run("hostname").stdout == "host1\n"
    assert fetched_s(one, two.address) and fetched_s(one, f"[{two.address6}]")
    assert fetched_s(one, "127.0.0.1") is None, "a loopback of its own"

    hosts.close()
    assert one.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


def test_link_can_be_slow_and_lossy_or_cut_until_it_is_restored(pair):
    one, two = pair
    jobs.until(lambda: fetched_s(one, two.address) < 0.1)

    two.impair(delay_s=0.05, loss=0.02)
    assert fetched_s(one, two.address) >= 0.2, "two round trips of 0.05 s each way"
    assert fetched_s(one, f"[{two.address6}]") >= 0.2, "large frames arrive too"

    two.cut()
    began_s = time.monotonic()
    assert fetched_s(one, two.address, timeout_s=1.0) is None
    assert time.monotonic() - began_s >= 1.0, "frames are dropped, and connections are not refused"

    two.heal()
    jobs.until(lambda: fetched_s(one, two.address) < 0.1)  # a busy machine may need some attempts
