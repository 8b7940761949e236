"""The nth aggregator is killed in its nth write: the files have every line exactly once."""

import jobs
import pytest
from test_faults_storm import WINDOWS, agents_of, aggregator, assert_each_window_once, turns  # noqa: F401 - a fixture

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
