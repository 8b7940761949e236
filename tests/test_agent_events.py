"""The events of an agent and its log file, which is made when there is something to write, and never waited for."""

import os
import time

import pytest

from effllm.agents.events import AgentEvents
from effllm.network.transport import decode_from_agent, encode
from effllm.records.rank import Event
from effllm.records.wire import AgentEvent


def test_lines_are_kept_until_the_folder_is_known_and_stand_in_it_in_their_order(tmp_path):
    events = AgentEvents(3)
    events.report("agent", "one")
    events.attach(tmp_path / "logs")
    events.report("warning", "two")
    events.close()

    lines = (tmp_path / "logs" / "agent-3.log").read_text().splitlines()
    assert [line.partition("Z ")[2] for line in lines] == ["rank 3: one", "rank 3: two"]
    assert [(event.kind, event.text) for event in taken(events)] == [("agent", "one"), ("warning", "two")]


def test_an_agent_without_events_leaves_no_file(tmp_path):
    events = AgentEvents(0)
    events.attach(tmp_path / "logs")
    events.close()

    assert list(tmp_path.iterdir()) == []


def test_what_no_run_folder_has_taken_is_left_in_the_users_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    events = AgentEvents(0)
    events.report("agent", "nobody answers")
    events.close()

    (file,) = tmp_path.rglob("agent-0.log")
    assert "nobody answers" in file.read_text()


@pytest.mark.fault("slow-disk")
def test_a_disk_that_stands_still_holds_up_no_line_and_no_end(tmp_path):
    os.mkfifo(tmp_path / "agent-0.log")  # to open it for writing waits for a reader
    events = AgentEvents(0)
    events.attach(tmp_path)
    began_s = time.monotonic()
    for number in range(1000):
        events.report("agent", str(number))
    events.close()
    assert time.monotonic() - began_s < 5.0

    said = (tmp_path / "agent-0.log").read_text()  # to its end, which is the log's
    assert [line.rpartition(" ")[2] for line in said.splitlines()] == [str(number) for number in range(100)]


def taken(events):
    """Take all that waits to be sent."""
    found = []
    while (event := events.unsent()) is not None:
        found.append(event)
        events.sent()
    return found


def test_a_storm_at_an_agent_is_a_hundred_events_and_a_count(tmp_path):
    events = AgentEvents(0)
    events.attach(tmp_path)
    for number in range(100_000):
        events.add(Event(1000.0, "ecc", f"{number} errors", count=10))
    events.add(Event(1000.0, "xid", "Xid 79"))
    events.end()
    sent = taken(events)
    events.close()

    assert len(sent) == 102
    assert sum(event.count for event in sent if event.kind == "ecc") == 1_000_000
    assert [event.text for event in sent if event.kind == "xid"] == ["Xid 79"]
    assert (tmp_path / "agent-0.log").stat().st_size < 20_000


def test_events_of_a_long_outage_are_counted_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("effllm.event_limit.MINUTE_S", 0.0)  # each event in a minute of its own
    events = AgentEvents(0)
    for _ in range(1000):
        events.add(Event(1000.0, "ecc", "1 error"))
    events.end()

    sent = taken(events)
    assert len(sent) <= 202
    assert sum(event.count for event in sent) == 1000


def test_a_long_text_is_cut_to_what_a_frame_takes():
    events = AgentEvents(0)
    events.report("warning", "x" * 20_000)

    (event,) = taken(events)
    assert decode_from_agent(encode(AgentEvent("agent", 0, event))).event.text == "x" * 8000
