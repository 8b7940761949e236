"""The cost of an agent at default settings: share of a core, and memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figure import Figure

SETTLE_S, MEASURE_S = 10.0, 60.0  # the 16 quick clock exchanges end within SETTLE_S
START_S = 60.0  # two ranks that import torch may start slowly

# Ten iterations are a window.
_TRAINER = """
import sys, time
if len(sys.argv) > 2:
    import torch  # torchrun's store has the address of the aggregator
import effllm
with effllm.monitor(parameters=1_000_000) as m:
    while True:
        time.sleep(float(sys.argv[1]))
        m.iteration(tokens=4096, samples=2, loss=1.0)
"""


def measure(settle_s: float = SETTLE_S, measure_s: float = MEASURE_S) -> list[Figure]:
    """Measure CPU time and memory in a usual job of one rank, and in a job of two ranks with windows of a second."""
    (agent, aggregator), memory = _measure(1, 0.4, settle_s, measure_s)
    figures = [
        Figure("agent: share of a core at default settings", agent * 100, "%", goal=0.1),
        Figure("agent: resident memory", memory[0].rss / 1e6, "MB", goal=40.0, detail={"uss_mb": memory[0].uss / 1e6}),
        Figure("aggregator of one rank: share of a core", aggregator * 100, "%"),
        Figure("aggregator: resident memory", memory[1].rss / 1e6, "MB", detail={"uss_mb": memory[1].uss / 1e6}),
    ]
    if _has_torch():  # two ranks find each other through torch
        quick, _ = _measure(2, 0.1, settle_s, measure_s)
        figures += [
            Figure("agent, windows of a second: share of a core", quick[0] * 100, "%", goal=0.25),
            Figure("aggregator of two ranks, windows of a second: share of a core", quick[1] * 100, "%", goal=0.5),
        ]
    return figures


def _has_torch() -> bool:
    return subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def _measure(ranks: int, iteration_s: float, settle_s: float, measure_s: float) -> tuple[list[float], list[Any]]:
    """Train for `measure_s`; return the shares of a core and the memory of rank 0's agent and of its aggregator."""
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
        environ |= {"EFFICIENTLLM_RUN_DIR": folder, "OMP_NUM_THREADS": "1"}
        script = Path(folder) / "train.py"
        script.write_text(_TRAINER)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, str(script), str(iteration_s), *["torch"][: ranks - 1]]
        launched = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        processes: list[psutil.Process] = []
        try:
            processes = _agent_and_aggregator(psutil.Process(launched.pid))
            time.sleep(settle_s)
            before = [_cpu_s(process) for process in processes]
            began_s = time.monotonic()
            time.sleep(measure_s)
            spent_s = time.monotonic() - began_s
            after = [_cpu_s(process) for process in processes]
            memory = [process.memory_full_info() for process in processes]
        finally:
            launched.terminate()
            launched.wait()
            psutil.wait_procs(processes, timeout=10)
    return [(late - early) / spent_s for early, late in zip(before, after, strict=True)], memory


def _agent_and_aggregator(launched: psutil.Process) -> list[psutil.Process]:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        for one in launched.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "effllm.server.process" in " ".join(one.cmdline()):
                    return [psutil.Process(one.ppid()), one]
        time.sleep(0.1)
    raise TimeoutError(f"there is no aggregator after {START_S:.0f} s")


def _cpu_s(process: psutil.Process) -> float:
    # The scheduler counts in ns. psutil counts in units of 10 ms. The goal, 0.1 % of a minute, is 60 ms.
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9
