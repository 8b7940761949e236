"""A program on a pseudo terminal whose screen is kept by pyte: keys, resizes and signals as of a user."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Sequence
from pathlib import Path

import jobs
import pyte

KEYS = {
    "enter": b"\r",
    "left": b"\x1b[D",
    "right": b"\x1b[C",
    "up": b"\x1b[A",
    "down": b"\x1b[B",
    "home": b"\x1b[1~",
    "end": b"\x1b[4~",
    "pgdn": b"\x1b[6~",
}


class TerminalScreen:
    """A command with arguments on a terminal of ``size`` (columns, lines); pyte understands the type ``linux``."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (80, 24),
        term: str = "linux",
        command: Sequence[str] = (sys.executable, "-m", "effllm"),
        folder: Path | None = None,
        **variables: str,
    ) -> None:
        self._keyboard, self.terminal = pty.openpty()
        self.resize(*size, is_first=True)
        self.before = termios.tcgetattr(self.terminal)
        self.sent = bytearray()  # all bytes that the program sent to the terminal
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        environ = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command, *map(str, arguments)],
            stdin=self.terminal,
            stdout=self.terminal,
            stderr=self.terminal,
            env={**environ, "TERM": term, "LANG": "C.UTF-8", **variables},
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while text := os.read(self._keyboard, 65536):
                with self._lock:
                    self.sent += text
                    self._stream.feed(text)
        except OSError:  # the terminal is closed
            return

    def press(self, *keys: str) -> None:
        for key in keys:
            os.write(self._keyboard, KEYS.get(key, key.encode()))

    def resize(self, columns: int, lines: int, *, is_first: bool = False) -> None:
        if not is_first:  # first here: the program may fill the new size at once
            with self._lock:
                self._screen.resize(lines, columns)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def shows(self, text: str) -> None:
        """Wait until the screen contains a text."""
        try:
            jobs.until(lambda: text in self.text, 30.0)
        except AssertionError as error:
            raise AssertionError(f"{text!r} is not on the screen:\n{self.text}") from error

    def ended(self) -> int:
        """Wait for the end of the program; return its exit status."""
        return self.process.wait(30.0)

    @property
    def is_restored(self) -> bool:
        """Whether the terminal has the settings that it had before the program."""
        return termios.tcgetattr(self.terminal) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(30.0)
        os.close(self.terminal)
        self._reader.join(10.0)
        os.close(self._keyboard)
