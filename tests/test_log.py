"""The agent's log: a file that is made when there is something to say, and never waited for."""

import os
import time

import pytest

from effllm.agents.log import Log


def test_lines_are_kept_until_the_folder_is_known_and_stand_in_it_in_their_order(tmp_path):
    log = Log(3)
    log.line("one")
    log.attach(tmp_path / "logs")
    log.line("two", "warning")
    log.close()

    lines = (tmp_path / "logs" / "agent-3.log").read_text().splitlines()
    assert [line.partition("Z ")[2] for line in lines] == ["rank 3: one", "rank 3: two"]
    assert [(kind, text) for kind, text, _ in log.unsent] == [("agent", "one"), ("warning", "two")]


def test_an_agent_that_has_nothing_to_say_leaves_no_file(tmp_path):
    log = Log(0)
    log.attach(tmp_path / "logs")
    log.close()

    assert list(tmp_path.iterdir()) == []


def test_what_no_run_folder_has_taken_is_left_in_the_users_state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    log = Log(0)
    log.line("nobody answers")
    log.close()

    (file,) = tmp_path.rglob("agent-0.log")
    assert "nobody answers" in file.read_text()


@pytest.mark.fault("slow-disk")
def test_a_disk_that_stands_still_holds_up_no_line_and_no_end(tmp_path):
    os.mkfifo(tmp_path / "agent-0.log")  # to open it for writing waits for a reader
    log = Log(0)
    log.attach(tmp_path)
    began_s = time.monotonic()
    for number in range(1000):
        log.line(str(number))
    log.close()
    assert time.monotonic() - began_s < 5.0

    said = (tmp_path / "agent-0.log").read_text()  # to its end, which is the log's
    assert [line.rpartition(" ")[2] for line in said.splitlines()] == [str(number) for number in range(800, 1000)]
