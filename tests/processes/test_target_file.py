"""The files of jobs in a discovery folder: written, kept new, removed; files of other users stay as they are."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from pathlib import Path

import jobs
import pytest
from prometheus_server import pages

from effllm.sinks.prometheus import target_file
from effllm.sinks.prometheus.target_file import EXPIRES_S, TargetFile, instance_name

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")

OTHER_USER = 4711  # user number
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
NAME = "effllm.alice.mine.0123abcd.json"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "targets"
    made.mkdir()
    made.chmod(0o1777)
    return made


@pytest.fixture
def announce(folder):
    """Return a function that makes the file of a job; all files are closed after the test."""
    made = []

    def announce(instance="alice.mine.0123abcd"):
        made.append(TargetFile(folder, instance, "10.0.0.1:9788", {"__scheme__": "https"}))
        return made[-1]

    yield announce
    for one in made:
        one.close()


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(target_file, "BEAT_S", 0.01)


def make_old(path, age_s=10 * EXPIRES_S):
    os.utime(path, (time.time() - age_s,) * 2)


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_file_is_a_target_of_prometheus_that_the_group_can_read(folder, announce):
    old = os.umask(0o077)
    try:
        announce()
    finally:
        os.umask(old)

    (path,) = folder.iterdir()
    assert (path.name, stat.S_IMODE(path.stat().st_mode), path.stat().st_nlink) == (NAME, 0o640, 1)
    labels = {"instance": "alice.mine.0123abcd", "__scheme__": "https"}
    assert json.loads(path.read_text()) == [{"targets": ["10.0.0.1:9788"], "labels": labels}]


def test_file_is_removed_at_the_end_of_the_last_attempt(folder, announce):
    first, second = announce(), announce()
    first.close()
    assert names(folder) == [NAME]
    second.close()

    assert names(folder) == []


def test_file_of_a_running_job_stays_new_and_is_written_again(folder, announce, often):
    announce()
    path = folder / NAME
    make_old(path)
    jobs.until(lambda: time.time() - path.stat().st_mtime < 60)
    path.unlink()

    jobs.until(path.exists)


def test_job_does_not_remove_its_own_file(folder, announce, monkeypatch):
    monkeypatch.setattr(target_file, "BEAT_S", 0.0)
    announce()
    number = (folder / NAME).stat().st_ino
    for _ in range(3000):  # also between the new time of the file and the list of the folder
        make_old(folder / NAME)

    assert (folder / NAME).stat().st_ino == number


def test_job_removes_old_files_of_its_user_and_only_these(folder, announce):
    others = ("node_exporter.json", "effllm-notes.txt", "effllm.rules.yml", "effllm.json", "effllm.static.list.json")
    kept = [folder / "effllm.alice.new.00000001.json", *(folder / name for name in others)]
    old = [folder / "effllm.alice.old.00000002.json", folder / ".effllm.alice.old.00000003.json.0123abcd"]
    for path in (*kept, *old):
        path.write_text("[]")
        make_old(path, EXPIRES_S + 30)
    make_old(kept[0], EXPIRES_S - 30)
    announce()

    jobs.until(lambda: not any(path.exists() for path in old))
    assert all(path.exists() for path in kept)


@needs_root
def test_old_file_and_link_of_another_user_are_not_removed(folder, announce, often):
    outside = folder.parent / "outside.json"
    outside.write_text("content")
    file, link, mine = (
        folder / f"effllm.{name}.json" for name in ("bob.old.00000004", "alice.old.00000005", "alice.old.00000006")
    )
    link.symlink_to(outside)
    os.utime(link, (1, 1), follow_symlinks=False)
    for path in (file, mine):
        path.write_text("[]")
        make_old(path)
    os.chown(file, OTHER_USER, OTHER_USER)
    announce()

    jobs.until(lambda: not mine.exists())
    assert file.exists() and link.is_symlink()
    assert outside.read_text() == "content"


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe", pytest.param("file", marks=needs_root)])
def test_name_taken_by_another_user_is_neither_followed_nor_replaced(folder, announce, kind):
    path, outside = folder / NAME, folder.parent / "outside.json"
    outside.write_text("content")
    make = {
        "link": lambda: path.symlink_to(outside),
        "dangling link": lambda: path.symlink_to(folder.parent / "nothing"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "file": lambda: (path.write_text("theirs"), os.chown(path, OTHER_USER, OTHER_USER)),
    }
    make[kind]()
    before = path.lstat()

    with pytest.raises(OSError, match=f"{NAME} is not a file of this user"):
        announce()
    assert (path.lstat()[:3], outside.read_text()) == (before[:3], "content")
    assert names(folder) == [NAME], "no file is left over"


@needs_root
def test_file_of_another_user_is_not_removed_at_the_end(folder, announce):
    job = announce()
    (folder / NAME).unlink()
    (folder / NAME).write_text("theirs")
    os.chown(folder / NAME, OTHER_USER, OTHER_USER)
    job.close()

    assert (folder / NAME).read_text() == "theirs"


@pytest.mark.parametrize("mode", [0o777, 0o2770])
def test_folder_in_which_others_replace_files_is_not_used(folder, announce, mode):
    folder.chmod(mode)

    with pytest.raises(OSError, match=r"other users can replace files of this folder: chmod \+t"):
        announce()
    folder.chmod(mode | stat.S_ISVTX)
    announce()


def test_instance_is_a_safe_name_and_differs_by_user_and_folder():
    names = [
        instance_name("alice", "mine", Path("/a/mine")),
        instance_name("bob", "mine", Path("/a/mine")),
        instance_name("alice", "mine", Path("/b/mine")),
        instance_name('../"<b>\n', "../../etc/" + "x" * 500, Path("/b/mine")),
        instance_name("alice", "", None),
        instance_name("alice", "", None),
    ]

    assert len(set(names)) == len(names)
    assert names[0] == instance_name("alice", "mine", Path("/a/mine"))
    for name in names:
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
        assert len(name) < 200 and not name.startswith(".")


@pytest.mark.parametrize("where", ["targets", "file", "/proc/self/fdinfo"], ids=["missing", "file", "not writable"])
def test_unusable_folder_is_one_line_and_the_page_is_served(tmp_path, where):
    (tmp_path / "file").write_text("")
    lines, path = [], tmp_path / where  # /proc/self/fdinfo is not writable for root either
    with pages(tmp_path) as serve:
        port = serve(discovery_dir=path, log=lines.append).port

    _, line = lines
    assert line.startswith(f"Prometheus cannot discover this job: prometheus:discovery_dir={path}: ")
    assert line.endswith(f"; metrics are at http://127.0.0.1:{port}/metrics") and "\n" not in line


@pytest.mark.faults
def test_file_of_a_killed_job_is_removed_by_the_next_job(launch, folder):
    sinks = f"prometheus:port=0:discovery_dir={folder}"
    killed = launch.python("loop.py", "--until", "for ever", sinks=sinks, run_name="killed")
    (path,) = jobs.until(lambda: list(folder.glob("*.json")))
    pids = list(jobs.processes(killed.token))  # the trainer, the agent and the aggregator, as at the loss of a node
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, because the agent would start another aggregator
        for pid in pids:
            os.kill(pid, number)
    killed.wait()
    assert not killed.left()
    launch.python("loop.py", sinks=sinks, run_name="soon").done()
    assert names(folder) == [path.name], "younger than five minutes"

    make_old(path)
    launch.python("loop.py", sinks=sinks, run_name="later").done()
    assert names(folder) == []
