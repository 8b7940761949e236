"""Recordings of the trainer's stacks by py-spy, in short bursts, without a wait of the agent or of the trainer.

A recording of 5 s at 50 samples a second takes 0.05 to 0.15 s of a core and 8 MB (docs/decisions/lines-of-code.md).
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import msgspec
import psutil

from effllm.agent.host_stacks import (
    FETCH,
    RATE_HZ,
    WAIT_FOR_WORKER,
    LineNames,
    LongIterations,
    Stacks,
    script_folder,
    stacks_of,
    stacks_with_frame,
)
from effllm.agent.proc import INSTALL_PY_SPY, process_state, py_spy_error, py_spy_path
from effllm.agent.trainer import Trainer
from effllm.config.spawn import pidfd
from effllm.records.host_lines import WORKER
from effllm.records.ring import STEP
from effllm.records.wire import HostSamples

BURST_S, MAX_RECORDING_S = 5, 15.0
#: The first recording begins when the loop has made so many iterations and has run for so long: it has warmed up.
FIRST_ITERATIONS, FIRST_S = 10, 3.0
#: Time between two recordings, by EFFICIENTLLM_STACKS.
EVERY_S = {"auto": 600.0, "always": 60.0, "off": math.inf}
#: Recordings that may be requested at once, and the time between further ones: 0.1 % of a core in an hour.
MAX_AT_ONCE, APART_S = 3, 150.0
#: If so much of the samples is a wait for DataLoader workers, one of them is recorded, too.
MIN_WAIT = 0.2
WORKER_NAME = "pt_data_worker"  # by torch 2.6 and newer
MAX_RANKS_OF_NODE = 4  # that record
MAX_BYTES = 16 * 2**20
_ERRORS = re.compile(rb"Errors: (\d+)")
IterationsNs = Callable[[], Iterable[tuple[int, int]]]  # returns start and end of iterations, on the monotonic clock


class StackRecording:
    """Records the stacks of the agent's trainer now and then."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._every_s = EVERY_S[trainer.config.stacks] if trainer.place.local_rank < MAX_RANKS_OF_NODE else math.inf
        self._created_s = time.monotonic()
        self._next_recording_s = -math.inf if self._every_s < math.inf else math.inf  # but not before the warm-up
        self._num_recordings, self._is_closed, self._records_workers = 0, False, True
        self._pid, self._began_ns = trainer.pid, 0  # of the last recording: the recorded process, and the start
        self._folder = ""  # of the training script
        self._next_worker = 0  # pid of a DataLoader worker that is recorded next, or 0
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[Any, ...] = ()  # memory for the recording and for py-spy's messages
        self._deadline_s = math.inf
        self.descriptor = -1  # pidfd of py-spy; readable after its end

    @property
    def due_s(self) -> float:
        """Time of the next call of `begin_or_end`, at the latest: at once for a worker, else at a deadline."""
        return 0.0 if self._next_worker else self._deadline_s

    @property
    def is_idle(self) -> bool:
        return self._process is None

    def begin_or_end(self, now_s: float, ordinal: int, iterations_ns: IterationsNs = tuple) -> HostSamples | None:
        """Begin a recording when it is time; return the samples of one that has ended, or why it failed."""
        if self._process is not None:
            is_late = now_s > self._deadline_s
            return self._end_recording(now_s, iterations_ns) if is_late or self._process.poll() is not None else None
        if worker := self._next_worker:
            self._next_worker = 0
            return self._begin_recording(now_s, worker)
        has_warmed_up = ordinal >= FIRST_ITERATIONS and now_s - self._created_s > FIRST_S
        if now_s < self._next_recording_s or not has_warmed_up:
            return None
        self._next_recording_s, self._num_recordings = now_s + self._every_s, self._num_recordings + 1
        return self._begin_recording(now_s, self._trainer.pid)

    def request_soon(self, now_s: float) -> None:
        """Record as soon as the limit of the cost permits, because the job has a new loss."""
        if self._trainer.config.stacks != "off" and not self._is_closed:
            permitted_s = self._created_s + APART_S * (self._num_recordings + 1 - MAX_AT_ONCE)
            self._next_recording_s = min(self._next_recording_s, max(now_s, permitted_s))

    def finish(self) -> None:
        """End a recording now, with its samples, and begin no other one: the loop has ended."""
        self._next_recording_s, self._is_closed, self._next_worker = math.inf, True, 0
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGINT)  # py-spy then writes what it has

    def stop(self) -> None:
        """End a recording without its samples."""
        if self._process is not None:
            self._kill()

    def _begin_recording(self, now_s: float, pid: int) -> HostSamples | None:
        """Start py-spy for the trainer or a worker; return why this failed, else ``None``."""
        self._pid = pid
        if not (program := py_spy_path()):
            return self._give_up(f"py-spy is not installed ({INSTALL_PY_SPY})")
        options = ["--nonblocking", "--idle", "--rate", str(RATE_HZ), "--duration", str(BURST_S)]
        try:
            for name in ("stacks", "messages"):
                self._files = (*self._files, os.fdopen(os.memfd_create(f"effllm-{name}"), "w+b"))
            recording, messages = self._files
            output = ["--format", "chrometrace", "--output", f"/proc/self/fd/{recording.fileno()}"]
            self._process = subprocess.Popen(
                [program, "record", *options, *output, "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                pass_fds=[recording.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            self._close_files()
            return self._give_up(f"py-spy cannot be started: {error}")
        self._began_ns = time.monotonic_ns()  # the times of py-spy begin here, within some milliseconds
        self.descriptor, self._deadline_s = pidfd(self._process.pid), now_s + MAX_RECORDING_S
        return None

    def _end_recording(self, now_s: float, iterations_ns: IterationsNs) -> HostSamples | None:
        """Return the samples, or why the recording failed; ``None`` if the recorded process has ended."""
        assert self._process is not None
        code, is_late = self._process.poll(), now_s > self._deadline_s
        recording, messages = (os.pread(file.fileno(), MAX_BYTES, 0) for file in self._files)
        self._kill()
        if is_late:
            return self._give_up(f"py-spy took more than {MAX_RECORDING_S:.0f} s")
        if code and process_state(self._pid) not in ("", "Z", "X"):
            return self._give_up(py_spy_error(messages))
        is_worker = self._pid != self._trainer.pid
        try:
            stacks = stacks_of(recording, 0 if is_worker else self._trainer.facts.thread_id)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None  # the process has ended
        num_torn = int(errors[1]) if (errors := _ERRORS.search(messages)) is not None else 0
        if is_worker:
            return self._host_samples(LineNames(self._folder, WORKER), stacks_with_frame(stacks, FETCH), num_torn)
        self._folder = script_folder(stacks) or self._folder
        state, _, since_ns, _ = self._trainer.ring.read_state()
        unfinished_ns = [(since_ns, time.monotonic_ns())] if state == STEP else []
        long_iterations = LongIterations.long_among([*iterations_ns(), *unfinished_ns], self._began_ns)
        in_long = stacks_of(recording, self._trainer.facts.thread_id, long_iterations.within_us)
        waits = sum(stacks_with_frame(stacks, WAIT_FOR_WORKER).values())
        if self._records_workers and not self._is_closed and waits > MIN_WAIT * sum(stacks.values()):
            self._next_worker = _busiest_worker(self._pid)
        return self._host_samples(LineNames(self._folder), stacks, num_torn, in_long, long_iterations.per_other)

    def _host_samples(
        self, names: LineNames, stacks: Stacks, num_torn: int, in_long: Stacks | None = None, per_other: float = 0.0
    ) -> HostSamples:
        return HostSamples(
            self._trainer.agent,
            self._trainer.rank,
            sum(stacks.values()),
            num_torn,
            names.lines_of(stacks, in_long, per_other),
            stacks=names.stack_texts(stacks),
            is_worker=self._pid != self._trainer.pid,
        )

    def _give_up(self, why: str) -> HostSamples:
        if self._pid != self._trainer.pid:
            self._records_workers, why = False, f"DataLoader workers: {why}"
        else:
            self._next_recording_s, self._is_closed = math.inf, True  # the reason will be the same
        return HostSamples(self._trainer.agent, self._trainer.rank, failed=why)

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process, self._deadline_s = None, math.inf
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()
        self._files = ()


def _busiest_worker(pid: int) -> int:
    """Return the pid of the DataLoader worker with the most work; 0 without a worker."""
    cpu_s: dict[int, float] = {}
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):  # a fork server may be the parent
            with suppress(psutil.Error):
                if child.name() == WORKER_NAME:
                    cpu_s[child.pid] = sum(child.cpu_times()[:2])
    return max(cpu_s, key=cpu_s.__getitem__, default=0)
