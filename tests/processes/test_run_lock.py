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
from effllm.store.reader import read_own_json
from effllm.store.run_lock import Holder, restart_id_of, take_lock

FIRST = Holder(restart_id="77", job="first", endpoint="tcp://127.0.0.1:5000", host="node0", pid=1)
NEXT = Holder(restart_id="77", job="second", endpoint="tcp://127.0.0.1:5001", host="node1", pid=2)
OTHER = Holder(restart_id="78", job="third", endpoint="tcp://127.0.0.1:5002", host="node0", pid=3)


@pytest.fixture
def one(tmp_path):
    return tmp_path / "runs" / "one"


@pytest.fixture
def locked(one):
    """Return a function that takes the lock of a run folder; all locks are released after the test."""
    taken = []

    def lock(holder, ask=lambda _: None, wait_s=0.1):
        taken.append(take_lock(one, holder, ask, wait_s))
        return taken[-1]

    yield lock
    for lock in taken:
        lock.release()


def test_lock_file_names_its_holder_and_is_private(one, locked):
    lock = locked(FIRST)

    assert (lock.folder, lock.why_other) == (one, "")
    assert read_own_json(one / "lock", Holder) == FIRST
    assert stat.S_IMODE((one / "lock").stat().st_mode) == 0o600
    assert stat.S_IMODE(one.stat().st_mode) == 0o700
    assert not os.get_inheritable(lock._descriptor)
    lock.release()
    assert not (one / "lock").exists()


def test_next_attempt_retries_until_the_folder_is_released(one, locked):
    lock, requests = locked(FIRST), []

    def ask(holder):
        requests.append(holder)
        if len(requests) == 2:
            threading.Thread(target=lock.release).start()

    after = locked(NEXT, ask, wait_s=20.0)
    assert requests == [FIRST, FIRST]
    assert (after.folder, after.why_other) == (one, "")
    assert read_own_json(one / "lock", Holder) == NEXT


@pytest.mark.parametrize("other", [OTHER, Holder(job="another"), Holder()])
def test_another_job_gets_another_folder_and_requests_no_release(one, locked, other):
    locked(FIRST if other.restart_id else Holder(job="first"))
    requests = []

    second, third = (locked(other, requests.append) for _ in range(2))
    assert (second.folder.name, third.folder.name, requests) == ("one-2", "one-3", [])
    assert second.why_other == third.why_other == f"another run is writing to {one}"


def test_wait_for_the_holder_of_a_lock_ends_at_its_timeout(locked):
    locked(FIRST)

    assert locked(NEXT, wait_s=0.2).folder.name == "one-2"


def test_lock_of_an_ended_process_is_free(one, locked):
    program = f"""
import os
from pathlib import Path
from effllm.store.run_lock import Holder, take_lock
lock = take_lock(Path({str(one)!r}), Holder(restart_id="77", job="first"))
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9
    assert (one / "lock").exists()

    assert locked(NEXT).folder == one


def test_run_that_completes_during_the_wait_for_its_lock_is_not_continued(one, locked):
    lock = locked(FIRST)

    def complete():
        (one / "summary.json").write_text(json.dumps({"status": "completed"}))
        lock.release()

    threading.Timer(0.3, complete).start()
    after = locked(OTHER, wait_s=20.0)
    assert (after.folder.name, after.why_other) == ("one-2", "")
    assert [path.name for path in one.iterdir()] == ["summary.json"]


OLD = "it has schema_version 3, and this version of effllm reads only 5: use the version of effllm that wrote it"


@pytest.mark.parametrize(
    ("name", "document", "why_other"),
    [
        ("summary.json", {"status": "completed"}, ""),
        ("run.json", {"schema_version": 3}, f"{{}} is not continued: {OLD}"),
    ],
)
def test_only_a_run_of_this_version_that_is_not_completed_is_continued(one, locked, name, document, why_other):
    for folder, content in ((one, document), (one.with_name("one-2"), {"status": "killed"})):
        folder.mkdir(parents=True)
        (folder / name).write_text(json.dumps(content))

    lock = locked(FIRST)
    assert (lock.folder.name, lock.why_other) == ("one-2", why_other.format(one))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"run": 7}', b"\xff" * 9000])
def test_lock_with_an_invalid_lock_file_is_treated_as_held(one, locked, content):
    locked(FIRST)
    (one / "lock").write_bytes(content)
    requests = []

    assert (locked(NEXT, requests.append).folder.name, requests) == ("one-2", [])


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
