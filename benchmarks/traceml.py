"""TraceML's demonstration jobs under TraceML and effllm at the same time.  ``make bench-traceml``.

The package traceml-ai contains the jobs.  They are made for GPUs: 512 steps of a model of 92 million parameters.  On
the CPU they run on two ranks with smaller sizes (`SIZES`), which are written into a temporary copy; the delays of the
input are unchanged.  The package has no job with growing memory (mlp_ddp_memory_creep).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine

RESULTS = Path(__file__).parent / "results"
#: Constants of the jobs with the values for two CPU cores; a constant that a job does not have is ignored.
SIZES = {
    "NUM_SAMPLES": 16384, "INPUT_DIM": 256, "HIDDEN_DIM": 1024, "NUM_CLASSES": 100, "EPOCHS": 2,
    "STRAGGLER_RANK": 1, "EXTRA_OPTIMIZER_DIM": 384,
}  # fmt: skip
RANKS = 2
TIMEOUT_S = 300


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.traceml", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results/")
    parser.add_argument("--jobs", default="", help="names of jobs, separated by commas; the default is all jobs")
    given = parser.parse_args()
    console, found = Console(), {}
    for path in demonstrations():
        if not given.jobs or path.stem in given.jobs.split(","):
            console.print(f"{path.stem} ...")
            found[path.stem] = both_verdicts(path)
    table = Table("job", "TraceML", "effllm", box=None)
    for name, one in found.items():
        table.add_row(name, one["traceml"], one["effllm"])
    console.print(table)
    if given.keep:
        kept = {
            "machine": machine(),
            "traceml-ai": version("traceml-ai"),
            "sizes": SIZES,
            "ranks": RANKS,
            "jobs": found,
        }
        path = RESULTS / f"{kept['machine']['date']}-traceml.json"
        path.write_text(json.dumps(kept, indent=1) + "\n")
        console.print(f"kept in {path}")
    return 0


def demonstrations() -> list[Path]:
    """Return the files of TraceML's jobs with an MLP on several ranks."""
    package = importlib.util.find_spec("dev.demo")
    if package is None or not package.submodule_search_locations:
        sys.exit("traceml-ai contains no demonstration jobs: make bench-traceml installs version 0.5.0")
    return sorted(Path(next(iter(package.submodule_search_locations))).glob("mlp_ddp_*.py"))


def both_verdicts(path: Path) -> dict[str, Any]:
    """Run a job once under both tools; return their verdicts."""
    with tempfile.TemporaryDirectory(prefix="effllm-traceml-") as folder:
        script = Path(folder, path.name)
        script.write_text(scaled(path.read_text()))
        environ = {
            **os.environ,
            "EFFICIENTLLM_ATTACH": "1",
            "EFFICIENTLLM_RUN_DIR": f"{folder}/runs",
            "EFFICIENTLLM_SINKS": "none",
            "EFFICIENTLLM_PROFILE_EVERY": "20",
            "OMP_NUM_THREADS": "1",
        }
        arguments = ["--mode", "summary", "--nproc-per-node", str(RANKS), "--logs-dir", f"{folder}/logs"]
        command = [str(Path(sys.executable).with_name("traceml")), "run", *arguments, "--run-name", "demo", str(script)]
        try:
            done = subprocess.run(command, cwd=folder, env=environ, timeout=TIMEOUT_S, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"traceml": f"no result within {TIMEOUT_S} s", "effllm": "no result", "output": ""}
        return {
            "traceml": traceml_verdict(Path(folder, "logs")) or f"no summary (exit status {done.returncode})",
            "effllm": effllm_verdict(Path(folder, "runs")) or "no summary",
            "output": "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:],
        }


def scaled(source: str) -> str:
    """Return the source of a job with the sizes for a CPU."""
    for name, value in SIZES.items():
        source = re.sub(rf"^{name} = .*$", f"{name} = {value}", source, flags=re.MULTILINE)
    return source


def traceml_verdict(folder: Path) -> str:
    for path in sorted(folder.rglob("final_summary.json")):
        found = json.loads(path.read_text())["primary_diagnosis"]
        return f"{found['status']}: {found['summary']}"
    return ""


def effllm_verdict(folder: Path) -> str:
    for path in sorted(folder.glob("*/summary.json")):
        verdict = json.loads(path.read_text())["verdict"]
        return f"{verdict['text']} ({verdict['why']})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
