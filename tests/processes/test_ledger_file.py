"""EFFICIENTLLM_LEDGER: each attempt of a run appends one line to a file of its user."""

import json
import os
import threading
from pathlib import Path

import pytest
from sink_examples import make_summary

from effllm.store import ledger_file
from effllm.store.ledger_file import LedgerFile, ledger_line
from effllm.store.run_folder import StoreUnavailable


def lines(folder):
    (path,) = folder.iterdir()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "ledger"


def test_completed_and_failed_runs_have_a_line_with_their_outcome(launch, folder):
    launch.python("loop.py", ledger=folder, run_name="good", price_per_gpu_hour=2.0, tags="project=a").done()
    failed = launch.python("loop.py", "--at", "5", "--end", "raise", ledger=folder, run_name="bad").wait()

    good, bad = lines(folder)
    assert (good["run_id"], good["status"], good["tags"]) == ("good", "completed", ["project=a"])
    assert (bad["run_id"], bad["status"]) == ("bad", "failed")
    summary = json.loads((Path(bad["folder"]) / "summary.json").read_bytes())
    assert bad["total_joules"] == summary["energy"]["total_joules"] > 0
    assert bad["gpu_hours"] == pytest.approx(summary["waterfall"]["device_seconds"] / 3600)
    assert (0.0 < good["wasted_gpu_hours"] < good["gpu_hours"], good["gpu_cost"] > 0) == (True, True)
    assert failed.our_errors == []


def test_run_without_a_run_folder_has_a_line(launch, folder):
    (folder.parent / "occupied").write_text("")
    launch.python("loop.py", ledger=folder, run_dir=folder.parent / "occupied").wait()

    assert [line["status"] for line in lines(folder)] == ["completed"]


def test_line_has_no_command_and_no_setting():
    assert not {"command", "argv", "config", "environment"} & set(ledger_line(make_summary(), None))


def test_file_is_readable_by_the_group_and_not_by_others(folder):
    ledger = LedgerFile(folder)
    ledger.append({"run_id": "a"})

    assert ledger.path.stat().st_mode & 0o777 == 0o640


def test_parallel_runs_lose_no_line(folder):
    def append(number):
        ledger = LedgerFile(folder)
        for index in range(50):
            ledger.append({"run": number, "index": index, "text": "x" * 5000})

    threads = [threading.Thread(target=append, args=(number,)) for number in range(4)]
    [one.start() for one in threads]
    [one.join() for one in threads]

    assert {(line["run"], line["index"]) for line in lines(folder)} == {(n, i) for n in range(4) for i in range(50)}


def test_torn_line_of_a_killed_process_does_not_join_the_next_line(folder):
    ledger = LedgerFile(folder)
    ledger.append({"run": 1})
    with ledger.path.open("a") as file:
        file.write('{"run": 2, "sta')
    ledger.append({"run": 3})

    texts = ledger.path.read_text().splitlines()
    assert [texts[0], texts[2]] == ['{"run":1}', '{"run":3}']


def test_failed_write_leaves_the_file_as_it_was(folder, monkeypatch):
    ledger = LedgerFile(folder)
    ledger.append({"run": 1})
    before, write = ledger.path.read_bytes(), os.write

    def full(file, data):
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(file, data[:-5])

    monkeypatch.setattr(ledger_file.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        ledger.append({"run": 2, "text": "x" * 100})

    assert ledger.path.read_bytes() == before


def test_link_of_another_file_is_not_followed(folder):
    ledger, target = LedgerFile(folder), folder.parent / "precious"
    target.write_text("mine\n")
    ledger.path.symlink_to(target)

    with pytest.raises(OSError, match="symbolic"):
        ledger.append({"run": 1})
    assert target.read_text() == "mine\n"


def test_ledger_that_fails_costs_the_run_only_a_warning(launch, folder):
    with pytest.raises(StoreUnavailable, match=r"EFFICIENTLLM_LEDGER=.*No such file"):
        LedgerFile(folder / "a" / "b")
    job = launch.python("loop.py", ledger=folder / "a" / "b").done()

    assert any("ledger is off" in event.text for event in job.ledger.events)
