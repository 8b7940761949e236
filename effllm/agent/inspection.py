"""The inspection of a stalled trainer, in a thread of its own, because the agent must not block.

Only the agent's own trainer is inspected. Py-spy reads the trainer's memory and does not stop the process.
The dump of torch's NCCL flight recorder is requested and copied, and never decoded: it is a pickle, and decoding a
pickle runs any code in it.
"""

from __future__ import annotations

import os
import re
import select
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from msgspec import Struct

from effllm.agent.proc import INSTALL_PY_SPY, process_state, py_spy_error, py_spy_path, short_file
from effllm.config.switches import process_environ
from effllm.records.wire import MAX_STACK
from effllm.store import own_files

# Names of variables and files are from torch's ProcessGroupNCCL.hpp (DumpPipe) and FlightRecorder.cpp, 2.4 to 2.13.
DUMP_PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"  # prefix of a rank's pipe, PREFIX<rank>.pipe; any byte requests a dump
DUMP_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # of a rank's dump, PREFIX<rank>
DUMP_WAIT_S = 10.0  # torch reads its pipe once a second
SETTLED_S = 1.0  # a dump is complete when it has not grown for this time
MAX_DUMP_BYTES = 64 * 2**20
STATES = {"R": "running", "S": "sleeping", "D": "uninterruptible sleep", "T": "stopped", "t": "traced", "Z": "dead"}
PY_SPY_S = 10.0
MAX_TOP = 200


class InspectionResult(Struct, frozen=True):
    """The result of an inspection."""

    text: str  # state of the process, stacks of its threads, and path of the dump
    top: str  # position of the main thread, in short form


def inspect(pid: int, descriptor: int, rank: int, copy: Path | None) -> InspectionResult:
    """Inspect a trainer: at most 10 s for its stacks, and at most 10 s for the dump of its NCCL flight recorder.

    ``descriptor`` is its pidfd, or -1; ``copy`` is the path for a copy of the dump, in the folder ``stacks``.
    """
    if has_ended(descriptor):
        return InspectionResult("the training process has ended\n", "ended")
    began_s = time.time()
    environ = process_environ()
    # The trainer writes the dump while py-spy reads the stacks; a stopped process writes no dump.
    is_requested = request_dump(rank, environ)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_s))
    process = process_description(pid)
    stacks, top = _stacks_and_top(pid)
    dump = _dump_line(pid, rank, copy, is_requested, began_s)
    parts = [f"rank {rank}, process {pid}, {stamp}", process, stacks, *([dump] if dump else [])]
    top = top or process.removeprefix("state: ")
    return InspectionResult(bounded("\n\n".join(parts) + "\n"), top)


def bounded(text: str) -> str:
    """Cut a text to the limit of a message; the stacks of the first threads are kept."""
    return text if len(text) <= MAX_STACK else text[: MAX_STACK - 20] + "\n... (cut off)\n"


def top_of(stacks: str, pid: int) -> str:
    """Return the innermost frame of the main thread from the output of py-spy, without the folder of the file."""
    threads = re.findall(r'^Thread (\S+)[^\n]*?((?:: "[^"\n]*")?)\n((?:[ \t]+[^\n]+\n?)+)', stacks, re.MULTILINE)
    if not threads:
        return ""
    main = next(
        (frames for number, name, frames in threads if number == str(pid) or "MainThread" in name), threads[0][2]
    )
    return str(main.splitlines()[0].strip()[:MAX_TOP])


def has_ended(pidfd: int) -> bool:
    return pidfd >= 0 and bool(select.select([pidfd], [], [], 0)[0])


def _stacks_and_top(pid: int) -> tuple[str, str]:
    """Return the stacks, or the reason for their absence, and `InspectionResult.top`, empty without stacks."""
    if not (program := py_spy_path()):
        return f"no stacks: py-spy is not installed ({INSTALL_PY_SPY})", ""
    try:
        # Without --nonblocking, py-spy stops the process while it reads, and afterwards continues it. A process
        # that was stopped before would then run again.
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no stacks: {error}", ""
    if done.returncode:
        return f"no stacks: {py_spy_error(done.stderr)}", ""
    # The text before the version is the command line, which may contain secrets and line breaks.
    _, mark, stacks = ("\n" + done.stdout.decode(errors="replace")).rpartition("\nPython v")
    stacks = (mark + stacks).strip()
    return f"stacks, by py-spy:\n{stacks}", top_of(stacks, pid)


def _dump_line(pid: int, rank: int, copy: Path | None, is_requested: bool, began_s: float) -> str:
    paths = dump_paths(rank, process_environ())
    try:
        # Without a request, torch may have written a dump after its own timeout. The time of /proc/PID is that of its
        # first lookup, which may be later than a dump.
        dump = wait_for_dump(paths, began_s) if is_requested else newest_dump(paths, psutil.Process(pid).create_time())
        if dump is None:
            return "the NCCL flight recorder did not write the requested dump" if is_requested else ""
        text = f"dump of the NCCL flight recorder: {dump}"
        if copy is not None and copy.parents[1].is_dir() and copy_dump(dump, copy):
            text += f", copied to stacks/{copy.name}; python -m torch.distributed.flight_recorder.fr_trace reads it"
    except (OSError, psutil.Error) as error:
        return f"no dump of the NCCL flight recorder: {error}"
    return text


def process_description(pid: int) -> str:
    """Return a line with the state of a process, and the kernel function in which it waits."""
    letter, kernel_function = process_state(pid), short_file(f"/proc/{pid}/wchan").strip()
    waits = f", waits in {kernel_function}" if kernel_function not in ("", "0") else ""
    return f"state: {letter} ({STATES.get(letter, 'unknown')}){waits}"


def dump_paths(rank: int, environ: Mapping[str, str]) -> list[Path]:
    """Return where torch may have written the dump of a rank: by its variable, else the places of its versions."""
    named = [environ[name] for name in DUMP_PREFIXES if environ.get(name)]
    if named:
        return [Path(f"{named[0]}{rank}")]
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/tmp')}/.cache"  # noqa: S108 - torch's own default
    return [Path(f"{cache}/torch/comm_lib_trace_rank_{rank}"), Path(f"/tmp/nccl_trace_rank_{rank}")]  # noqa: S108 - as above


def request_dump(rank: int, environ: Mapping[str, str]) -> bool:
    """Request a dump through torch's pipe without waiting; return whether the request was written."""
    if not environ.get(DUMP_PIPE):
        return False
    with suppress(OSError):  # no pipe, no reader (ENXIO), or a full pipe (a dump was already requested)
        pipe = f"{environ[DUMP_PIPE]}{rank}.pipe"
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            return stat.S_ISFIFO(status.st_mode) and status.st_uid == os.getuid() and os.write(descriptor, b"1") == 1
        finally:
            os.close(descriptor)
    return False


def newest_dump(paths: Sequence[Path], since_time_s: float) -> Path | None:
    """Return the newest dump since ``since_time_s`` that our user owns."""
    dumps = []
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_mtime >= since_time_s:
                dumps.append((status.st_mtime, path))
    return max(dumps)[1] if dumps else None


def wait_for_dump(paths: Sequence[Path], since_time_s: float) -> Path | None:
    """Wait until the newest dump since ``since_time_s`` no longer grows, at most `DUMP_WAIT_S`; return its path."""
    deadline_s = time.monotonic() + DUMP_WAIT_S
    last_dump: tuple[Path, int] | None = None  # path and size
    unchanged_since_s = 0.0
    while (now_s := time.monotonic()) < deadline_s:
        path = newest_dump(paths, since_time_s)
        size = path.stat().st_size if path else 0
        if path and size and last_dump == (path, size):
            if now_s - unchanged_since_s >= SETTLED_S:
                return path
        elif path:
            last_dump, unchanged_since_s = (path, size), now_s
        time.sleep(0.1)
    return last_dump[0] if last_dump and last_dump[1] else None


def copy_dump(dump: Path, to: Path) -> bool:
    """Copy a dump to a private file; return ``False`` if the dump is too large."""
    with os.fdopen(os.open(dump, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        dump_bytes = file.read(MAX_DUMP_BYTES + 1)
    if len(dump_bytes) > MAX_DUMP_BYTES:
        return False
    own_files.make_folder(to.parent)
    own_files.replace_file(to, dump_bytes, durable=False)
    return True
