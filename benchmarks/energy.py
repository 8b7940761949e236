"""Errors of window energies measured by effllm and by other tools: ``make bench-energy``.

The tools measure the same hosts of traced GPUs one after another, so no tool disturbs another.  Every tool measures
windows of the same lengths, with the same pauses.  Each result is compared with the exact energy between the start and
end that the tool reports.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.energy_run import ROOT, Host, Length, measure
from benchmarks.energy_tables import show, to_dict
from benchmarks.energy_traces import HELD_OUT, TUNING, hosts
from benchmarks.machine import machine
from tests.nvml_library import Trace, build

RESULTS = ROOT / "benchmarks" / "results"
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"

#: Module and interpreter of each tool, in measuring order.
TOOLS = {
    "effllm": ("benchmarks.energy_ours", sys.executable),
    "Zeus": ("benchmarks.peers.zeus_monitor", str(PEERS_PYTHON)),
    "CodeCarbon": ("benchmarks.peers.codecarbon_tracker", str(PEERS_PYTHON)),
    "nvitop": ("benchmarks.peers.nvitop_collector", str(PEERS_PYTHON)),
    "counter": ("benchmarks.peers.counter", str(PEERS_PYTHON)),
}
FULL = (Length("5 s", 5.0, 11), Length("1 s", 1.0, 24), Length("0.2 s", 0.2, 50))
QUICK = (Length("5 s", 5.0, 1), Length("1 s", 1.0, 2), Length("0.2 s", 0.2, 5))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.energy", description=__doc__)
    parser.add_argument("--set", choices=(HELD_OUT, TUNING), default=HELD_OUT, help="set of traces (default: held-out)")
    parser.add_argument("--tools", default=",".join(TOOLS), help="tools, separated by commas (default: all)")
    parser.add_argument("--copies", type=int, default=3, help="parallel processes per tool and host (default: 3)")
    parser.add_argument("--profiled", action="store_true", help="effllm gets a profile with a lag of 0")
    parser.add_argument("--quick", action="store_true", help="a minute instead of ten: too few windows for figures")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    given = parser.parse_args()
    names = given.tools.split(",")
    if unknown := set(names) - set(TOOLS):
        parser.error(f"there is no tool {', '.join(sorted(unknown))}; available tools: {', '.join(TOOLS)}")
    if given.keep and given.quick:
        parser.error("figures of a quick run are not worth keeping")
    if set(names) - {"effllm"} and not PEERS_PYTHON.exists():
        parser.error("the peers are not installed: run `make bench-energy`, or choose --tools effllm")
    console = Console()
    lengths = QUICK if given.quick else FULL
    load = os.getloadavg()[0]
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as bar:
        places = _prepare(Path(folder), given.set, {"BENCHMARK_PROFILED": "1"} if given.profiled else {})
        measured = [
            measure(name, [python, "-m", module], places, lengths, given.copies, bar)
            for name, (module, python) in TOOLS.items()
            if name in names
        ]
    node = [group for place in places for group in place.groups]
    shown = [length.name for length in lengths]
    show(console, measured, node, shown)
    console.print(f"Traces: {given.set}. Load before the start: {load:.2f} on {os.cpu_count()} CPUs.")
    if given.keep:
        body = {
            "machine": _machine(load),
            "set": given.set,
            "profiled": given.profiled,
            **to_dict(measured, node, shown),
        }
        console.print(f"kept in {_keep(body).relative_to(ROOT)}")


def _prepare(folder: Path, chosen: str, settings: dict[str, str]) -> list[Host]:
    """Build the NVML library, write the traces, and return the hosts with the tools' environment variables."""
    library = build(folder)
    if library is None:
        sys.exit("there is no C compiler here, so the traced NVML library cannot be built")
    programs = folder / "bin"
    programs.mkdir()
    smi = programs / "nvidia-smi"  # CodeCarbon runs nvidia-smi to detect GPUs
    smi.write_text("#!/bin/sh\n")
    smi.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("EFFICIENTLLM_", "CUDA_"))}
    environ |= settings | {name: str(folder) for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    made = []
    for number, groups in enumerate(hosts(chosen)):
        trace = Trace(library, folder / f"trace-{number}")
        trace.write(*(gpu for group in groups for gpu in group.gpus))
        made.append(Host(groups, environ | trace.environment()))
    return made


def _machine(load: float) -> dict[str, Any]:
    return machine(load_before=load, gpu="traced: not measured on a GPU")


def _keep(body: dict[str, Any]) -> Path:
    RESULTS.mkdir(exist_ok=True)
    kind = "energy" if body["set"] == HELD_OUT else f"energy-{body['set']}"
    path = RESULTS / f"{body['machine']['date']}-{kind}{'-profiled' if body['profiled'] else ''}.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path


if __name__ == "__main__":
    main()
