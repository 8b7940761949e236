"""The cost of ``effllm top`` on a terminal, for a job of 8,192 ranks: ``python -m benchmarks.look``.

The program runs on a pseudo terminal of 80 columns and 24 lines, and all bytes that it sends are counted.  nvitop runs
on the same terminal with eight GPUs of the NVML library of the tests.  Times depend on the load of the machine, so the
CPU times are beside them; with --realtime the programs do not wait for a CPU.
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
NVITOP = Path(__file__).parents[1] / ".venv-peers" / "bin" / "nvitop"
COLUMNS, LINES = 80, 24
REPEATS, KEYS, IDLE_S, NVITOP_IDLE_S = 9, 200, 20.0, 20.0
LAST_LINE = b"q quit"  # in the last line of the first frame with values
NVITOP_MARK = b"700W"  # the power limit of a GPU
GOALS = {"first_frame_ms": 300.0, "frame_ms": 5.0, "memory_mb": 100.0, "idle_bytes_per_s": 4000.0}


class Watched:
    """A program on a pseudo terminal, whose output is counted."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] | None = None, term: str = "xterm") -> None:
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

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def memory_mb(self) -> float:
        """Return the peak of the resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

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
    command, environ = [str(NVITOP), "--monitor", "auto"], trace.environment()
    try:
        found: dict[str, Any] = {"first": first_frames(command, NVITOP_MARK, environ)}
    except AssertionError as error:
        return {"why": f"nvitop shows no frame with the NVML library of the tests: {str(error)[:300]}"}
    watched = Watched(command, environ)
    watched.read(watched.started_s + 30.0, NVITOP_MARK)
    watched.read(time.monotonic() + 2.0)
    before, cpu_s = watched.sent, watched.cpu_s()
    watched.read(time.monotonic() + NVITOP_IDLE_S)
    found["idle_bytes_per_s"] = (watched.sent - before) / NVITOP_IDLE_S
    found["idle_cpu_share"] = (watched.cpu_s() - cpu_s) / NVITOP_IDLE_S
    found["memory_mb"] = watched.memory_mb()
    watched.end()
    return found


def figures_of(top: dict[str, Any], lines_ms: float, nvitop: dict[str, Any]) -> list[Figure]:
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
    names = (
        "first frame",
        "CPU time until the first frame",
        "peak memory",
        "bytes to an idle terminal",
        "CPU while idle",
    )
    units = ("ms", "ms", "MB", "bytes/s", "% of a core")
    if "why" in nvitop:
        return found + [
            Figure(f"nvitop: {name}", None, unit, note=nvitop["why"]) for name, unit in zip(names, units, strict=True)
        ]
    first = nvitop["first"]
    values = (
        median(first["wall_ms"]),
        median(first["cpu_ms"]),
        nvitop["memory_mb"],
        nvitop["idle_bytes_per_s"],
        100 * nvitop["idle_cpu_share"],
    )
    return found + [
        Figure(f"nvitop: {name}", value, unit) for name, value, unit in zip(names, values, units, strict=True)
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
        nvitop = of_nvitop(Path(name))
    figures = figures_of(top, lines_ms, nvitop)
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
        body = {"machine": about, "figures": [one.to_dict() for one in figures], "top": top, "nvitop": nvitop}
        path.write_text(json.dumps(body, indent=2) + "\n")
        print(f"written: {path.relative_to(RESULTS.parents[1])}")
    return int(any(one.met is False for one in figures))


if __name__ == "__main__":
    raise SystemExit(main())
