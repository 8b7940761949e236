"""A terminal that is stopped, or that nobody reads: the console waits for it, and nothing else does."""

import os
import pty
import sys
import threading
import time

import jobs
import pytest
from after_fault import assert_whole

pytestmark = [pytest.mark.faults, pytest.mark.fault("stopped-terminal")]

STOP, GO_ON = b"\x13", b"\x11"  # Ctrl-S and Ctrl-Q


class Terminal:
    """A terminal with somebody before it who reads all that it shows."""

    def __init__(self):
        self.keyboard, self.output = pty.openpty()
        self.shown = bytearray()
        threading.Thread(target=self._read, daemon=True).start()

    def press(self, key):
        os.write(self.keyboard, key)

    def _read(self):
        try:
            while text := os.read(self.keyboard, 65536):
                self.shown += text
        except OSError:  # all others have closed it
            return

    @property
    def blocks(self):
        return self.shown.count(b"[EfficientLLM Metrics]")


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def on_terminal(launch, terminal):
    """Start a loop of a window an iteration whose output is the terminal; stop that after a few windows."""

    def start(iterations):
        command = [sys.executable, str(jobs.SCRIPTS / "loop.py"), "--iterations", str(iterations), "--step-s", "0.004"]
        job = launch._job().start(command, launch.environ({"log_interval": 1}), terminal.output)
        os.close(terminal.output)
        jobs.until(lambda: terminal.blocks >= 3)
        terminal.press(STOP)
        return job

    return start


def test_a_stopped_terminal_stops_nothing_else_and_goes_on_where_it_can(on_terminal, terminal):
    job = on_terminal(700)
    jobs.until(lambda: job.num_windows > 400)
    shown = terminal.blocks
    assert shown < 200
    terminal.press(GO_ON)
    job.done()
    jobs.until(lambda: b"Run completed" in terminal.shown)

    summary = assert_whole(job.ledger, {0: 700})
    assert terminal.blocks + summary.left_out.get("console", 0) == 700
    steps = [end - start for start, end in job.told()["steps"]]
    assert max(steps) < 0.2


def test_a_terminal_that_stays_stopped_does_not_hold_up_the_end_of_the_job(on_terminal, terminal):
    job = on_terminal(500)
    job.wait(30)
    over_s = time.monotonic()
    last_s = job.told()["steps"][-1][1]

    assert job.code == 0
    assert over_s - last_s < 7.0
    assert not job.left(within_s=8.0)
    summary = assert_whole(job.ledger, {0: 500})
    assert summary.left_out["console"] > 300
    assert terminal.blocks + summary.left_out["console"] >= 500  # what the terminal shows in part is left out as well
