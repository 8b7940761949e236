"""Work in a process of its own, with limits and without a network."""

import os

import pytest

from effllm.config.isolated import NoAnswer, ask

WORK = """
import socket, time
from effllm.config.isolated import NoAnswer, answer

def work(document):
    print("noise")
    if document["do"] == "wait":
        time.sleep(60)
    if document["do"] == "connect":
        socket.create_connection(("127.0.0.1", 9))
    if document["do"] == "fill":
        bytearray(9 * 2**30)
    if document["do"] == "refuse":
        raise NoAnswer("a reason")
    return {"twice": 2 * document["number"]}

def main(_arguments):
    answer(work)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "work_of_test.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    return "work_of_test"


def test_answer_is_what_the_work_returns_and_not_what_it_prints(module):
    assert ask(module, "do", {"do": "", "number": 4}, 60.0) == {"twice": 8}


@pytest.mark.parametrize(
    ("document", "reason", "deadline_s"),
    [
        ({"do": "wait"}, "did not do the model in 1 s", 1.0),
        ({"do": "connect"}, "OSError: no network", 60.0),
        ({"do": "fill"}, "MemoryError", 60.0),
        ({"do": "refuse"}, "^a reason$", 60.0),
        ({"do": ""}, "KeyError: 'number'", 60.0),
    ],
)
def test_work_without_a_result_has_a_reason(module, document, reason, deadline_s):
    with pytest.raises(NoAnswer, match=reason):
        ask(module, "do", document, deadline_s)


def test_code_of_the_current_folder_is_not_run(module, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "json.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(folder)

    assert ask(module, "do", {"do": "", "number": 1}, 60.0) == {"twice": 2}
    assert not (folder / "ran").exists()
