"""Network faults on three hosts with a rank each: all packets dropped for a while, delay and loss, a lost host."""

import os
import signal
import subprocess
import sys
import time

import jobs
import psutil
import pytest
from after_fault import assert_whole
from hosts import slurm_ranks

pytestmark = pytest.mark.faults

STEP_S = 0.02
ALONE = dict.fromkeys(range(3), 0)  # local rank of each rank


@pytest.fixture
def job(hosts, launch):
    """Start a loop on each of three hosts, until the test ends it; return the hosts and their jobs."""
    three = hosts(3)
    started = slurm_ranks(launch, three, "--until", "enough", "--step-s", STEP_S)
    jobs.until(lambda: started[0].num_windows >= 3 and len(reporting(started[0])) == 3)
    return three, started


def reporting(first):
    last = first.ledger.windows[-1:]
    return {0, 1, 2} - set(last[0].coverage.missing_ranks) if last else set()


def finish(started):
    """End the loops; return the number of iterations of each rank."""
    for one in started:
        (one.folder / "enough").touch()
    return {rank: one.finish() for rank, one in enumerate(started)}


def server_of(job):
    (pid,) = job.find("effllm.server.process")
    return psutil.Process(pid)


@pytest.mark.fault("network-cut")
@pytest.mark.parametrize("seconds", [7, pytest.param(45, marks=[pytest.mark.long, pytest.mark.timeout(240)])])
def test_reports_arrive_after_a_cut_link_is_restored(job, seconds):
    three, started = job
    server = server_of(started[0])
    before = server.memory_info().rss
    three[2].cut()
    windows = started[0].num_windows
    time.sleep(seconds)
    jobs.until(lambda: started[0].num_windows > windows + 1)  # windows close without rank 2 after the deadline
    grown = server.memory_info().rss - before
    three[2].heal()
    jobs.until(lambda: len(reporting(started[0])) == 3)

    summary = assert_whole(started[0].ledger, finish(started), local_ranks=ALONE)
    assert summary.coverage.reports_lost == 0
    assert summary.coverage.reports_late > 0
    assert summary.events["missing"] > 0
    assert grown < 30e6
    assert all(one.max_step_s() < STEP_S + 1.0 for one in started)


@pytest.mark.fault("slow-network")
def test_slow_and_lossy_network_changes_no_total(job):
    three, started = job
    for host in three[1:]:
        host.impair(delay_s=0.1, loss=0.05)
    before = started[0].num_windows
    jobs.until(lambda: started[0].num_windows >= before + 30)

    summary = assert_whole(started[0].ledger, finish(started), local_ranks=ALONE)
    assert summary.coverage.reports_lost == 0
    assert all(one.max_step_s() < STEP_S + 1.0 for one in started)


@pytest.mark.fault("host-lost")
def test_ranks_of_a_lost_host_are_missing_and_the_job_ends(job):
    three, started = job
    three[2].cut()
    for pid in list(jobs.processes(started[2].token)):
        os.kill(pid, signal.SIGKILL)
    jobs.until(lambda: reporting(started[0]) == {0, 1})
    for one in started[:2]:
        (one.folder / "enough").touch()
    for one in started[:2]:
        assert one.wait().code == 0
        assert one.max_step_s() < STEP_S + 1.0
    assert not started[0].left()
    ledger = started[0].ledger
    summary = ledger.summary

    assert summary.status == "killed"  # all ranks of a host are lost
    for rank in (0, 1):
        done = len(started[rank].output()["steps"])
        assert sum(row.tokens for row in ledger.ranks if row.rank == rank) == 100 * done
    assert ledger.windows[-1].coverage.missing_ranks == (2,)
    assert summary.coverage.missing_ranks == (2,)
    assert summary.energy.total_joules is None  # energy is missing in part, so there is no total
    assert summary.energy.measured_joules == pytest.approx(
        sum(row.energy_j for row in ledger.ranks if row.energy_j is not None), rel=1e-6
    )
    assert any("2" in text for text in ledger.event_texts("missing") + ledger.event_texts("rank_lost"))


LOOP = ("--iterations", 400, "--step-s", 0.02)


def ranks_reporting(job):
    windows = job.ledger.windows if job.num_windows else []
    return windows[-1].coverage.ranks_reporting if windows else 0


def stop(job, module):
    for pid in job.find(module):
        os.kill(pid, signal.SIGSTOP)
    return [psutil.Process(pid) for pid in job.find(module)]


@pytest.mark.fault("rank-0-moves")
@pytest.mark.parametrize("first_host", ["is lost", "still has an aggregator, which waits for a rank"])
def test_rank_0_on_another_host_continues_the_run_folder(hosts, launch, first_host):
    one, two, three = hosts(3)
    first, second = slurm_ranks(launch, (one, two), *LOOP, "--until", "for ever")
    jobs.until(lambda: first.num_windows >= 5 and ranks_reporting(first) == 2)
    if first_host == "is lost":
        for job in (first, second):
            job.end()
    else:
        # Rank 1 cannot send a bye, so the aggregator still counts it as connected.
        stopped = stop(second, "effllm.agent.agent")
        for job in (first, second):
            job.process.kill()
            job.process.wait()

    again = slurm_ranks(launch, (two, three), *LOOP)  # the job has the same id after a requeue
    for job in again:
        assert job.wait().code == 0, job.stderr
    if first_host != "is lost":
        for process in stopped:
            process.kill()
    assert not again[0].left() and not first.left()
    ledger = again[0].ledger  # all ranks have the same folder
    summary = ledger.summary

    assert (summary.status, summary.attempts) == ("completed", 2)
    before, after = summary.goodput.attempts
    assert (before.first, after.first, after.last) == (1, 1, 400)
    assert summary.goodput.redone_iterations == before.last, "it logs numbers from 1 again"
    assert summary.goodput.seconds["restart_gap"] > 0.0
    assert sum(summary.goodput.seconds.values()) == pytest.approx(summary.goodput.elapsed_s, rel=1e-6)
    of_second = [row for row in ledger.ranks if row.attempt == 2]
    assert {row.rank for row in of_second} == {0, 1}
    assert {row.host for row in of_second} == {two.name, three.name}
    assert sum(row.tokens for row in of_second) == 2 * 400 * 100


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


def test_hosts_have_their_own_addresses_and_links_that_can_be_slow_lossy_or_cut(pair, hosts):
    one, two = pair
    assert one.run("hostname").stdout == "host1\n"
    assert fetched_s(one, f"[{two.address6}]")
    assert fetched_s(one, "127.0.0.1") is None, "a loopback of its own"
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
    hosts.close()
    assert one.namespace not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
