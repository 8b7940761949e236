"""Iteration time of the demo with metrics, divided by the time without metrics, in alternating pairs within one job."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figure import Figure, interval_95, median

ROOT = Path(__file__).resolve().parent.parent
PAIRS, ITERATIONS = 36, 6
#: An iteration takes half a second on a CPU, and some milliseconds on a GPU.
ITERATIONS_ON_GPU = 100


def measure() -> list[Figure]:
    """Run the paired job with two processes, on GPUs if there are any."""
    return _measure(processes=2, iterations=ITERATIONS, where="")


def lacks_on_gpu() -> str:
    """Return the reason why the job cannot run on a GPU, or an empty string."""
    return lacks_cuda("torch", "megatron")


def lacks_cuda(*packages: str) -> str:
    """Return the reason why torch, with these packages, cannot use a GPU, or an empty string."""
    missing = [name for name in packages or ("torch",) if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} is not installed"
    probe = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    done = subprocess.run(probe, capture_output=True, check=False)
    return "" if done.returncode == 0 else "torch finds no GPU"


def measure_on_gpu() -> list[Figure]:
    """Run the paired job on one GPU."""
    return _measure(processes=1, iterations=ITERATIONS_ON_GPU, where=" on a GPU")


def _measure(processes: int, iterations: int, where: str) -> list[Figure]:
    """Run the paired job; return the median ratio over the pairs, with a bootstrap interval."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "EFFICIENTLLM_RUN_DIR": folder,
            # Packages may come from an inherited PYTHONPATH, on a machine without a network.
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), str(ROOT / "integration" / "megatron_core"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
        }
        launch = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node"]
        job = [str(ROOT / "benchmarks" / "paired_demo.py"), str(times), str(PAIRS), str(iterations)]
        subprocess.run(
            [sys.executable, *launch, str(processes), *job], env=environ, check=True, stdout=subprocess.DEVNULL
        )
        pairs: list[list[float]] = json.loads(times.read_text())
    ratios = [on / off for on, off in pairs]
    return [
        Figure(
            f"iteration time of the demo{where}, metrics on over off",
            median(ratios),
            "ratio",
            goal=1.005,
            interval=interval_95(ratios, median),
            detail={"pairs": PAIRS, "iterations_a_side": iterations, "seconds_off": _mean([off for _, off in pairs])},
        )
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
