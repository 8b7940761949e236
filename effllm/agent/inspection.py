"""The inspection of a stalled trainer, in a separate process, because the agent must not block.

Only the agent's own trainer is inspected. Py-spy reads the trainer's memory and does not stop the process.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Struct

from effllm.agent import flight_recorder, trainer_process
from effllm.config.switches import this_process
from effllm.records.wire import MAX_STACK

PY_SPY_S = 10.0
INSTALL = "pip install 'effllm[forensics]'"
MAX_TOP = 200


class InspectionOrders(Struct, frozen=True):
    """The process to inspect, and the folder for its dump."""

    pid: int
    rank: int
    trainer: int  # pidfd, or -1
    folder: str  # folder for copies of dumps; empty: no copies
    name: str  # name of the copied files


class InspectionResult(Struct, frozen=True):
    """The result of an inspection."""

    text: str
    top: str  # position of the main thread, in short form


def inspect(orders: InspectionOrders) -> InspectionResult:
    """Inspect a trainer: at most 10 s for its stacks, and at most 10 s for the dump of its NCCL flight recorder."""
    if has_ended(orders.trainer):
        return InspectionResult("the training process has ended\n", "ended")
    began_s = time.time()
    environ = this_process()
    # The trainer writes the dump while py-spy reads the stacks; a stopped process writes no dump.
    was_asked = flight_recorder.ask(orders.rank, environ)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began_s))
    process = trainer_process.description(orders.pid)
    stacks, top = _stacks(orders.pid)
    dump = _dump(orders, was_asked, began_s)
    parts = [f"rank {orders.rank}, process {orders.pid}, {stamp}", process, stacks, *([dump] if dump else [])]
    return InspectionResult(bounded("\n\n".join(parts) + "\n"), top or _by_kernel(process))


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


def has_ended(trainer: int) -> bool:
    return trainer >= 0 and bool(select.select([trainer], [], [], 0)[0])


def _stacks(pid: int) -> tuple[str, str]:
    beside = Path(sys.executable).parent / "py-spy"
    program = shutil.which("py-spy") or (str(beside) if beside.exists() else "")
    if not program:
        return f"no stacks: py-spy is not installed ({INSTALL})", ""
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
        said = " ".join(done.stderr.decode(errors="replace").split())[:500]
        return f"no stacks: py-spy failed: {said}", ""
    # The text before the version is the command line, which may contain secrets and line breaks.
    _, mark, stacks = ("\n" + done.stdout.decode(errors="replace")).rpartition("\nPython v")
    stacks = (mark + stacks).strip()
    return f"stacks, by py-spy:\n{stacks}", top_of(stacks, pid)


def _by_kernel(process: str) -> str:
    return process.partition("\n")[0].removeprefix("state: ")


def _dump(orders: InspectionOrders, was_asked: bool, began_s: float) -> str:
    paths = flight_recorder.dump_paths(orders.rank, this_process())
    try:
        if was_asked:
            dump = flight_recorder.wait(paths, began_s)
        else:  # torch may have written a dump after its own timeout, without a request
            dump = flight_recorder.newest(paths, Path(f"/proc/{orders.pid}").stat().st_mtime)
        if dump is None:
            return "the NCCL flight recorder did not write the requested dump" if was_asked else ""
        text = f"dump of the NCCL flight recorder: {dump}"
        if orders.folder and Path(orders.folder).is_dir():
            copied = Path(orders.folder) / "stacks" / f"{orders.name}.nccl"
            if flight_recorder.copy(dump, copied):
                text += (
                    f", copied to stacks/{copied.name}; python -m torch.distributed.flight_recorder.fr_trace reads it"
                )
    except OSError as error:
        return f"no dump of the NCCL flight recorder: {error}"
    return text


def main(arguments: list[str]) -> int:
    """Read `InspectionOrders` as JSON from the first descriptor, and write the result to the second."""
    source, target = map(int, arguments)
    os.lseek(source, 0, os.SEEK_SET)
    with os.fdopen(source, "rb") as file:
        orders = msgspec.json.decode(file.read(), type=InspectionOrders)
    body = msgspec.json.encode(inspect(orders))
    with os.fdopen(target, "wb") as file:
        file.write(body)
    return 0
