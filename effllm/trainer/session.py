"""One session of the metrics, from start to stop: the shared maps, the agent, the aggregator's address.

This module runs in the training process, before the first iteration and after the last iteration.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from effllm.config.place import Place
from effllm.config.settings import Config
from effllm.config.spawn import NO_RESOURCES, WHY_NO_RESOURCES, pidfd, spawn
from effllm.config.switches import process_environ
from effllm.records.board import Board
from effllm.records.facts import PROGRESS_BARS, FoundAddress
from effllm.records.ring import RingWriter
from effllm.records.shared_memory import RingError
from effllm.store.redaction import redacted
from effllm.trainer.address import AggregatorAddress, print_line
from effllm.trainer.declared import Declared, text
from effllm.trainer.recorder import Recorder, measured_pair_s
from effllm.trainer.value_buffer import PENDING
from effllm.trainer.waking import Waker

PR_SET_PTRACER = 0x59616D61  # "Yama", linux/prctl.h
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
RESTRICTED = "1"  # the value of PTRACE_SCOPE with which only a parent may read a process
READY_S = 2.0  # limit for the agent's first sample, which takes about 0.3 s, or longer with a busy file system
FIRST_RANK_ENDS_S = 5.0  # rank 0 waits for the summary: in a container, the launcher's end would kill the aggregator
OTHER_RANKS_END_S = 1.0
WAIT_STEP_S = 0.02
MAX_WARNINGS = 20
MAX_COMMAND_LETTERS = 8_000  # of the command in run.json

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def _allow_inspection(pid: int, scope: Path = PTRACE_SCOPE) -> bool:
    """Allow a process and its descendants to inspect this process; return whether this was needed and done.

    Yama's ptrace_scope 1 allows only a parent to read a stack, and the agent is the child of the trainer.
    """
    with suppress(OSError, ImportError, AttributeError, ValueError):
        if scope.read_text().strip() == RESTRICTED:
            import ctypes  # this import takes 10 ms, so it is done only if needed

            return bool(ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0) == 0)
    return False


class AgentError(OSError):
    """The rank has no agent, so it has no metrics; the message contains the reason."""


@contextlib.contextmanager
def standard_descriptors() -> Iterator[list[int]]:
    """Open /dev/null for closed standard descriptors (``>&-``); yield their numbers, which are closed again at the end.

    A socket or a memory with one of these numbers would get what the script or an agent prints.
    """
    opened: list[int] = []
    try:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
            opened.append(descriptor)
            os.set_inheritable(descriptor, True)
        os.close(descriptor)
        yield opened
    finally:
        for number in opened:
            os.close(number)


class Session:
    """The objects of one session: the shared maps, the agent, the recorder."""

    def __init__(self, config: Config, place: Place, declared: Declared) -> None:
        self._config, self._place = config, place
        self._declared = declared
        self._pid = os.getpid()  # not that of a forked child
        self._process: subprocess.Popen[bytes] | None = None  # the agent
        self._waker: Waker | None = None
        self._is_closed = False
        self._ring = RingWriter(config.history_size)
        try:
            self.board = Board()
        except RingError:
            self._ring.close()
            raise
        self.recorder = self._open_recorder()
        self._address = AggregatorAddress(config, place, declared, self._write_address, self.board)

    def _open_recorder(self) -> Recorder:
        config, torch = self._config, sys.modules.get("torch")
        first = self._declared.facts.first_iteration
        values = PENDING, self._declared.value_index
        arguments = (self._ring, config.log_interval, first, self._wake_agent, self.warn, *values)
        version = getattr(torch, "version", None)
        has_device = bool(getattr(version, "cuda", None) or getattr(version, "hip", None))
        if not config.profile_every and not has_device:
            return Recorder(*arguments)
        from effllm.trainer.rank_device import RankDevice  # imported only if needed
        from effllm.trainer.watched_recorder import WatchedRecorder

        # A half-imported torch lacks parts, and an error of CUDA is the script's own to see.
        device = (
            RankDevice(torch, self._declared)
            if has_device and hasattr(torch, "cuda") and hasattr(torch, "_C")
            else None
        )
        if device is not None:
            with contextlib.suppress(Exception):
                device.find_gpus()
        return WatchedRecorder(
            *arguments, profile_every=config.profile_every, torch=torch, rank_device=device, send_facts=self.send_facts
        )

    def start(self) -> None:
        """Find or open the aggregator's address, start the agent, and wait up to 2 s for the agent's first sample."""
        self._declared.set(**self._own_facts())
        if self._place.rank == 0 and not self._config.endpoint:
            self._choose_run_folder()
        start_search = self._address.open_or_search()
        self._waker = waker = Waker()
        self._process = self._start_agent(waker.agents_end)
        _allow_inspection(self._process.pid)
        start_search()
        if waker.wait_for_agent_end(READY_S):  # its socket is closed shortly before its process ends
            wait_until(1.0, lambda: self._process is None or self._process.poll() is not None)
        if (code := self._process.poll()) is not None:
            raise AgentError(f"the agent of rank {self._place.rank} {_death_text(code)} at start ({sys.executable})")
        self._register_at_exit()
        self._stay_idle(self._config.baseline_seconds)

    def _start_agent(self, wake_descriptor: int) -> subprocess.Popen[bytes]:
        """Start the agent with its descriptors; afterwards, this process has only the waker's own end."""
        descriptors = {"ring": self._ring.descriptor, "board": self.board.descriptor}
        descriptors |= {"trainer": pidfd(os.getpid()), "wake": wake_descriptor}
        listener, stdout = self._address.listener, -1
        if listener is not None:
            # Without stdout at the start of Python, a file of the script may have its number.
            stdout = os.open(os.devnull, os.O_WRONLY) if sys.__stdout__ is None else os.dup(1)
            self._declared.set(listen_descriptor=listener.fileno(), stdout_descriptor=stdout)
        self.send_facts()
        try:
            arguments = [f"--{name}={descriptor}" for name, descriptor in descriptors.items()]
            inherited = [*descriptors.values(), stdout, listener.fileno() if listener else -1]
            return spawn("effllm.agent.agent", arguments, inherited, ends_first=True)
        finally:
            for descriptor in (descriptors["trainer"], stdout):
                if descriptor >= 0:
                    os.close(descriptor)
            if listener is not None:
                listener.close()  # a forked worker must not hold the port
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._ring.close()
        self.board.close()
        if self._waker is not None:
            self._waker.close_agents_end()

    def _stay_idle(self, seconds: float) -> None:
        """Wait for the configured time; the agent measures the idle power of the device in this time."""
        if seconds > 0:
            begin_ns = time.monotonic_ns()
            time.sleep(seconds)
            self._declared.set(baseline_ns=(begin_ns, time.monotonic_ns()))
            self.send_facts()

    def _own_facts(self) -> dict[str, Any]:
        return {
            "config": self._config,
            "place": self._place,
            "trainer_pid": os.getpid(),
            "host": platform.node(),
            "visible_devices": process_environ().get("CUDA_VISIBLE_DEVICES"),
            "hip_visible_devices": process_environ().get("HIP_VISIBLE_DEVICES"),
            "rocr_visible_devices": process_environ().get("ROCR_VISIBLE_DEVICES"),
            "recorder_pair_s": measured_pair_s(),
            "thread_id": threading.get_ident(),
            # The following values remove those of an earlier session.
            "job": "",
            "endpoint": "",
            "run_folder": "",
            "secured": False,
            "address_file": "",
            "listen_descriptor": -1,
            "stdout_descriptor": -1,
            "baseline_ns": (),
        }

    def _choose_run_folder(self) -> None:
        place = self._place
        run = {
            "command": _command(),
            "launcher": place.launcher,
            "restart_id": place.restart_id,
            **({PROGRESS_BARS: True} if "tqdm" in sys.modules else {}),
            **self._declared.facts.run,
        }
        self._declared.set(run_folder=_run_folder(self._config, place), run=run)
        if not self._declared.facts.run_folder:
            print_line(
                "no run folder: the name of the current folder is not UTF-8; set EFFICIENTLLM_RUN_DIR to another folder"
            )

    def _write_address(self, address: FoundAddress) -> None:
        # This method may run in the search thread; it writes no data that the loop's thread writes.
        self._ring.write_address(address)
        self._wake_agent()

    def send_facts(self) -> None:  # all facts of this rank, to the agent
        if not self._is_closed and not self._ring.write_facts(self._declared.facts):
            self._declared.set(run={})  # the caller's facts do not fit into the ring
            self._ring.write_facts(self._declared.facts)
        self._wake_agent()

    def warn(self, line: str) -> None:
        """Log a line through the agent, once; nothing is printed on the training thread."""
        warnings = self._declared.facts.warnings
        if line not in warnings and len(warnings) < MAX_WARNINGS:
            self._declared.set(warnings=(*warnings, line))
            self.send_facts()

    def _wake_agent(self) -> None:
        if self._waker is not None and not self._is_closed:
            self._waker.wake()

    def finish(self, status: str) -> None:
        """Record the final status, and wait for the agent's end: up to 5 s on rank 0 (summary), 1 s on other ranks."""
        self.recorder.finish(status)
        if (process := self._process) is None:
            return
        limit_s = FIRST_RANK_ENDS_S if self._place.rank == 0 else OTHER_RANKS_END_S
        left_s = wait_until(limit_s, lambda: process.poll() is not None)
        if code := process.poll():
            self._report_death(code, left_s)

    def _report_death(self, code: int, limit_s: float) -> None:
        """Print that the agent has died; on rank 0, wait for the aggregator's end, as agents do."""
        rank = self._place.rank
        print_line(f"the agent of rank {rank} {_death_text(code)}: after that, no metric includes rank {rank}")
        if rank == 0 and self._place.world_size > 1 and (folder := self._declared.facts.run_folder):
            wait_until(limit_s, lambda: not _is_locked(Path(folder) / "lock"))

    def final_values(self, since_unix_s: float) -> dict[str, float]:
        """Return the values of the run's summary on rank 0; empty if the summary is older than ``since_unix_s``.

        The summary is read because the aggregator's last message may be lost while agent and aggregator end.
        """
        folder = self._declared.facts.run_folder
        if not folder:
            return {}
        try:
            summary = json.loads((Path(folder) / "summary.json").read_bytes())
            if summary["status"] == "running" or summary["updated_time_s"] < since_unix_s:
                return {}  # the summary of an earlier run: this run has another folder
            return {tag: float(metric["value"]) for tag, metric in summary["metrics"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return {}

    def close(self) -> None:
        """Release all resources; an agent that still runs continues alone."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._at_exit)
        self.recorder.disable()
        self._address.is_session_over = True
        self._close_descriptors()
        if self._waker is not None:
            self._waker.close()
        if self._process is not None and self._process.poll() is None:
            # The exit status is not needed, but without a return code Popen would warn.
            self._process.returncode = 0

    def _register_at_exit(self) -> None:
        atexit.register(self._at_exit)
        util, process = (sys.modules.get(f"multiprocessing.{name}") for name in ("util", "process"))
        if util is None or process is None or process.parent_process() is None:
            return
        if "--multiprocessing-fork" not in sys.orig_argv:  # an argument of spawned children
            # A forked child of multiprocessing ends with os._exit, after its finalizers: no function of atexit runs.
            util.Finalize(None, self._at_exit, exitpriority=0)

    def _at_exit(self) -> None:
        if self._is_closed or os.getpid() != self._pid:  # a forked child has another process id
            return
        # The interpreter stores an uncaught exception, but in a child of multiprocessing it is still being handled.
        self.finish(status_after(getattr(sys, "last_value", None) or sys.exc_info()[1]))
        self.close()


def wait_until(limit_s: float, is_over: Callable[[], bool]) -> float:
    """Wait until a condition holds; return the seconds that are left of the limit.

    Steps are counted, because a frozen clock (freezegun) reaches no deadline.
    """
    steps = int(limit_s / WAIT_STEP_S)
    while steps > 0 and not is_over():
        time.sleep(WAIT_STEP_S)
        steps -= 1
    return steps * WAIT_STEP_S


def _death_text(code: int) -> str:  # the end of a sentence about the agent
    if code >= 0:
        return f"ended with status {code}" + (f", because {WHY_NO_RESOURCES}" if code == NO_RESOURCES else "")
    is_sigkill = -code == signal.SIGKILL  # the kernel sends it if memory runs out
    return f"was killed by signal {-code}" + (", maybe because memory ran out" if is_sigkill else "")


def _is_locked(path: Path) -> bool:
    """Whether an aggregator still holds the lock of a run folder."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def status_after(error: BaseException | None) -> str:
    """Return the status of a training that ended with this exception, or without one."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    has_failed = error.code not in (None, 0) if isinstance(error, SystemExit) else error is not None
    return "failed" if has_failed else "completed"


def _run_folder(config: Config, place: Place) -> str:
    """Return the path of the run folder; empty if it is not UTF-8, because messages and run.json are UTF-8."""
    folder = str(_wanted_folder(config, place))
    return folder if folder == folder.encode(errors="ignore").decode() else ""


def _wanted_folder(config: Config, place: Place) -> Path:
    parent, restart_id = Path(config.run_dir).absolute(), _safe_name(place.restart_id)
    if config.run_name:
        return parent / config.run_name
    if restart_id and not _UUID.fullmatch(restart_id):
        return parent / restart_id
    # Without an id from the user, torchrun's run id is random.  The folder's name ends with the first letters of this
    # id, so the folder is found after a restart.
    suffix = restart_id[:8] or secrets.token_hex(4)
    earlier = sorted(parent.glob(f"????????-??????-{suffix}")) if restart_id else []
    return earlier[-1] if earlier else parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{suffix}"


def _safe_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name).lstrip(".-_")[:100]


def _command() -> list[str]:
    """Return the command line; of a long one the beginning, because the ring has room for 64 KiB of facts."""
    words, letters_left = [text(word) for word in redacted(sys.argv)], MAX_COMMAND_LETTERS
    for index, word in enumerate(words):
        letters_left -= len(word) + 1
        if letters_left < 0:
            return [*words[:index], f"... {len(words) - index:,} more words"]
    return words
