"""The cost of an agent at default settings: share of a core, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.figure import Figure

SETTLE_S, MEASURE_S = 10.0, 60.0  # the 16 quick clock exchanges end within SETTLE_S

# A usual training job: 0.4 s per iteration, 10 iterations per window.
_TRAINER = """
import time, effllm
with effllm.monitor(parameters=1_000_000) as m:
    while True:
        time.sleep(0.4)
        m.iteration(tokens=4096, samples=2, loss=1.0)
"""


def measure(settle_s: float = SETTLE_S, measure_s: float = MEASURE_S) -> list[Figure]:
    """Train one rank for `measure_s`; measure CPU time and memory of its agent and its aggregator."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
        environ |= {"EFFICIENTLLM_RUN_DIR": folder}
        trainer = subprocess.Popen([sys.executable, "-c", _TRAINER], env=environ, stdout=subprocess.DEVNULL)
        try:
            time.sleep(settle_s)
            agent, aggregator = _processes(trainer.pid)
            before = [_cpu_s(process) for process in (agent, aggregator)]
            began_s = time.monotonic()
            time.sleep(measure_s)
            spent_s = time.monotonic() - began_s
            after = [_cpu_s(process) for process in (agent, aggregator)]
            memory = [process.memory_full_info() for process in (agent, aggregator)]
        finally:
            trainer.terminate()
            trainer.wait()
            psutil.wait_procs([agent, aggregator], timeout=10)
    shares = [(late - early) / spent_s for early, late in zip(before, after, strict=True)]
    return [
        Figure("agent: share of a core at default settings", shares[0] * 100, "%", goal=0.1),
        Figure("agent: resident memory", memory[0].rss / 1e6, "MB", goal=40.0, detail={"uss_mb": memory[0].uss / 1e6}),
        Figure("aggregator of one rank: share of a core", shares[1] * 100, "%"),
        Figure("aggregator: resident memory", memory[1].rss / 1e6, "MB", detail={"uss_mb": memory[1].uss / 1e6}),
    ]


def _processes(trainer: int) -> tuple[psutil.Process, psutil.Process]:
    (agent,) = psutil.Process(trainer).children()
    (aggregator,) = agent.children()
    return agent, aggregator


def _cpu_s(process: psutil.Process) -> float:
    # The scheduler counts in ns. psutil counts in units of 10 ms. The goal, 0.1 % of a minute, is 60 ms.
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
