"""Iteration time of the demo with metrics on against off, in pairs that take turns within one job."""

from __future__ import annotations

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


def measure() -> list[Figure]:
    """Run the paired job; the ratio is the median over pairs, its interval a bootstrap over them."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times.json"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("EFFICIENTLLM_")}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "EFFICIENTLLM_RUN_DIR": folder,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'integration' / 'megatron_core'}",
        }
        launch = ["-m", "torch.distributed.run", "--standalone", "--local_addr", "127.0.0.1", "--nproc_per_node", "2"]
        job = [str(ROOT / "benchmarks" / "paired_demo.py"), str(times), str(PAIRS), str(ITERATIONS)]
        subprocess.run([sys.executable, *launch, *job], env=environ, check=True, stdout=subprocess.DEVNULL)
        pairs: list[list[float]] = json.loads(times.read_text())
    ratios = [on / off for on, off in pairs]
    return [
        Figure(
            "iteration time of the demo, metrics on over off",
            median(ratios),
            "ratio",
            goal=1.005,
            interval=interval_95(ratios, median),
            detail={"pairs": PAIRS, "iterations_a_side": ITERATIONS, "seconds_off": _mean([off for _, off in pairs])},
        )
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
