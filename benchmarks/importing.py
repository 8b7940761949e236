"""Time of ``import effllm``, compared with ``import msgspec`` (one small extension); time added to ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks.figure import Figure, median

PAIRS = 15


def measure() -> list[Figure]:
    """Import each module in a new interpreter, in turns."""
    costs: dict[str, list[float]] = {"effllm": [], "msgspec": [], "effllm.trainer.collector": []}
    for _ in range(PAIRS):
        for module, collected in costs.items():
            collected.append(_import_s(module))
    ours, peer, face = (median(costs[module]) * 1000 for module in costs)
    on_ms, off_ms = (median([_autoload_s(switch) for _ in range(PAIRS)]) * 1000 for switch in ("1", "0"))
    return [
        Figure("import effllm", ours, "ms"),
        Figure("import effllm, over import msgspec", ours / peer, "ratio", goal=1.0, detail={"msgspec_ms": peer}),
        Figure("import of the whole face for training", face, "ms"),
        Figure("added to import torch, frameworks are hooked", on_ms, "ms", goal=5.0),
        Figure("added to import torch, off", off_ms, "ms", goal=1.0),
    ]


def _import_s(module: str) -> float:
    program = f"import time; a = time.perf_counter(); import {module}; print(time.perf_counter() - a)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return float(done.stdout)


def _autoload_s(switch: str) -> float:
    """Return the time of effllm's entry point after ``import torch``, which imports most of the needed modules."""
    program = (
        "import time, torch; a = time.perf_counter(); from effllm.attach import autoload; autoload();"
        "print(time.perf_counter() - a)"
    )
    environ = os.environ | {"EFFICIENTLLM_ATTACH": switch, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout)
