"""An agent's events and log file: the first event creates the file, and writing never blocks."""

import os
import time

import pytest

from effllm.agent.events import AgentEvents
from effllm.network.transport import decode_from_agent, encode
from effllm.records.rank import Event
from effllm.records.wire import AgentEvent


def test_log_lines_before_the_folder_is_known_are_written_in_order(tmp_path):
    events = AgentEvents(3)
    events.report("agent", "one")
    events.log.start_writing(tmp_path / "logs")
    events.report("warning", "two")
    events.log.close()

    lines = (tmp_path / "logs" / "agent-3.log").read_text().splitlines()
    assert [line.partition("Z ")[2] for line in lines] == ["rank 3: one", "rank 3: two"]
    assert [(event.kind, event.text) for event in taken(events)] == [("agent", "one"), ("warning", "two")]


def test_an_agent_without_events_leaves_no_file(tmp_path):
    events = AgentEvents(0)
    events.log.start_writing(tmp_path / "logs")
    events.log.close()

    assert list(tmp_path.iterdir()) == []


def test_events_without_a_run_folder_are_in_the_users_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    events = AgentEvents(0)
    events.report("agent", "no aggregator answers")
    events.log.close()

    (file,) = tmp_path.rglob("agent-0.log")
    assert "no aggregator answers" in file.read_text()


@pytest.mark.fault("slow-disk")
def test_blocked_log_file_delays_no_event_and_no_close(tmp_path):
    os.mkfifo(tmp_path / "agent-0.log")  # open() for writing blocks until the FIFO has a reader
    events = AgentEvents(0)
    events.log.start_writing(tmp_path)
    began_s = time.monotonic()
    for number in range(1000):
        events.report("agent", str(number))
    events.log.close()
    assert time.monotonic() - began_s < 5.0

    written = (tmp_path / "agent-0.log").read_text()  # this read ends when the log closes the FIFO
    assert [line.rpartition(" ")[2] for line in written.splitlines()] == [str(number) for number in range(100)]


def taken(events):
    """Take all unsent events."""
    found = []
    while (event := events.oldest_unsent()) is not None:
        found.append(event)
        events.remove_oldest()
    return found


def test_event_storm_is_limited_to_100_events_and_a_count(tmp_path):
    events = AgentEvents(0)
    events.log.start_writing(tmp_path)
    for number in range(100_000):
        events.add_event(Event(1000.0, "ecc", f"{number} errors", count=10))
    events.add_event(Event(1000.0, "xid", "Xid 79"))
    events.add_omitted_counts()
    sent = taken(events)
    events.log.close()

    assert len(sent) == 102
    assert sum(event.count for event in sent if event.kind == "ecc") == 1_000_000
    assert [event.text for event in sent if event.kind == "xid"] == ["Xid 79"]
    assert (tmp_path / "agent-0.log").stat().st_size < 20_000


def test_events_above_the_limit_are_counted_during_an_outage(monkeypatch):
    monkeypatch.setattr("effllm.records.events.MINUTE_S", 0.0)  # each event is in a separate minute
    events = AgentEvents(0)
    for _ in range(1000):
        events.add_event(Event(1000.0, "ecc", "1 error"))
    events.add_omitted_counts()

    sent = taken(events)
    assert len(sent) <= 202
    assert sum(event.count for event in sent) == 1000


def test_long_event_text_is_cut_to_fit_a_frame():
    events = AgentEvents(0)
    events.report("warning", "x" * 20_000)

    (event,) = taken(events)
    assert decode_from_agent(encode(AgentEvent("agent", 0, event))).event.text == "x" * 8000
