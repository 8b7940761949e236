"""A stopped or unread terminal delays only the console."""

import os
import pty
import sys
import threading

import jobs
import pytest
from after_fault import assert_whole

pytestmark = [pytest.mark.faults, pytest.mark.fault("stopped-terminal")]

STOP, GO_ON = b"\x13", b"\x11"  # Ctrl-S and Ctrl-Q


class Terminal:
    """A terminal whose output is read."""

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
        except OSError:  # all other processes closed the terminal
            return

    @property
    def blocks(self):
        return self.shown.count(b"[EfficientLLM Metrics]")


@pytest.fixture
def terminal():
    return Terminal()


@pytest.fixture
def on_terminal(launch, terminal):
    """Start a loop with a window per iteration on the terminal; stop the terminal after a few windows."""

    def start():
        command = [sys.executable, str(jobs.SCRIPTS / "loop.py"), "--until", "enough", "--step-s", "0.02"]
        environ = launch.environ({"log_interval": 1, "sinks": "console:format=block"}, **jobs.long_timeouts())
        job = launch._job().start(command, environ, terminal.output)
        os.close(terminal.output)
        jobs.until(lambda: terminal.blocks >= 3)
        terminal.press(STOP)
        return job

    return start


def test_stopped_terminal_stops_only_the_console(on_terminal, terminal):
    job = on_terminal()
    shown = terminal.blocks
    jobs.until(lambda: job.num_windows > shown + 400)
    assert terminal.blocks < shown + 200
    terminal.press(GO_ON)
    count = job.finish()
    jobs.until(lambda: b"Run completed" in terminal.shown)

    summary = assert_whole(job.ledger, {0: count})
    assert terminal.blocks + summary.left_out.get("console", 0) == count
    assert job.max_step_s() < 0.2


def test_stopped_terminal_does_not_delay_the_end_of_a_job(on_terminal, terminal):
    job = on_terminal()
    windows = job.num_windows
    jobs.until(lambda: job.num_windows > windows + 400)
    (job.folder / "enough").touch()
    job.wait()

    assert job.output()["end_held_s"] < 30.0  # with the long timeouts, a wait for the terminal would take 50 s
    count = job.finish()
    summary = assert_whole(job.ledger, {0: count})
    assert summary.left_out["console"] > count - terminal.blocks - 200
    # a block that is shown only partly counts as left out
    assert terminal.blocks + summary.left_out["console"] >= count
