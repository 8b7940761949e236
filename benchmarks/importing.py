"""``import effllm`` against ``import msgspec``, which is one small extension module."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.figure import Figure, median

PAIRS = 15


def measure() -> list[Figure]:
    """Import each in a fresh interpreter, in turn."""
    costs: dict[str, list[float]] = {"effllm": [], "msgspec": [], "effllm.collector": []}
    for _ in range(PAIRS):
        for module, collected in costs.items():
            collected.append(_import_s(module))
    ours, peer, face = (median(costs[module]) * 1000 for module in costs)
    return [
        Figure("import effllm", ours, "ms"),
        Figure("import effllm, over import msgspec", ours / peer, "ratio", goal=1.0, detail={"msgspec_ms": peer}),
        Figure("import of the whole face for training", face, "ms"),
    ]


def _import_s(module: str) -> float:
    program = f"import time; a = time.perf_counter(); import {module}; print(time.perf_counter() - a)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)
