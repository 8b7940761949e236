"""An aggregator is killed repeatedly, while each of forty agents sends ten reports per second."""

import contextlib
import os
import signal
import time

import jobs
import msgspec
import psutil
import pytest
from sink_examples import make_row

from effllm.agent.children import AggregatorChild
from effllm.config.settings import read_config
from effllm.network.listening import listen
from effllm.network.transport import AgentLink, Outbox, make_context
from effllm.records.orders import Orders
from effllm.records.rank import Device, Event, ParameterCount
from effllm.records.wire import Ack, AgentEvent, Bye, ByeSeen, Hello, Reports, Welcome

pytestmark = pytest.mark.faults

AGENTS, WINDOWS, KILLS = 40, 100, 5
WINDOW_S = 0.1
TOKENS = 7


class FakeAgent:
    """Sends an agent's messages, with reports from the test."""

    def __init__(self, context, endpoint, rank, world_size=AGENTS):
        self.rank, self.id = rank, f"agent-{rank}"
        self.world_size = world_size
        self.outbox = Outbox(1000)
        self.link = AgentLink(context, endpoint)
        self.link.connect()
        self.is_welcome = self.is_over = False
        self.max_waiting = 0
        self._said_hello_s = 0.0
        self.events = []

    def measure(self, window):
        row = make_row(
            self.rank,
            window * 10,
            agent=self.id,
            sequence=window,
            window=window,
            iteration_first=window * 10 - 9,
            tokens=TOKENS,
            loss=None,
            final=window == WINDOWS,
        )
        devices = tuple(msgspec.structs.replace(device, device=f"GPU-{self.rank}") for device in row.devices)
        self.outbox.add_report(msgspec.structs.replace(row, devices=devices))
        self.max_waiting = max(self.max_waiting, len(self.outbox))

    def talk(self, ended):
        if self.link.is_new():
            self.is_welcome = False
            self.outbox.send_again()
        if self.link.connected and not self.is_welcome and time.monotonic() - self._said_hello_s > 0.5:
            self._said_hello_s = time.monotonic()
            device = Device(key=f"GPU-{self.rank}", kind="simulated", name="by hand", simulated=True)
            place = {
                "rank": self.rank,
                "local_rank": self.rank,
                "world_size": self.world_size,
                "host": "here",
                "role": "trainer",
            }
            self.link.send(
                Hello(
                    job="job",
                    agent=self.id,
                    devices=(device,),
                    parameters=ParameterCount(1000),
                    log_interval=10,
                    **place,
                )
            )
        for message in self.link.receive():
            if isinstance(message, Welcome):
                self.is_welcome = True
            elif isinstance(message, Ack):
                self.outbox.drop_acknowledged(message.sequence)
            elif isinstance(message, ByeSeen):
                self.is_over = self.is_over or not len(self.outbox)
        while self.is_welcome and (rows := self.outbox.unsent()):
            if not self.link.send(Reports(tuple(rows), self.outbox.lost, 0.0)):
                return
            self.outbox.mark_sent(len(rows))
        while self.is_welcome and self.events:
            if not self.link.send(self.events[-1]):
                return
            self.events.pop()
        if self.is_welcome and ended and not len(self.outbox):
            self.link.send(Bye(self.id, self.rank, "completed", WINDOWS * 10))


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
    child.start()
    yield child, orders, job
    listener.close()
    os.close(output)


@pytest.mark.timeout(500)
@pytest.mark.fault("aggregator-sigkill", "duplicates")
def test_repeatedly_killed_aggregator_loses_no_report(aggregator):
    child, orders, job = aggregator
    context = make_context()
    agents = [FakeAgent(context, orders.endpoint, rank) for rank in range(AGENTS)]
    ledger = jobs.Ledger(jobs.Path(orders.folder))
    began_s, measured, kills, back_s, killed_s, rss = time.monotonic(), 0, 0, [], None, 0
    deadline_s = began_s + 400
    while not child.done:
        now_s = time.monotonic()
        assert now_s < deadline_s, [(one.rank, len(one.outbox), one.is_welcome) for one in agents if not one.is_over][
            :5
        ]
        is_last = measured == WINDOWS - 1  # this window is measured after the last kill
        may_measure = measured < WINDOWS and (not is_last or (kills == KILLS and killed_s is None))
        if may_measure and now_s - began_s >= (measured + 1) * WINDOW_S:
            measured += 1
            for agent in agents:
                agent.measure(measured)
        for agent in agents:
            agent.talk(measured == WINDOWS)
        child.look(now_s)
        servers = job.find("effllm.server.process") if measured % 10 == 0 or killed_s is not None or is_last else []
        if killed_s is not None and servers and all(one.is_welcome and one.link.connected for one in agents):
            back_s.append(now_s - killed_s)
            killed_s = None
        if servers and killed_s is None and kills < KILLS and measured >= (kills + 1) * WINDOWS // (KILLS + 1):
            with contextlib.suppress(psutil.NoSuchProcess):
                rss = max(rss, psutil.Process(servers[0]).memory_info().rss)
            os.kill(servers[0], signal.SIGKILL)
            kills, killed_s = kills + 1, now_s
            for agent in agents:
                agent.is_welcome = False
        time.sleep(0.005)
    for agent in agents:
        agent.link.close()
    context.destroy(linger=0)

    summary = ledger.summary
    print(
        f"{kills} kills; all {AGENTS} agents were back after {', '.join(f'{seconds:.1f}' for seconds in back_s)} s; "
        f"at most {max(one.max_waiting for one in agents)} reports waited in one; {rss / 1e6:.0f} MB resident"
    )
    assert kills == KILLS
    assert (summary.status, summary.tokens) == ("completed", AGENTS * WINDOWS * TOKENS)
    assert summary.coverage.reports_lost == 0
    assert [one.outbox.lost for one in agents] == [0] * AGENTS
    rows = sorted((row.rank, row.window) for row in ledger.ranks)
    assert rows == [(rank, window) for rank in range(AGENTS) for window in range(1, WINDOWS + 1)]
    # If some agents return much later than others, windows may close without the late agents; corrections follow.
    assert [report.window for report in ledger.windows if not report.correction] == list(range(1, WINDOWS + 1))


@pytest.mark.timeout(300)
def test_events_of_a_million_memory_errors_delay_no_window(aggregator):
    child, orders, _ = aggregator
    context, windows, notes = make_context(), 20, 400
    agents = [FakeAgent(context, orders.endpoint, rank, world_size=4) for rank in range(4)]
    began_s, measured = time.monotonic(), 0
    while not child.done:
        now_s = time.monotonic()
        assert now_s < began_s + 240
        if measured < windows and now_s - began_s >= (measured + 1) * WINDOW_S:
            measured += 1
            for agent in agents:
                agent.measure(measured)
                text = "uncorrected memory errors"
                event = Event(time.time(), "ecc", text, device=f"GPU-{agent.rank}", count=1_000_000 // 4 // notes)
                agent.events += [AgentEvent(agent.id, agent.rank, event)] * (notes // windows)
        for agent in agents:
            agent.talk(measured == windows and not any(one.events for one in agents))
        child.look(now_s)
        time.sleep(0.005)
    for agent in agents:
        agent.link.close()
    context.destroy(linger=0)

    ledger = jobs.Ledger(jobs.Path(orders.folder))
    lines = [event for event in ledger.events if event.kind == "ecc"]
    assert ledger.summary.events["ecc"] == sum(line.count for line in lines) == 1_000_000
    assert len(lines) < 4 * notes
    assert (ledger.folder / "events.jsonl").stat().st_size < 10e6
    assert [report.window for report in ledger.windows] == list(range(1, windows + 1))
    assert {report.coverage.ranks_reporting for report in ledger.windows} == {4}
    assert not ledger.summary.events.keys() & {"missing", "late", "reports_lost", "throttled"}
