"""The nth aggregator is killed in its nth write: the files have every line exactly once."""

import time

import jobs
import pytest
from test_faults_storm import TOKENS, WINDOW_S, WINDOWS, FakeAgent, aggregator  # noqa: F401 - a fixture

from effllm.network.transport import make_context

pytestmark = pytest.mark.faults

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
def test_aggregator_killed_in_any_write_loses_no_line(lives, request, monkeypatch):
    child, orders, _ = request.getfixturevalue("aggregator")  # the aggregator starts after `lives` is set up
    context = make_context()
    agents = [FakeAgent(context, orders.endpoint, rank, AGENTS) for rank in range(AGENTS)]
    began_s, measured = time.monotonic(), 0
    while not child.done:
        now_s = time.monotonic()
        assert now_s < began_s + 300, [(one.rank, len(one.outbox), one.is_welcome) for one in agents if not one.is_over]
        # The last windows are measured after the last aggregator was killed.
        if measured < (WINDOWS if lives() > LIVES else WINDOWS - 5) and now_s - began_s >= (measured + 1) * WINDOW_S:
            measured += 1
            for agent in agents:
                agent.measure(measured)
        for agent in agents:
            agent.talk(measured == WINDOWS)
        child._started = 0  # without this line, the delay before a start would increase with each start
        child.look(now_s)
        time.sleep(0.005)
    for agent in agents:
        agent.link.close()
    context.destroy(linger=0)

    ledger = jobs.Ledger(jobs.Path(orders.folder))
    summary = ledger.summary
    print(f"{lives()} aggregators in {time.monotonic() - began_s:.1f} s")
    assert lives() == LIVES + 1
    assert (summary.status, summary.tokens) == ("completed", AGENTS * WINDOWS * TOKENS)
    assert summary.coverage.reports_lost == 0
    rows = sorted((row.rank, row.window) for row in ledger.ranks)
    assert rows == [(rank, window) for rank in range(AGENTS) for window in range(1, WINDOWS + 1)]
    assert [report.window for report in ledger.windows if not report.correction] == list(range(1, WINDOWS + 1))
    assert not list(ledger.folder.glob(".*"))
