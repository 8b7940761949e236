"""Unit tests start no process: a test that starts a process fails, and belongs in tests/processes."""

import sys

import pytest

PROCESS_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_in_test = False


def _refuse_processes(event, _arguments):
    if _in_test and event in PROCESS_EVENTS:
        raise RuntimeError(f"a unit test started a process ({event}): it belongs in tests/processes")


sys.addaudithook(_refuse_processes)  # an audit hook cannot be removed: _in_test turns it off


@pytest.fixture(autouse=True)
def no_process():
    """Raise an error if the test starts a process."""
    global _in_test
    _in_test = True
    yield
    _in_test = False
