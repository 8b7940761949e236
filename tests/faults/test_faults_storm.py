"""An aggregator is killed repeatedly, while each of forty agents sends ten reports per second."""

import contextlib
import os
import signal
import time

import jobs
import pytest
from builders import gpu, hello, row

from effllm.agent.children import AggregatorChild
from effllm.config.settings import read_config
from effllm.network.listening import listen
from effllm.network.transport import Link, Outbox, make_context
from effllm.records.orders import Orders
from effllm.records.rank import Event
from effllm.records.wire import Ack, AgentEvent, Bye, ByeSeen, Welcome

pytestmark = pytest.mark.faults

AGENTS, WINDOWS, KILLS = 40, 100, 5
WINDOW_S = 0.1
TOKENS = 7


class FakeAgent:
    """Sends an agent's messages, with reports from the test."""

    def __init__(self, context, endpoint, rank, world_size):
        device = gpu(f"GPU-{rank}", kind="simulated", simulated=True)
        self._hello = hello(rank, world_size, devices=(device,))
        self.rank, self.id = rank, self._hello.agent
        self.outbox = Outbox(1000)
        self.link = Link(context, endpoint)
        self.link.connect()
        self.is_welcome = self.is_over = False
        self._said_hello_s = 0.0
        self.events = []

    def measure(self, window):
        self.outbox.add_report(row(self.rank, window, tokens=TOKENS, final=window == WINDOWS))

    def talk(self, ended):
        if self.link.has_new_connection():
            self.is_welcome = False
            self.outbox.mark_all_unsent()
        if self.link.connected and not self.is_welcome and time.monotonic() - self._said_hello_s > 0.5:
            self._said_hello_s = time.monotonic()
            self.link.send(self._hello)
        for message in self.link.receive():
            if isinstance(message, Welcome):
                self.is_welcome = True
            elif isinstance(message, Ack):
                self.outbox.drop_acknowledged(message.sequence)
            elif isinstance(message, ByeSeen):
                self.is_over = self.is_over or not len(self.outbox)
        if self.is_welcome:
            self.link.send_reports(self.outbox)
        while self.is_welcome and self.events:
            if not self.link.send(self.events[-1]):
                return
            self.events.pop()
        if self.is_welcome and ended and not len(self.outbox):
            self.link.send(Bye(self.id, self.rank, "completed", WINDOWS * 10))


@contextlib.contextmanager
def agents_of(orders, world_size):
    """Yield the agents of a job; after the test, their sockets are closed."""
    context = make_context()
    agents = [FakeAgent(context, orders.endpoint, rank, world_size) for rank in range(world_size)]
    yield agents
    for agent in agents:
        agent.link.close()
    context.destroy(linger=0)


def turns(child, agents, windows=WINDOWS, is_due=lambda _measured: True, within_s=400.0):
    """Let the agents measure and send until the aggregator ends; yield the number of measured windows every 5 ms.

    is_due: whether the next window may be measured, after a number of windows.
    """
    began_s, measured = time.monotonic(), 0
    while not child.done:
        now_s = time.monotonic()
        assert now_s < began_s + within_s, [(one.rank, len(one.outbox)) for one in agents if not one.is_over][:5]
        if measured < windows and is_due(measured) and now_s - began_s >= (measured + 1) * WINDOW_S:
            measured += 1
            for agent in agents:
                agent.measure(measured)
        for agent in agents:
            agent.talk(measured == windows)
        child.replace_if_dead(now_s)
        yield measured
        time.sleep(0.005)


def assert_each_window_once(ledger, world_size):
    summary = ledger.summary
    assert (summary.status, summary.tokens) == ("completed", world_size * WINDOWS * TOKENS)
    assert summary.coverage.reports_lost == 0
    rows = sorted((row.rank, row.window) for row in ledger.ranks)
    assert rows == [(rank, window) for rank in range(world_size) for window in range(1, WINDOWS + 1)]
    # If some agents return much later than others, windows may close without the late agents; corrections follow.
    assert [report.window for report in ledger.windows if not report.correction] == list(range(1, WINDOWS + 1))


@pytest.fixture
def aggregator(launch, tmp_path, monkeypatch):
    """An aggregator without rank 0's agent; after a crash, a new aggregator starts on the same socket."""
    job = launch._job()
    monkeypatch.setenv(*job.token.split("="))
    listener = listen("127.0.0.1")
    output = os.open(job.folder / "stdout.txt", os.O_WRONLY | os.O_CREAT)
    orders = Orders(
        config=read_config(launch.environ({})),
        job="job",
        endpoint=f"tcp://127.0.0.1:{listener.getsockname()[1]}",
        folder=str(tmp_path / "runs" / "one"),
        listen_descriptor=listener.fileno(),
        stdout_descriptor=output,
    )
    child = AggregatorChild(orders, lambda _event: None, lambda _why: None)
    child.has_served = True  # the agents of these tests are no agent of this child
    child.start_process()
    yield child, orders, job
    listener.close()
    os.close(output)


@pytest.mark.timeout(500)
@pytest.mark.fault("aggregator-sigkill", "duplicates")
def test_repeatedly_killed_aggregator_loses_no_report(aggregator):
    child, orders, job = aggregator
    kills, is_back = 0, True

    def is_due(measured):
        return measured < WINDOWS - 1 or (kills == KILLS and is_back)  # the last window follows the last kill

    with agents_of(orders, AGENTS) as agents:
        for measured in turns(child, agents, is_due=is_due):
            is_back = is_back or all(one.is_welcome and one.link.connected for one in agents)
            if is_back and kills < KILLS and measured >= (kills + 1) * WINDOWS // (KILLS + 1):
                for pid in job.find("effllm.server.process")[:1]:
                    os.kill(pid, signal.SIGKILL)
                    kills, is_back = kills + 1, False
                    for agent in agents:
                        agent.is_welcome = False

    assert kills == KILLS
    assert [one.outbox.num_lost for one in agents] == [0] * AGENTS
    assert_each_window_once(jobs.Ledger(jobs.Path(orders.folder)), AGENTS)


@pytest.mark.timeout(300)
def test_events_of_a_million_memory_errors_delay_no_window(aggregator):
    child, orders, _ = aggregator
    windows, notes, noted = 20, 400, 0
    with agents_of(orders, 4) as agents:
        for measured in turns(child, agents, windows, within_s=240.0):
            for agent in agents if measured > noted else ():
                text = "uncorrected memory errors"
                event = Event(time.time(), "ecc", text, device=f"GPU-{agent.rank}", count=1_000_000 // 4 // notes)
                agent.events += [AgentEvent(agent.id, agent.rank, event)] * (notes // windows)
            noted = measured

    ledger = jobs.Ledger(jobs.Path(orders.folder))
    lines = [event for event in ledger.events if event.kind == "ecc"]
    assert ledger.summary.events["ecc"] == sum(line.count for line in lines) == 1_000_000
    assert len(lines) < 4 * notes
    assert (ledger.folder / "events.jsonl").stat().st_size < 10e6
    assert [report.window for report in ledger.windows] == list(range(1, windows + 1))
    assert {report.coverage.ranks_reporting for report in ledger.windows} == {4}
    assert not ledger.summary.events.keys() & {"missing", "late", "reports_lost", "throttled"}


AGENTS, LIVES = 3, 16


@pytest.fixture
def lives(tmp_path, monkeypatch):
    """Return a function that counts the aggregators so far; see ``scripts/dying``."""
    folder = tmp_path / "lives"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(jobs.SCRIPTS / "dying"), prepend=":")
    monkeypatch.setenv("DYING_IN", str(folder))
    return lambda: len(list(folder.iterdir()))


@pytest.mark.timeout(400)
@pytest.mark.fault("aggregator-sigkill", "duplicates")
def test_aggregator_killed_in_any_write_loses_no_line(lives, request):
    child, orders, _ = request.getfixturevalue("aggregator")  # the aggregator starts after `lives` is set up
    with agents_of(orders, AGENTS) as agents:
        # The last windows are measured after the last aggregator was killed.
        for _ in turns(child, agents, is_due=lambda done: done < WINDOWS - 5 or lives() > LIVES, within_s=300.0):
            child._num_started = 0  # without this line, the delay before a start would increase with each start

    ledger = jobs.Ledger(jobs.Path(orders.folder))
    assert lives() == LIVES + 1
    assert_each_window_once(ledger, AGENTS)
    assert not list(ledger.folder.glob(".*"))
