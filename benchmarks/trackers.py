"""Iteration time with a tracker that fails, over the time without the tracker: ``python -m benchmarks trackers``.

Two jobs (`paired_loop.py`) with the same settings, one without the tracker, train in turns; the processes of effllm are
stopped while the other job trains. The tracker is killed after its first calls, needs ten seconds for a call, or
rejects the key. The iteration time is without the time in which the training was runnable and waited for a CPU, so
other work on the machine is not counted; ``wall_ratio`` in the details has all time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil

from benchmarks.figure import Figure, interval_95, median

ROOT = Path(__file__).resolve().parent.parent
PAIRS, ITERATIONS, LOG_INTERVAL = 40, 40, 20
START_S = 120.0  # time until the first window
WARM_S = 15.0  # time before the first pair, in which the tracker is imported and has its first values
SLOW_S, ANSWERED_CALLS = 10.0, 3
FAULTS = {
    "killed": "is killed",
    "slow": f"needs {SLOW_S:g} s for a call",
    "refused": "rejects the key",
}
#: Sink -> module that must be installed, and the faults; W&B writes in calls of the training, and has no server here.
TRACKERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "otlp": ("opentelemetry.exporter.otlp.proto.http", tuple(FAULTS)),
    "mlflow": ("mlflow", tuple(FAULTS)),
    "wandb": ("wandb", ("",)),
}


def measure() -> list[Figure]:
    """Run a job for each tracker and fault."""
    figures = []
    for name, (module, faults) in TRACKERS.items():
        for fault in faults:
            title = f"iteration time, {name} that {FAULTS[fault]}" if fault else f"iteration time, {name} offline"
            if _is_installed(module):
                figures.append(_measure(f"{title}, over without the tracker", name, fault))
            else:
                figures.append(Figure(title, None, "ratio", note=f"{module} is not installed"))
    return figures


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _measure(title: str, name: str, fault: str) -> Figure:
    with tempfile.TemporaryDirectory() as folder, _failing(fault) as server:
        with _Job(Path(folder) / "without", "console", name, server) as without:
            option = "" if name == "wandb" else ":every=0"
            with _Job(Path(folder) / "with", f"console,{name}{option}", name, server) as tracked:
                pairs = _pairs(tracked, without)
        summary, events = tracked.results()
    ratios = [_busy_s(on) / _busy_s(off) for on, off in pairs]
    walls = [on["wall_s"] / off["wall_s"] for on, off in pairs]
    return Figure(
        title,
        median(ratios),
        "ratio",
        goal=1.005,
        interval=interval_95(ratios, median),
        detail={
            "pairs": len(pairs),
            "iterations_a_side": ITERATIONS,
            "seconds_without": median([_busy_s(off) / ITERATIONS for _, off in pairs]),
            "wall_ratio": median(walls),
            "wall_interval": interval_95(walls, median),
            "asleep_ms_per_iteration": [
                1e3 * sum(one["asleep_s"] for one in side) / len(pairs) / ITERATIONS
                for side in zip(*pairs, strict=True)
            ],
            "windows_left_out": summary["left_out"].get(name, 0),
            "lines": [one["text"] for one in events if one["kind"] == "sink" and name in one["text"]],
        },
    )


def _pairs(tracked: _Job, without: _Job) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return the clocks of blocks with and without the tracker, in random order within each pair."""
    until_s = time.monotonic() + WARM_S
    while time.monotonic() < until_s:
        tracked.train(), without.train()
    order, found = random.Random(7), []
    for _ in range(PAIRS):
        clocks = {job: job.train() for job in order.sample([tracked, without], 2)}
        found.append((clocks[tracked], clocks[without]))
    return found


class _Job:
    """A training whose processes of effllm are stopped, except in its blocks."""

    def __init__(self, folder: Path, sinks: str, tracker: str, server: str) -> None:
        folder.mkdir()
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EFFICIENTLLM_")}
        environ |= {
            "EFFICIENTLLM_RUN_DIR": str(folder),
            "EFFICIENTLLM_LOG_INTERVAL": str(LOG_INTERVAL),
            "EFFICIENTLLM_SINKS": sinks,
            "OTEL_EXPORTER_OTLP_ENDPOINT": server,
            "MLFLOW_TRACKING_URI": server,
            "MLFLOW_RUN_ID": "1" * 32,
            "PYTHONPATH": str(ROOT),
            "WANDB_SILENT": "true",
            "WANDB_DIR": str(folder),
        }
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.paired_loop", tracker, str(ITERATIONS)],
            env=environ, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ours: list[psutil.Process] = []
        until_s = time.monotonic() + START_S
        while not list(folder.glob("*/windows-*.jsonl")):
            if time.monotonic() > until_s:
                raise TimeoutError(f"no window within {START_S:g} s")
            self.train()
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # also of a zombie
                if "effllm." in " ".join(child.cmdline()):
                    self._ours.append(child)
        self._send(signal.SIGSTOP)

    def __enter__(self) -> _Job:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self._send(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(60)
        psutil.wait_procs(self._ours, 60)

    def train(self) -> dict[str, float]:
        """Train a block; return its clocks."""
        self._send(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        clocks: dict[str, float] = self._line()
        self._send(signal.SIGSTOP)
        return clocks

    def results(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the summary and the events."""
        [run] = [path.parent for path in self._folder.glob("*/summary.json")]
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        return json.loads((run / "summary.json").read_text()), events

    def _line(self) -> Any:
        while self._process.stdout is not None:
            line = self._process.stdout.readline()
            if not line:
                raise ChildProcessError("the training has ended")
            if line.startswith("{"):  # other lines: the console
                return json.loads(line)
        return None

    def _send(self, number: signal.Signals) -> None:
        for process in self._ours:
            process.send_signal(number)


def _busy_s(side: dict[str, float]) -> float:
    """Return the seconds of work and of sleep."""
    return side["cpu_s"] + side["asleep_s"]


@contextmanager
def _failing(fault: str) -> Iterator[str]:
    """Start a server with a fault, and return its address; without a fault it answers at once."""
    closing = Event()
    calls = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            calls[0] += 1
            if fault == "slow":
                closing.wait(SLOW_S)
            self.send_response(403 if fault == "refused" else 200)
            body = b'{"error_code": "PERMISSION_DENIED", "message": "invalid key"}' if fault == "refused" else b"{}"
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            if fault == "killed" and calls[0] == ANSWERED_CALLS:
                Thread(target=stop, daemon=True).start()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a closed connection is expected

    def stop() -> None:
        server.shutdown()
        server.server_close()

    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        closing.set()
        stop()
