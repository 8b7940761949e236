"""Recordings of the trainer's stacks by py-spy, in short bursts, without a wait of the agent or of the trainer.

A recording of 5 s at 50 samples a second takes 0.05 to 0.15 s of a core and 8 MB (docs/decisions).
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from effllm.agent.host_stacks import RATE_HZ, LineNames, stacks_of
from effllm.agent.proc import INSTALL, process_state, py_spy
from effllm.agent.trainer import Trainer
from effllm.config.spawn import pidfd
from effllm.records.wire import HostSamples

BURST_S, LIMIT_S = 5, 15.0
#: The first recording begins when the loop has made so many iterations and has run for so long: it has warmed up.
FIRST_ITERATIONS, FIRST_S = 10, 3.0
#: Time between two recordings, by EFFICIENTLLM_STACKS.
EVERY_S = {"auto": 600.0, "always": 60.0, "off": math.inf}
MIN_APART_S = 60.0  # between two recordings, if one is requested
MAX_RANKS_OF_NODE = 4  # that record
MAX_BYTES = 16 * 2**20
_ERRORS = re.compile(rb"Errors: (\d+)")


class StackRecording:
    """Records the stacks of a trainer now and then.

    Args:
        trainer: the agent's trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._every_s = EVERY_S[trainer.config.stacks] if trainer.place.local_rank < MAX_RANKS_OF_NODE else math.inf
        self._since_s = time.monotonic()
        self._next_s = -math.inf if self._every_s < math.inf else math.inf
        self._began_s, self._is_failed = -math.inf, False
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[Any, ...] = ()  # memory for the recording and for py-spy's messages
        self._limit_s = math.inf
        self._lines: LineNames | None = None
        self.descriptor = -1  # pidfd of py-spy; readable after its end

    @property
    def due_s(self) -> float:
        return self._limit_s

    @property
    def is_over(self) -> bool:
        return self._process is None

    def look(self, now_s: float, ordinal: int) -> HostSamples | None:
        """Begin a recording when it is time; return the samples of a recording that has ended.

        Args:
            now_s: time on the monotonic clock.
            ordinal: number of the trainer's iterations.
        """
        if self._process is not None:
            is_late = now_s > self._limit_s
            return self._end(is_late) if is_late or self._process.poll() is not None else None
        has_warmed_up = ordinal >= FIRST_ITERATIONS and now_s - self._since_s > FIRST_S
        if now_s < self._next_s or not has_warmed_up:
            return None
        self._next_s, self._began_s = now_s + self._every_s, now_s
        return self._begin(now_s)

    def request(self, now_s: float) -> None:
        """Record soon, because the rank is slow, or the peer of a slow one; at most once a minute."""
        if self._trainer.config.stacks != "off" and not self._is_failed:
            self._next_s = min(self._next_s, max(now_s, self._began_s + MIN_APART_S))

    def finish(self) -> None:
        """End a recording now, with its samples, and begin no other one: the loop has ended."""
        self._next_s, self._is_failed = math.inf, True
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)  # py-spy then writes what it has

    def stop(self) -> None:
        """End a recording without its samples."""
        if self._process is not None:
            self._kill()

    def _begin(self, now_s: float) -> HostSamples | None:
        if not (program := py_spy()):
            return self._failed(f"py-spy is not installed ({INSTALL})")
        options = ["--nonblocking", "--idle", "--rate", str(RATE_HZ), "--duration", str(BURST_S)]
        try:
            for name in ("stacks", "messages"):
                self._files = (*self._files, os.fdopen(os.memfd_create(f"effllm-{name}"), "w+b"))
            recording, messages = self._files
            output = ["--format", "chrometrace", "--output", f"/proc/self/fd/{recording.fileno()}"]
            self._process = subprocess.Popen(
                [program, "record", *options, *output, "--pid", str(self._trainer.pid)],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                pass_fds=[recording.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            return self._failed(f"py-spy cannot be started: {error}")
        self.descriptor, self._limit_s = pidfd(self._process.pid), now_s + LIMIT_S
        return None

    def _end(self, is_late: bool) -> HostSamples | None:
        assert self._process is not None
        code = self._process.poll()
        recording, messages = (os.pread(one.fileno(), MAX_BYTES, 0) for one in self._files)
        self._kill()
        if is_late:
            return self._failed(f"py-spy took more than {LIMIT_S:.0f} s")
        if code and process_state(self._trainer.pid) not in ("", "Z", "X"):
            return self._failed(f"py-spy failed: {_reason(messages)}")
        try:
            stacks = stacks_of(recording, self._trainer.facts.thread_id)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # the trainer has ended
        if self._lines is None:
            self._lines = LineNames(self._folder())
        torn = int(found[1]) if (found := _ERRORS.search(messages)) is not None else 0
        return HostSamples(
            self._trainer.agent,
            self._trainer.rank,
            sum(stacks.values()),
            torn,
            self._lines.of(stacks),
            stacks=self._lines.folded(stacks),
        )

    def _failed(self, why: str) -> HostSamples:
        self._next_s, self._is_failed = math.inf, True  # the reason will be the same
        return HostSamples(self._trainer.agent, self._trainer.rank, failed=why)

    def _folder(self) -> str:
        """Return the folder of the training script."""
        command = self._trainer.facts.run.get("command")
        script = str(command[0]) if isinstance(command, list | tuple) and command else ""
        with suppress(OSError):
            return str(Path(Path(f"/proc/{self._trainer.pid}/cwd").readlink(), script).parent)
        return ""

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._limit_s = None, math.inf
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()
        self._files = ()


def _reason(messages: bytes) -> str:
    """Return the first error of py-spy in one line."""
    lines = [line.strip() for line in messages.decode(errors="replace").splitlines() if line.strip()]
    return " ".join(next((line for line in lines if "rror" in line), lines[0] if lines else "no message").split())[:200]
