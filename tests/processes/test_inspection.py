"""Inspection of a hanging trainer: its stacks, its state, the dump of its NCCL flight recorder."""

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jobs
import pytest
from jobs import needs_py_spy

from effllm.agent import inspection, proc
from effllm.agent.children import Inspection
from effllm.agent.inspection import InspectionResult, bounded, inspect, top_of
from effllm.agent.proc import process_state
from effllm.records.wire import MAX_STACK
from effllm.trainer import session

LOOP = "import time\ndef wait_for_data():\n    print('in', flush=True)\n    while True: {}\nwait_for_data()\n"


@contextmanager
def trainer(body: str, *, stopped: bool = False, arguments=()):
    """Run a process that waits in a function or is stopped; yield its pid and its pidfd."""
    with subprocess.Popen([sys.executable, "-c", LOOP.format(body), *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"in\n"
        descriptor = os.pidfd_open(process.pid)
        try:
            if stopped:
                os.kill(process.pid, signal.SIGSTOP)
                jobs.until(lambda: process_state(process.pid) == "T")
            else:
                jobs.until(lambda: process_state(process.pid) == "S")
            yield process.pid, descriptor
        finally:
            process.kill()
            os.close(descriptor)


def inspected(pid: int, descriptor: int, folder: Path | None = None) -> InspectionResult:
    return inspect(pid, descriptor, 17, folder and folder / "stacks" / "rank-17-iteration-1234.nccl")


@pytest.fixture
def no_recorder(monkeypatch, tmp_path):
    """Remove the variables of torch's flight recorder from the environment."""
    for name in (inspection.DUMP_PIPE, *inspection.DUMP_PREFIXES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# --- stacks ---


@needs_py_spy
@pytest.mark.fault("trainer-stopped")
@pytest.mark.parametrize(("body", "stopped"), [("time.sleep(0.01)", True), ("ctypes_sleep", False)])
def test_stack_of_a_hanging_trainer_is_reported(no_recorder, body, stopped):
    body = "__import__('ctypes').CDLL(None).sleep(100)" if body == "ctypes_sleep" else body
    with trainer(body, stopped=stopped, arguments=["--token=secret"]) as (pid, descriptor):
        found = inspected(pid, descriptor)
        state = process_state(pid)

    assert found.top.startswith("wait_for_data (")
    assert "wait_for_data" in found.text.partition("stacks, by py-spy:")[2]
    assert f"state: {'T (stopped)' if stopped else 'S (sleeping)'}" in found.text
    assert found.text.startswith(f"rank 17, process {pid}, ")
    assert "secret" not in found.text
    assert state == ("T" if stopped else "S"), "the inspection must not resume the trainer"


def test_missing_py_spy_is_reported_with_the_state_of_the_trainer(no_recorder, monkeypatch):
    with trainer("time.sleep(1)", stopped=True) as (pid, descriptor):
        monkeypatch.setattr(proc.shutil, "which", lambda _: None)
        monkeypatch.setattr(proc.sys, "executable", "/nowhere/python")
        found = inspected(pid, descriptor)

    assert "no stacks: py-spy is not installed (pip install 'effllm[forensics]')" in found.text
    assert found.top.startswith("T (stopped)")


@pytest.mark.parametrize(
    ("printed", "setting", "expected"),
    [
        *(
            (
                b"Error: Permission Denied: Try running again with elevated permissions",
                *(f"{n}\n", f"Linux does not permit py-spy to read the process (kernel.yama.ptrace_scope={n})"),
            )
            for n in (1, 2, 3)
        ),
        (
            b"some text\nError: Failed to find   python version\n",
            *("", "py-spy failed: Error: Failed to find python version"),
        ),
    ],
)
def test_error_of_py_spy_is_one_sentence_with_the_setting_of_the_kernel(tmp_path, printed, setting, expected):
    (tmp_path / "ptrace_scope").write_text(setting)

    assert proc.py_spy_error(printed, tmp_path / "ptrace_scope") == expected


def test_ended_trainer_is_not_inspected(no_recorder):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        descriptor = os.pidfd_open(process.pid)
    try:
        assert inspected(process.pid, descriptor).top == "ended"
        assert process_state(process.pid) == ""
    finally:
        os.close(descriptor)


def test_state_and_kernel_function_of_a_process_are_described():
    assert inspection.process_description(os.getpid()) == "state: R (running)"
    with trainer("time.sleep(60)") as (pid, _):
        assert inspection.process_description(pid).startswith("state: S (sleeping)")


STACKS = """Python v3.11.7 (/usr/bin/python3.11)

Thread 90 (idle): "Thread-1 (worker)"
    wait (threading.py:324)
    run (threading.py:982)
Thread 77 (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2501)
    train_step (train.py:88)
"""


def test_top_of_a_stack_is_the_last_frame_of_the_main_thread():
    assert top_of(STACKS, 77) == "all_reduce (torch/distributed/distributed_c10d.py:2501)"
    assert top_of(STACKS.replace(': "MainThread"', ""), 77).startswith("all_reduce")
    assert top_of(STACKS, 1).startswith("all_reduce")
    assert top_of("nothing of the kind", 1) == ""


def test_text_of_an_inspection_is_cut_to_a_maximum_length():
    assert bounded("x" * MAX_STACK) == "x" * MAX_STACK
    assert len(bounded("x" * (MAX_STACK + 1))) <= MAX_STACK
    assert bounded("x" * (MAX_STACK + 1)).endswith("(cut off)\n")


# --- in the agent ---


@needs_py_spy
def test_inspections_run_in_the_background_one_at_a_time(no_recorder):
    one = Inspection()
    before = threading.active_count()
    with trainer("time.sleep(0.01)", stopped=True) as (pid, descriptor):
        assert one.start(partial(inspected, pid, descriptor), 0.0) == ""
        assert one.start(partial(inspected, pid, descriptor), 0.0) == ""
        assert threading.active_count() == before + 1
        assert one.due_s < float("inf")
        found = jobs.until(lambda: one.take_result(1.0))

    assert found.top.startswith("wait_for_data (")
    assert one.due_s == float("inf")


def test_inspection_of_a_trainer_ends_at_its_timeout(no_recorder):
    one, ended = Inspection(), threading.Event()
    one.start(lambda: ended.wait(60.0), 0.0)
    assert one.take_result(24.0) is None

    assert one.take_result(25.5).top == "unknown: the inspection took more than 25 s"
    assert one.take_result(26.0) is None
    ended.set()
    jobs.until(lambda: "inspection" not in [thread.name for thread in threading.enumerate()])


def test_inspection_that_cannot_start_returns_the_reason(monkeypatch):
    def refuse(_self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("effllm.agent.children.threading.Thread.start", refuse)

    assert "can't start new thread" in Inspection().start(lambda: None, 0.0)


# --- the NCCL flight recorder: a pipe and a file as torch makes them, without torch ---


class Recorder:
    """Torch's side of the pipe: polls the pipe, and writes a dump when the pipe has data."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.environ = {
            inspection.DUMP_PIPE: f"{folder}/pipe_",
            inspection.DUMP_PREFIXES[0]: f"{folder}/trace_rank_",
        }
        self.dump = folder / f"trace_rank_{rank}"
        path = folder / f"pipe_{rank}.pipe"
        os.mkfifo(path, 0o666)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        os.close(self._descriptor)

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            try:
                asked = os.read(self._descriptor, 128)
            except BlockingIOError:
                continue
            if asked:
                with self.dump.open("wb") as file:
                    for _ in range(3):
                        file.write(b"\x80not to be opened")
                        file.flush()
                        time.sleep(0.1)


def test_flight_recorder_dump_is_requested_and_copied_unchanged(monkeypatch, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    with Recorder(tmp_path, 17) as recorder, trainer("time.sleep(1)") as (pid, descriptor):
        for name, value in recorder.environ.items():
            monkeypatch.setenv(name, value)
        found = inspected(pid, descriptor, run)

    copied = run / "stacks" / "rank-17-iteration-1234.nccl"
    assert f"dump of the NCCL flight recorder: {recorder.dump}, copied to stacks/{copied.name}" in found.text
    assert copied.read_bytes() == 3 * b"\x80not to be opened"
    assert stat.S_IMODE(copied.stat().st_mode) == 0o600


def test_path_of_a_recent_dump_of_torch_is_reported(monkeypatch, tmp_path):
    monkeypatch.delenv(inspection.DUMP_PIPE, raising=False)
    monkeypatch.setenv(inspection.DUMP_PREFIXES[1], f"{tmp_path}/old_name_")
    monkeypatch.delenv(inspection.DUMP_PREFIXES[0], raising=False)
    dump = tmp_path / "old_name_17"
    dump.write_bytes(b"dump")
    with trainer("time.sleep(1)") as (pid, descriptor):
        os.utime(dump, (1e9, 1e9))
        earlier = inspected(pid, descriptor)
        dump.touch()
        later = inspected(pid, descriptor)

    assert "flight recorder" not in earlier.text
    assert f"dump of the NCCL flight recorder: {dump}" in later.text


def test_dump_from_before_the_first_look_at_a_process_is_found(monkeypatch, tmp_path):
    monkeypatch.delenv(inspection.DUMP_PIPE, raising=False)
    monkeypatch.setenv(inspection.DUMP_PREFIXES[0], f"{tmp_path}/trace_")
    with trainer("time.sleep(2)") as (pid, descriptor):
        (tmp_path / "trace_17").write_bytes(b"dump")
        time.sleep(0.5)
        found = inspected(pid, descriptor)

    assert f"dump of the NCCL flight recorder: {tmp_path}/trace_17" in found.text


def test_no_dump_is_requested_if_the_pipe_or_its_reader_is_missing(tmp_path):
    environ = {inspection.DUMP_PIPE: f"{tmp_path}/pipe_"}
    assert not inspection.request_dump(0, environ)
    (tmp_path / "pipe_0.pipe").write_text("")
    assert not inspection.request_dump(0, environ)
    assert (tmp_path / "pipe_0.pipe").read_text() == ""
    os.mkfifo(tmp_path / "pipe_1.pipe")
    assert not inspection.request_dump(1, environ)  # and returns


def test_dump_that_is_a_symbolic_link_is_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "trace_0").symlink_to(secret)

    assert inspection.newest_dump([tmp_path / "trace_0"], 0.0) is None
    with pytest.raises(OSError, match="symbolic"):
        inspection.copy_dump(tmp_path / "trace_0", tmp_path / "out" / "copy")


def test_dumps_are_searched_in_the_folders_of_torch(monkeypatch):
    assert inspection.dump_paths(
        3, {"TORCH_FR_DUMP_TEMP_FILE": "/a/t_", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/b/t_"}
    ) == [Path("/a/t_3")]
    assert inspection.dump_paths(3, {"HOME": "/home/me"}) == [
        Path("/home/me/.cache/torch/comm_lib_trace_rank_3"),
        Path("/tmp/nccl_trace_rank_3"),
    ]


# --- permission to trace ---


def test_trainer_allows_tracing_by_the_agent_only_at_ptrace_scope_1(tmp_path):
    scope = tmp_path / "ptrace_scope"
    assert not session._allow_inspection(os.getpid(), scope)  # no Yama: the file does not exist
    for value in ("0", "2"):
        scope.write_text(f"{value}\n")
        assert not session._allow_inspection(os.getpid(), scope)
    scope.write_text("1\n")

    # A kernel without Yama rejects the call: the function returns False, without other effects.
    has_yama = ctypes.CDLL(None).prctl(session.PR_SET_PTRACER, ctypes.c_ulong(os.getpid()), 0, 0, 0) == 0
    assert session._allow_inspection(os.getpid(), scope) is has_yama
