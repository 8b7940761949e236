"""effllm/store/run_lock.py: a run folder has one writer at a time; the next writer is the next attempt of its job."""

import json
import os
import stat
import subprocess
import sys
import threading

import pytest
from cases import cases

from effllm.config.place import Place
from effllm.store import run_lock
from effllm.store.reader import read_own
from effllm.store.run_lock import Holder, restart_id_of, take

FIRST = Holder(restart_id="77", job="first", endpoint="tcp://127.0.0.1:5000", host="node0", pid=1)
NEXT = Holder(restart_id="77", job="second", endpoint="tcp://127.0.0.1:5001", host="node1", pid=2)
OTHER = Holder(restart_id="78", job="third", endpoint="tcp://127.0.0.1:5002", host="node0", pid=3)


def test_lock_file_names_its_holder_and_is_private(tmp_path):
    lock = take(tmp_path / "runs" / "one", FIRST)

    assert (lock.folder, lock.why_other) == (tmp_path / "runs" / "one", "")
    assert read_own(lock.folder / "lock", Holder) == FIRST
    assert stat.S_IMODE((lock.folder / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(lock.folder.stat().st_mode) == 0o700
    lock.release()
    assert not (lock.folder / "lock").exists()


def test_next_attempt_retries_until_the_folder_is_released(tmp_path):
    lock = take(tmp_path / "one", FIRST)
    requests = []

    def ask(holder):
        requests.append(holder)
        if len(requests) == 2:
            threading.Thread(target=lock.release).start()

    after = take(tmp_path / "one", NEXT, ask, wait_s=20.0)

    assert requests == [FIRST, FIRST]
    assert (after.folder, after.why_other) == (tmp_path / "one", "")
    assert read_own(after.folder / "lock", Holder) == NEXT
    after.release()


@pytest.mark.parametrize("one", [OTHER, Holder(job="another"), Holder()])
def test_another_job_gets_another_folder_and_requests_no_release(tmp_path, one):
    first = take(tmp_path / "one", FIRST if one.restart_id else Holder(job="first"))
    requests = []

    second = take(tmp_path / "one", one, requests.append, wait_s=0.1)
    third = take(tmp_path / "one", one, requests.append, wait_s=0.1)

    assert (second.folder.name, third.folder.name, requests) == ("one-2", "one-3", [])
    assert second.why_other == third.why_other == f"another run is writing to {tmp_path / 'one'}"
    for lock in (first, second, third):
        lock.release()


def test_wait_for_the_holder_of_a_lock_ends_at_its_timeout(tmp_path):
    lock = take(tmp_path / "one", FIRST)

    beside = take(tmp_path / "one", NEXT, wait_s=0.2)

    assert beside.folder.name == "one-2"
    lock.release()
    beside.release()


def test_lock_of_an_ended_process_is_free(tmp_path):
    program = f"""
import os
from pathlib import Path
from effllm.store.reader import read_own
from effllm.store.run_lock import Holder, take
lock = take(Path({str(tmp_path)!r}) / "one", Holder(restart_id="77", job="first"))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert (tmp_path / "one" / "lock").exists()

    lock = take(tmp_path / "one", NEXT, wait_s=0.1)

    assert lock.folder == tmp_path / "one"
    lock.release()


def test_run_that_completes_during_the_wait_for_its_lock_is_not_continued(tmp_path):
    lock = take(tmp_path / "one", FIRST)

    def complete():
        (lock.folder / "summary.json").write_text(json.dumps({"status": "completed"}))
        lock.release()

    threading.Timer(0.3, complete).start()
    after = take(tmp_path / "one", OTHER, wait_s=20.0)

    assert (after.folder.name, after.why_other) == ("one-2", "")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["summary.json"]
    after.release()


def test_only_a_run_that_is_not_completed_is_continued(tmp_path):
    for name, status in (("one", "completed"), ("one-2", "killed")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps({"status": status}))

    lock = take(tmp_path / "one", FIRST)

    assert (lock.folder.name, lock.why_other) == ("one-2", "")
    lock.release()


def test_run_of_another_version_is_not_continued(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").write_text('{"schema_version": 3}')

    lock = take(tmp_path / "one", FIRST)

    assert lock.folder.name == "one-2"
    assert lock.why_other == (
        f"{tmp_path / 'one'} is not continued: it has schema_version 3, and this version of effllm reads only 5: "
        "use the version of effllm that wrote it"
    )
    lock.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 7}', b"\xff" * 9000])
def test_lock_with_an_invalid_lock_file_is_treated_as_held(tmp_path, content):
    lock = take(tmp_path / "one", FIRST)
    (tmp_path / "one" / "lock").write_bytes(content)
    requests = []

    beside = take(tmp_path / "one", NEXT, requests.append, wait_s=0.1)

    assert (beside.folder.name, requests) == ("one-2", [])
    lock.release()
    beside.release()


def test_link_instead_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "one" / "lock").symlink_to(tmp_path / "mine")

    with pytest.raises(OSError):
        take(tmp_path / "one", FIRST)

    assert (tmp_path / "mine").read_text() == "precious"


def test_lock_descriptor_is_not_inherited(tmp_path):
    lock = take(tmp_path / "one", FIRST)

    assert not os.get_inheritable(lock._descriptor)
    lock.release()
    lock.release()


@cases(
    ("place", "name"),
    [
        ({"restart_id": "4711", "launcher": "slurm"}, "4711"),
        ({"restart_id": "", "launcher": "torchrun", "master_addr": "127.0.0.1", "master_port": 29500},
         "127.0.0.1:29500 on node0"),
        ({"restart_id": "", "launcher": "torchrun"}, ""),
        ({"restart_id": "", "launcher": "none"}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_all_attempts_of_a_run_share_one_name(place, name):
    assert restart_id_of(Place(**place), "node0") == name


def test_lock_wait_exceeds_the_time_in_which_an_aggregator_ends():
    assert 5.0 < run_lock.LOCK_WAIT_S < 10.0
