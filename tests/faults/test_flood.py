"""Ten thousand unauthenticated peers at an aggregator's port: they delay no window, and no other peer is rejected."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jobs
import msgspec
import psutil
import pytest

from effllm.network.curve import ServerKeys
from effllm.network.secret import read_or_create
from effllm.server.run_facts import MAX_FACTS_BYTES
from effllm.store.reader import WindowLine

pytestmark = [pytest.mark.faults, pytest.mark.fault("unauthenticated-peers")]

FLOOD, HOSTILE = (Path(__file__).parents[1] / name for name in ("flood.py", "hostile_rank.py"))
PEERS = 10_000  # number of simultaneous peers; each takes one of the aggregator's 20,000 descriptors
KEYS = 500  # fewer peers with keys, because their handshakes use cryptography in the aggregator


needs_schedstat = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="how long threads wait for a processor is not known here"
)


class Starved:
    """Time in which threads of these processes were runnable without a processor."""

    def __init__(self, pids):
        self._tasks = [Path(f"/proc/{pid}/task") for pid in pids]
        self._waited_s = {}  # seconds by thread, also of ended threads
        self._known = []  # (unix time, sum)

    def look(self):
        """Record the time so far."""
        for path in [path for task in self._tasks for path in task.glob("*/schedstat")]:
            with contextlib.suppress(OSError):  # ended meanwhile
                self._waited_s[path] = int(path.read_text().split()[1]) / 1e9
        stolen_s = int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
        self._known.append((time.time(), stolen_s + sum(self._waited_s.values())))

    def between(self, begin_s, end_s):
        """Return the seconds between two times."""
        before = [waited_s for at_s, waited_s in self._known if at_s <= begin_s] or [self._known[0][1]]
        after = [waited_s for at_s, waited_s in self._known if at_s <= end_s] or [self._known[0][1]]
        return after[-1] - before[-1]


class Windows:
    """Reads the windows of a run while they are written, and calculates their delay without the wait for CPUs.

    Args:
        aggregator: aggregator of the run.
        ranks: ranks that report to the aggregator.
    """

    def __init__(self, aggregator, ranks):
        self._path = aggregator.ledger.folder / "windows-0001.jsonl"
        self._read = 0
        agents = [pid for rank in ranks for pid in rank.find("effllm.agent.agent")]
        self._starved = Starved([aggregator.job.process.pid, *agents, *(rank.process.pid for rank in ranks), "self"])
        self.seen = []  # (end of a window, time at which the test read its line)

    def look(self):
        """Read the new lines of the window file."""
        self._starved.look()
        text = self._path.read_bytes()[self._read :] if self._path.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self.seen.append((msgspec.json.decode(line, type=WindowLine).time_s, time.time()))

    def watch(self, process):
        """Read until a process has ended."""
        while process.poll() is None:
            self.look()
            time.sleep(0.02)
        self._starved.look()

    def late_s(self, since_s):
        """Return the delays of the windows that ended after `since_s`."""
        shown = [(ended_s, seen_s) for ended_s, seen_s in self.seen if ended_s > since_s]
        return [seen_s - ended_s - self._starved.between(ended_s, seen_s) for ended_s, seen_s in shown]


@pytest.fixture
def in_memory(tmp_path):
    """Yield a launcher with a folder in memory."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder, jobs.launching(Path(folder)) as launch:
        yield launch


@needs_schedstat
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("silent", PEERS),
        ("null", PEERS),
        ("key", KEYS),
        pytest.param("garbage", PEERS, marks=pytest.mark.long),
    ],
)
def test_flood_of_peers_delays_no_window_by_a_second(in_memory, tmp_path, kind, count):
    launch = in_memory
    secret = read_or_create(tmp_path / "secret")
    secured = {"security": "curve", "secret_file": tmp_path / "secret"}
    aggregator = launch.aggregator(**secured)
    enough = tmp_path / "enough"
    ranks = launch.ranks(aggregator, 2, "loop.py", "--until", enough, **secured)
    jobs.until(lambda: aggregator.ledger.num_windows >= 5)
    windows, began_s = Windows(aggregator, ranks), time.time()

    server_key = ServerKeys.from_secret(secret, "").own.public.decode()
    command = [sys.executable, str(FLOOD), kind, str(aggregator.port), str(count), "5", server_key]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as flood:
        windows.watch(flood)
        result = json.loads(flood.stdout.read())
    enough.touch()
    for rank in ranks:
        rank.done()
    assert not aggregator.job.left(within_s=10.0)
    summary = aggregator.ledger.summary

    late_s = windows.late_s(began_s)
    assert result["began"] >= count
    assert len(late_s) >= 10
    assert max(late_s) < 1.0
    assert (summary.status, summary.tokens) == ("completed", sum(100 * len(rank.output()["steps"]) for rank in ranks))
    assert summary.coverage.reports_lost == summary.coverage.reports_late == 0


@contextlib.contextmanager
def honest_ranks(launch, folder):
    """Yield the aggregator of a world of three ranks, the two honest ranks, and the key of the third rank."""
    key = folder / "secret"
    read_or_create(key)
    secured = {"security": "curve", "secret_file": key}
    aggregator = launch.aggregator(**secured)
    enough = folder / "enough"
    ranks = [
        launch.python(
            "loop.py", "--until", enough, environ=jobs.rank_environ(rank, 3), endpoint=aggregator.endpoint, **secured
        )
        for rank in range(2)
    ]
    jobs.until(
        lambda: (
            (aggregator.ledger.folder / "events.jsonl").exists() and len(aggregator.ledger.event_texts("joined")) == 2
        )
    )
    yield aggregator, ranks, key
    enough.touch()
    for rank in ranks:
        rank.done()


def flood(kind, aggregator, key, seconds, count):
    """Start a hostile third rank."""
    words = (kind, aggregator.endpoint, key, 3, seconds, count)
    return subprocess.Popen([sys.executable, str(HOSTILE), *map(str, words)], stdout=subprocess.PIPE)


@needs_schedstat
@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.long)])
def test_hostile_rank_delays_no_window_by_a_second(in_memory, tmp_path, seconds):
    with honest_ranks(in_memory, tmp_path) as (aggregator, ranks, key):
        server = psutil.Process(aggregator.job.process.pid)
        windows, before, peak = Windows(aggregator, ranks), server.memory_info().rss, 0
        with flood("rows", aggregator, key, seconds, count=500) as hostile:
            while hostile.poll() is None:
                windows.look()
                peak = max(peak, server.memory_info().rss)
                time.sleep(0.02)
    ledger = aggregator.ledger
    came_s = next(event.time_s for event in ledger.events if event.kind == "joined" and event.rank == 2)
    late_s = windows.late_s(came_s)  # until came_s, the other ranks waited for rank 2
    assert len(late_s) >= 10
    assert any("more waiting reports than an agent keeps" in text for text in ledger.event_texts("rejected"))
    assert max(late_s) < 1.0
    assert peak - before < 50e6


def test_changing_facts_of_a_rank_do_not_fill_run_json_or_memory(in_memory, tmp_path):
    with honest_ranks(in_memory, tmp_path) as (aggregator, _, key):
        server = psutil.Process(aggregator.job.process.pid)
        before = server.memory_info().rss
        with flood("facts", aggregator, key, 5, count=300) as hostile:
            hostile.wait()
        grown = server.memory_info().rss - before
    num_bytes = (aggregator.ledger.folder / "run.json").stat().st_size

    assert "fact-1-0" in aggregator.ledger.facts
    assert num_bytes < 2 * MAX_FACTS_BYTES
    assert grown < 50e6
