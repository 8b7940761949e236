"""Unit tests start no process: a test that starts a process fails, and belongs in tests/processes."""

import os
import sys
import uuid

import pytest

PROCESS_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_in_test = False


def _refuse_processes(event, _arguments):
    if _in_test and event in PROCESS_EVENTS:
        raise RuntimeError(f"a unit test started a process ({event}): it belongs in tests/processes")


sys.addaudithook(_refuse_processes)  # an audit hook cannot be removed: _in_test turns it off


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Raise an error if the test starts a process; so no search for remaining processes is necessary."""
    global _in_test
    _in_test = True
    yield
    _in_test = False


@pytest.fixture(autouse=True)
def own_user_folders(clean_environment, tmp_path_factory, monkeypatch):
    """Give each test separate folders that do not exist; ``tmp_path`` in each of 2,700 tests took four seconds."""
    folder = tmp_path_factory.getbasetemp() / uuid.uuid4().hex
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))


@pytest.fixture
def wake():
    """The descriptor by which a sampler wakes its agent."""
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)
