"""The agent's log: lines for the run folder and for the aggregator."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

from effllm import own_files
from effllm.config import state_folder


class Log:
    """The agent's log: kept until the run folder is known, then a file in it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lines: deque[str] = deque(maxlen=200)
        self._path: Path | None = None
        self._file: int | None = None
        self.unsent: deque[tuple[str, str, float]] = deque(maxlen=200)

    def line(self, text: str, kind: str = "agent") -> None:
        """Take one line, for the file and for the aggregator."""
        now = time.time()
        self.unsent.append((kind, text, now))
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now))
        self._lines.append(f"{stamp}Z rank {self._rank}: {text}\n")
        self._flush()

    def attach(self, folder: Path) -> None:
        """Write to a file in ``folder`` from now on; it is made with the first line."""
        self._path = self._path or folder / f"agent-{self._rank}.log"
        self._flush()

    def close(self) -> None:
        """Leave what nobody has seen in the user's state folder."""
        if self._path is None:
            self.attach(state_folder() / f"pid-{os.getpid()}")
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _flush(self) -> None:
        if self._path is None or not self._lines:
            return
        with contextlib.suppress(OSError):  # a full disk, another host's folder: the aggregator has the lines
            if self._file is None:
                own_files.make_folder(self._path.parent)
                self._file = own_files.open_file(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            while self._lines:
                os.write(self._file, self._lines[0].encode())
                self._lines.popleft()
