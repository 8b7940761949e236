"""Iteration time with a tracker that fails, over the time without metrics: ``python -m benchmarks trackers``.

Each job alternates between metrics on and metrics off (`paired_loop.py`). Its tracker is killed after its first calls,
needs ten seconds for a call, or rejects the key. The iteration time is without the time in which the training was
runnable and waited for a CPU, so other work on the machine is not counted; ``wall_ratio`` in the details has all time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.figure import Figure, interval_95, median

ROOT = Path(__file__).resolve().parent.parent
PAIRS, ITERATIONS, LOG_INTERVAL = 60, 60, 20
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
                figures.append(_measure(f"{title}, on over off", name, fault))
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
        times = Path(folder) / "times.json"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("EFFICIENTLLM_")}
        environ |= {
            "EFFICIENTLLM_RUN_DIR": folder,
            "EFFICIENTLLM_LOG_INTERVAL": str(LOG_INTERVAL),
            "EFFICIENTLLM_SINKS": f"console,{name}" + {"wandb": ""}.get(name, ":every=0"),
            "OTEL_EXPORTER_OTLP_ENDPOINT": server,
            "MLFLOW_TRACKING_URI": server,
            "MLFLOW_RUN_ID": "1" * 32,
            "PYTHONPATH": str(ROOT),
            "WANDB_SILENT": "true",
            "WANDB_DIR": folder,
        }
        job = [sys.executable, "-m", "benchmarks.paired_loop", str(times), str(PAIRS), str(ITERATIONS), name]
        subprocess.run(job, env=environ, check=True, stdout=subprocess.DEVNULL, cwd=folder)
        pairs: list[dict[str, dict[str, float]]] = json.loads(times.read_text())
        [run] = [path.parent for path in Path(folder).glob("*/summary.json")]
        summary = json.loads((run / "summary.json").read_text())
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    ratios = [_busy_s(pair["on"]) / _busy_s(pair["off"]) for pair in pairs]
    walls = [pair["on"]["wall_s"] / pair["off"]["wall_s"] for pair in pairs]
    return Figure(
        title,
        median(ratios),
        "ratio",
        goal=1.005,
        interval=interval_95(ratios, median),
        detail={
            "pairs": len(pairs),
            "iterations_a_side": ITERATIONS,
            "seconds_off": median([_busy_s(pair["off"]) / ITERATIONS for pair in pairs]),
            "wall_ratio": median(walls),
            "wall_interval": interval_95(walls, median),
            "asleep_ms_per_iteration": {
                side: 1e3 * sum(pair[side]["asleep_s"] for pair in pairs) / len(pairs) / ITERATIONS
                for side in ("on", "off")
            },
            "windows_left_out": summary["left_out"].get(name, 0),
            "lines": sorted({one["text"] for one in events if one["kind"] == "sink" and name in one["text"]}),
        },
    )


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

    def stop() -> None:
        server.shutdown()
        server.server_close()

    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        closing.set()
        stop()
