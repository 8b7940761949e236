"""effllm/agent/proc.py: the wait for a CPU core, read from outside."""

import os
import subprocess
import sys

import pytest
from jobs import until

from effllm.agent.proc import CoreWait

BUSY = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@pytest.fixture
def two_on_one_core():
    """Yield two busy processes that have one core."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    yield busy
    for one in busy:
        one.kill()
        one.wait()


def test_wait_of_a_process_for_a_core_is_measured(two_on_one_core):
    one, _ = two_on_one_core
    waits = until(lambda: (found := CoreWait(one.pid)).seconds() is not None and found)

    assert until(lambda: waits.seconds() > 0.2)
    one.kill()
    one.wait()
    assert waits.seconds() > 0.2, "the last reading stays"


def test_wait_is_unknown_without_a_process():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    assert CoreWait(ended.pid).seconds() is None
    assert CoreWait(os.getpid()).seconds() >= 0.0
