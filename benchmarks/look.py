"""The cost of ``effllm top`` on a terminal, for a job of 8,192 ranks: ``python -m benchmarks.look``.

The program runs on a pseudo terminal of 80 columns and 24 lines, and all bytes that it sends are counted.  nvitop runs
on the same terminal with eight GPUs of the NVML library of the tests, and W&B's LEET, where .venv-frameworks has it,
with an offline run of 20 metrics and 3,000 steps: the three programs show different data.  Times depend on the load of
the machine, so the CPU times are beside them; with --realtime the programs do not wait for a CPU.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, median
from benchmarks.large_run import LargeRun, large_run
from benchmarks.machine import machine
from tests import nvml_library

RESULTS = Path(__file__).parent / "results"
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "run_folder_5"
NVITOP = Path(__file__).parents[1] / ".venv-peers" / "bin" / "nvitop"
FRAMEWORKS = Path(__file__).parents[1] / ".venv-frameworks" / "bin"
OFFLINE_RUN = """
import math, sys, wandb
with wandb.init(mode="offline", dir=sys.argv[1], project="look", settings=wandb.Settings(console="off")) as run:
    for step in range(3000):
        run.log({f"metric{key}": math.sin(step / 50 + key) for key in range(20)}, step=step)
"""
COLUMNS, LINES = 80, 24
REPEATS, KEYS, IDLE_S = 9, 200, 20.0
LAST_LINE = b"q quit"  # in the last line of the first frame with values
NVITOP_MARK, LEET_MARK = b"700W", b"Run Overview"  # the power limit of a GPU; the title of a pane
GOALS = {"first_frame_ms": 300.0, "frame_ms": 5.0, "memory_mb": 100.0, "idle_bytes_per_s": 4000.0}
JOBS, MORE_MS = (
    1000,
    150.0,
)  # of a folder of running jobs: by so much may its first frame come later than that of one job


class Watched:
    """A program on a pseudo terminal, whose output is counted."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, term: str = "xterm-256color"
    ) -> None:
        self._keyboard, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        self.started_s = time.monotonic()
        # An absolute LANG: programs show other signs in other locales.
        variables = {**os.environ, **(environ or {}), "TERM": term, "LANG": "C.UTF-8"}
        self._process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=terminal, stdout=terminal, stderr=terminal, env=variables
        )
        os.close(terminal)
        self.process = psutil.Process(self._process.pid)
        self.sent = 0

    def read(self, until_s: float, mark: bytes = b"", quiet_s: float = 0.0) -> bytes:
        """Read until a moment, a mark in the text, or a silence of ``quiet_s`` after the first byte."""
        text = bytearray()
        while (left_s := until_s - time.monotonic()) > 0:
            timeout_s = min(left_s, quiet_s) if quiet_s and text else left_s
            if not select.select([self._keyboard], [], [], timeout_s)[0]:
                break
            try:
                part = os.read(self._keyboard, 65536)
            except OSError:
                break
            text += part
            if mark and mark in text:
                break
        self.sent += len(text)
        return bytes(text)

    def press(self, key: bytes) -> None:
        os.write(self._keyboard, key)

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def cpu_s(self) -> float:
        times = [one.cpu_times() for one in self._processes()]
        return sum(one.user + one.system for one in times)

    def memory_mb(self) -> float:
        """Return the peak of the resident memory, summed over the program and its children."""
        texts = [Path(f"/proc/{one.pid}/status").read_text() for one in self._processes()]
        return sum(int(text.partition("VmHWM:")[2].split()[0]) for text in texts) / 1024

    def end(self) -> None:
        self.press(b"q")
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait(10.0)
        os.close(self._keyboard)


def first_frames(command: Sequence[str], mark: bytes, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the times until the first frame, and the CPU time used for it."""
    walls_ms, cpus_ms, sizes = [], [], []
    for _ in range(REPEATS):
        watched = Watched(command, environ)
        text = watched.read(watched.started_s + 30.0, mark)
        assert mark in text, text[-500:]
        walls_ms.append(1e3 * (time.monotonic() - watched.started_s))
        cpus_ms.append(1e3 * watched.cpu_s())
        sizes.append(len(text))
        watched.read(time.monotonic() + 0.5)
        watched.end()
    return {"wall_ms": walls_ms, "cpu_ms": cpus_ms, "bytes": median(sizes)}


def of_top(folder: Path, run: LargeRun) -> dict[str, Any]:
    """Measure ``effllm top`` on a run folder."""
    command = [str(Path(sys.executable).with_name("effllm")), "top", str(folder)]
    found: dict[str, Any] = {"first": first_frames(command, LAST_LINE)}
    watched = Watched(command)
    watched.read(watched.started_s + 30.0, LAST_LINE)
    watched.read(time.monotonic() + 2.0)
    found["frame"] = _frames(watched)
    before, cpu_s = watched.sent, watched.cpu_s()
    watched.read(time.monotonic() + IDLE_S)
    found["idle_bytes_per_s"] = (watched.sent - before) / IDLE_S
    found["idle_cpu_share"] = (watched.cpu_s() - cpu_s) / IDLE_S
    found["live_bytes_per_window"] = _live(watched, run)
    found["replay_bytes_per_window"] = _replay(watched, run.window)
    found["memory_mb"] = watched.memory_mb()
    watched.end()
    return found


def _frames(watched: Watched) -> dict[str, Any]:
    """Press keys that change the table, and return the time to the answer and the CPU time of a frame."""
    delays_ms, sizes = [], []
    cpu_s = watched.cpu_s()
    for at in range(KEYS):
        began_s = time.monotonic()
        watched.press(b"j" if at < KEYS // 2 else b"k")
        text = watched.read(began_s + 1.0, quiet_s=0.02)
        delays_ms.append(1e3 * (time.monotonic() - began_s) - 20.0)  # without the silence at the end
        sizes.append(len(text))
    return {"cpu_ms": 1e3 * (watched.cpu_s() - cpu_s) / KEYS, "delay_ms": delays_ms, "bytes": median(sizes)}


def _live(watched: Watched, run: LargeRun) -> float:
    """Return the bytes that a new window of a running job costs."""
    before = watched.sent
    for _ in range(3):
        run.write_window(without_lost=True)
        watched.read(time.monotonic() + 2.5)
    return (watched.sent - before) / 3


def _replay(watched: Watched, windows: int) -> float:
    """Replay the whole run, and return the bytes for a window."""
    watched.press(b"\x1bOH")  # Home
    watched.read(time.monotonic() + 5.0, b"paused")
    watched.press(b"++++ ")
    before = watched.sent
    text = watched.read(time.monotonic() + 60.0, LAST_LINE)
    assert LAST_LINE in text, text[-500:]
    return (watched.sent - before) / windows


def of_fleet(folder: Path, count: int) -> dict[str, Any]:
    """Measure ``effllm top`` on a folder of running jobs, which are copies of a recorded run."""
    summary = json.loads((GOLDEN / "summary.json").read_bytes())
    for number in range(count):
        run = folder / f"job-{number:04}"
        run.mkdir(parents=True)
        known = {"run_id": run.name, "status": "running", "is_over": False, "updated_time_s": time.time()}
        (run / "summary.json").write_text(json.dumps({**summary, **known}))
    command = [str(Path(sys.executable).with_name("effllm")), "top", str(folder)]
    found: dict[str, Any] = {"first": first_frames(command, LAST_LINE)}
    watched = Watched(command)
    watched.read(watched.started_s + 30.0, LAST_LINE)
    watched.read(time.monotonic() + 3.0)
    found["frame"] = _frames(watched)
    found["memory_mb"] = watched.memory_mb()
    watched.end()
    return found


def render_ms(folder: Path) -> float:
    """Return the time of the pure part of a frame: from the values to the lines."""
    from effllm.commands.top_folder import FolderSource
    from effllm.commands.top_reader import ordered_frame
    from effllm.views.top.screen import render
    from effllm.views.top.view_state import Order, TopView

    source = FolderSource(folder)
    source.refresh()
    source.refresh_hosts()
    frame = ordered_frame(source, Order())
    times_ms = []
    for offset in range(500):
        began_s = time.thread_time()
        render(frame, TopView(offset=offset), COLUMNS, LINES)
        times_ms.append(1e3 * (time.thread_time() - began_s))
    return statistics.median(times_ms)


def of_nvitop(folder: Path) -> dict[str, Any]:
    """Measure nvitop with eight GPUs; ``why`` is the reason if it was not measured."""
    if not NVITOP.exists():
        return {"why": f"{NVITOP.parent} has no nvitop: make bench-look installs it"}
    (folder / "library").mkdir()
    library = nvml_library.build(folder / "library")
    if library is None:
        return {"why": "no C compiler: the NVML library of the tests cannot be built"}
    trace = nvml_library.Trace(library, folder / "trace")
    trace.write(*(nvml_library.Gpu(f"GPU-{number}") for number in range(8)))
    return of_peer([str(NVITOP), "--monitor", "auto"], NVITOP_MARK, trace.environment())


def of_leet(folder: Path) -> dict[str, Any]:
    """Measure W&B's LEET with an offline run; ``why`` is the reason if it was not measured."""
    if not (FRAMEWORKS / "wandb").exists():
        return {"why": "no .venv-frameworks (make test-frameworks installs it)"}
    environ = {**os.environ, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true", "WANDB_CONFIG_DIR": str(folder)}
    subprocess.run([FRAMEWORKS / "python", "-c", OFFLINE_RUN, folder], check=True, env=environ, capture_output=True)
    [run] = folder.glob("wandb/offline-run-*")
    return of_peer([str(FRAMEWORKS / "wandb"), "leet", "run", str(run)], LEET_MARK, environ)


def of_peer(command: Sequence[str], mark: bytes, environ: Mapping[str, str]) -> dict[str, Any]:
    """Measure the first frame, the memory and the idle screen of another program."""
    try:
        found: dict[str, Any] = {"first": first_frames(command, mark, environ)}
    except AssertionError as error:
        return {"why": f"no frame: {str(error)[:200]}"}
    watched = Watched(command, environ)
    watched.read(watched.started_s + 30.0, mark)
    watched.read(time.monotonic() + 2.0)
    before, cpu_s = watched.sent, watched.cpu_s()
    watched.read(time.monotonic() + IDLE_S)
    found["idle_bytes_per_s"] = (watched.sent - before) / IDLE_S
    found["idle_cpu_share"] = (watched.cpu_s() - cpu_s) / IDLE_S
    found["memory_mb"] = watched.memory_mb()
    watched.end()
    return found


def figures_of(top: dict[str, Any], lines_ms: float, peers: Mapping[str, dict[str, Any]]) -> list[Figure]:
    """Return all figures, with the goals of ``effllm top``."""
    found = [
        Figure("top: first frame", median(top["first"]["wall_ms"]), "ms", GOALS["first_frame_ms"]),
        Figure("top: CPU time until the first frame", median(top["first"]["cpu_ms"]), "ms"),
        Figure("top: CPU time of a frame after a key", top["frame"]["cpu_ms"], "ms", GOALS["frame_ms"]),
        Figure("top: lines of a frame (pure part)", lines_ms, "ms"),
        Figure("top: delay of a key", median(top["frame"]["delay_ms"]), "ms"),
        Figure("top: bytes of a frame after a key", top["frame"]["bytes"], "bytes"),
        Figure("top: peak memory", top["memory_mb"], "MB", GOALS["memory_mb"]),
        Figure("top: bytes to an idle terminal", top["idle_bytes_per_s"], "bytes/s", GOALS["idle_bytes_per_s"]),
        Figure("top: CPU while idle", 100 * top["idle_cpu_share"], "% of a core"),
        Figure("top: bytes for a new window", top["live_bytes_per_window"], "bytes"),
        Figure("top: bytes for a window of a replay", top["replay_bytes_per_window"], "bytes"),
    ]
    for name, peer in peers.items():
        found += _of_peer(name, peer)
    return found


def _of_peer(name: str, peer: dict[str, Any]) -> list[Figure]:
    if "why" in peer:
        return [Figure(f"{name}: first frame", None, "ms", note=peer["why"])]
    return [
        Figure(f"{name}: first frame", median(peer["first"]["wall_ms"]), "ms"),
        Figure(f"{name}: CPU time until the first frame", median(peer["first"]["cpu_ms"]), "ms"),
        Figure(f"{name}: peak memory", peer["memory_mb"], "MB"),
        Figure(f"{name}: bytes to an idle terminal", peer["idle_bytes_per_s"], "bytes/s"),
        Figure(f"{name}: CPU while idle", 100 * peer["idle_cpu_share"], "% of a core"),
    ]


def _of_fleets(found: Mapping[int, dict[str, Any]]) -> list[Figure]:
    one, many = found[1], found[JOBS]
    more_ms = median(many["first"]["wall_ms"]) - median(one["first"]["wall_ms"])
    return [
        Figure("top: first frame of a folder with one running job", median(one["first"]["wall_ms"]), "ms"),
        Figure(f"top: {JOBS:,} running jobs: later first frame", more_ms, "ms", MORE_MS),
        Figure(f"top: {JOBS:,} running jobs: CPU time of a key", many["frame"]["cpu_ms"], "ms", GOALS["frame_ms"]),
        Figure(f"top: {JOBS:,} running jobs: peak memory", many["memory_mb"], "MB", GOALS["memory_mb"]),
    ]


def main() -> int:
    """Measure, print a table, and return 1 if a goal is not met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=30)
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument(
        "--realtime", action="store_true", help="do not wait for the CPU behind other programs; needs root"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "large"
        run = large_run(folder, given.ranks, given.windows)
        if given.realtime:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(20))
        lines_ms = render_ms(folder)
        top = of_top(folder, run)
        run.close()
        fleets = {count: of_fleet(Path(name) / f"jobs-{count}", count) for count in (1, JOBS)}
        peers = {"nvitop": of_nvitop(Path(name)), "LEET": of_leet(Path(name))}
    figures = [*figures_of(top, lines_ms, peers), *_of_fleets(fleets)]
    shown = Table("figure", "value", "goal", "", title=f"{given.ranks:,} ranks, {COLUMNS}x{LINES}")
    for one in figures:
        value = one.note if one.value is None else f"{one.value:,.3g} {one.unit}"
        shown.add_row(
            one.name,
            value,
            "" if one.goal is None else f"{one.goal:,.0f}",
            {None: "", True: "met", False: "NOT MET"}[one.met],
        )
    Console(width=100).print(shown)
    if given.keep:
        about = machine(command="python -m benchmarks.look " + " ".join(sys.argv[1:]), load=os.getloadavg()[0])
        path = RESULTS / f"{about['date']}-look.json"
        body = {
            "machine": about,
            "figures": [one.to_dict() for one in figures],
            "top": top,
            "fleets": fleets,
            "peers": peers,
        }
        path.write_text(json.dumps(body, indent=2) + "\n")
        print(f"written: {path.relative_to(RESULTS.parents[1])}")
    return int(any(one.met is False for one in figures))


if __name__ == "__main__":
    raise SystemExit(main())
