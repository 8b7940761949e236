"""The cost of an aggregator of 10,000 ranks, compared with a loop that only decodes: ``python -m benchmarks.scale``.

The benchmark measures CPU time, not wall time: on a shared machine, CPU time varies by about a fifth.
Each run measures the aggregator, then the loop, with the same ranks, connections and messages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure
from benchmarks.machine import machine
from benchmarks.scale_bare import Bare
from effllm.commands.simulate_run import Findings, SimulatedRun, Simulation, SimulationError
from effllm.config.settings import Config
from effllm.network import secret
from effllm.network.listening import num_open_files_needed, raise_open_files_limit

RESULTS = Path(__file__).parent / "results"
RANKS, QUICK_RANKS = (100, 1_000, 4_000, 10_000), (100, 1_000)
SECONDS, QUICK_SECONDS = 20, 6
MAX_CORE_SHARE, MAX_BYTES, MAX_DELAY_S, MIN_SHARE = 0.20, 400 * 2**20, 1.0, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute at most: small worlds, a few windows")
    parser.add_argument("--keep", action="store_true", help="keep the figures in benchmarks/results/")
    parser.add_argument("--ranks", help="worlds to measure, separated by commas")
    parser.add_argument("--arrival", default="burst", choices=("burst", "even"), help="arrival of a window's reports")
    parser.add_argument("--security", default="curve", choices=("curve", "none"), help="with keys or without")
    given = parser.parse_args()
    worlds = [int(text) for text in given.ranks.split(",")] if given.ranks else QUICK_RANKS if given.quick else RANKS
    seconds = QUICK_SECONDS if given.quick else SECONDS
    if trouble := raise_open_files_limit(num_open_files_needed(max(worlds))):
        print(f"benchmarks.scale: {trouble}", file=sys.stderr)
        return 1
    console, found = Console(), []
    for ranks in worlds:
        asked = Simulation(ranks, minutes=seconds / 60, arrival=given.arrival, security=given.security)
        try:
            with console.status(f"{ranks:,} ranks"):
                found.append((measure(asked), measure_bare(asked)))
        except SimulationError as error:
            print(f"benchmarks.scale: {ranks} ranks: {error}", file=sys.stderr)
            return 1
    figures = figures_of(found)
    console.print(table(found))
    for figure in figures:
        if figure.goal is not None:
            verdict = "met" if figure.met else "NOT MET"
            console.print(f"{figure.name}: {figure.value:.4g} {figure.unit}, goal {figure.goal:g}: {verdict}")
    if given.keep:
        console.print(f"kept in {_keep(figures, found, given)}")
    exact = all(ours.is_exact and ours.status == "completed" for ours, _ in found)
    if not exact:
        print("benchmarks.scale: not everything that was reported was counted once", file=sys.stderr)
    return 0 if exact else 1


class BareRun(SimulatedRun):
    """A simulation whose ranks report to the bare loop; its process is measured like that of an aggregator."""

    def __init__(self, asked: Simulation, config: Config, bare: Bare) -> None:
        super().__init__(asked, config)
        self._aggregator = bare  # type: ignore[assignment]


def measure(asked: Simulation) -> Findings:
    return SimulatedRun(asked, Config()).measure()


def measure_bare(asked: Simulation) -> Findings:
    with tempfile.TemporaryDirectory(prefix="effllm-bare-") as folder:
        file = Path(folder) / "secret"
        if asked.security == "curve":
            secret.read_or_create(file)
        bare = Bare(str(file) if asked.security == "curve" else "")
        asked = msgspec.structs.replace(asked, endpoint=bare.endpoint)
        return BareRun(asked, Config(secret_file=str(file)), bare).measure()


def figures_of(found: list[tuple[Findings, Findings]]) -> list[Figure]:
    """Return the cost of each world; from 10,000 ranks on, the figures have goals."""
    figures = []
    for ours, bare in found:
        name = f"{ours.ranks:,} ranks"
        goals = (MAX_CORE_SHARE, MAX_BYTES / 2**20, MAX_DELAY_S) if ours.ranks >= 10_000 else (None, None, None)
        delays = sorted(ours.delays_s)
        share = (bare.cpu_us_per_report or 0.0) / (ours.cpu_us_per_report or 1.0)
        figures += [
            Figure(f"{name}: of a core", ours.cpu_ratio or 0.0, "ratio", goals[0], detail={"bare": bare.cpu_ratio}),
            Figure(f"{name}: processor time of a report", ours.cpu_us_per_report or 0.0, "us"),
            Figure(f"{name}: the same of the bare loop", bare.cpu_us_per_report or 0.0, "us"),
            # Aggregator and bare loop have one thread each: throughput is reports per second of CPU time.
            Figure(f"{name}: throughput over that of the bare loop", share, "ratio", detail={"least": MIN_SHARE}),
            Figure(f"{name}: memory", (ours.rss_bytes or 0) / 2**20, "MiB", goals[1]),
            Figure(f"{name}: memory of the bare loop", (bare.rss_bytes or 0) / 2**20, "MiB"),
            Figure(
                f"{name}: from a window's last report to its values, at most", max(delays, default=0.0), "s", goals[2]
            ),
            Figure(f"{name}: the same, median", statistics.median(delays) if delays else 0.0, "s"),
        ]
    return figures


def table(found: list[tuple[Findings, Findings]]) -> Table:
    shown = Table(title="One aggregator, one report a second of each rank: processor time")
    for column in (
        "ranks",
        "of a core",
        "us/report",
        "bare",
        "share",
        "MiB",
        "bare",
        "delay median",
        "at most",
        "exact",
    ):
        shown.add_column(column, justify="right")
    for ours, bare in found:
        cost, bare_cost = ours.cpu_us_per_report or 0.0, bare.cpu_us_per_report or 0.0
        delays = sorted(ours.delays_s) or [0.0]
        shown.add_row(
            f"{ours.ranks:,}", f"{100 * (ours.cpu_ratio or 0):.1f} %", f"{cost:.1f}", f"{bare_cost:.1f}",
            f"{bare_cost / cost:.2f}" if cost else "", f"{(ours.rss_bytes or 0) / 2**20:.0f}",
            f"{(bare.rss_bytes or 0) / 2**20:.0f}", f"{statistics.median(delays):.3f} s", f"{delays[-1]:.3f} s",
            "yes" if ours.is_exact else "NO",
        )  # fmt: skip
    return shown


def _keep(figures: list[Figure], found: list[tuple[Findings, Findings]], given: argparse.Namespace) -> Path:
    about = machine(command="python -m benchmarks.scale " + " ".join(sys.argv[1:]))
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{about['date']}-scale{'-quick' if given.quick else ''}.json"
    runs: list[Any] = [[msgspec.to_builtins(one) for one in pair] for pair in found]
    body = {"machine": about, "figures": [figure.to_dict() for figure in figures], "runs": runs}
    path.write_text(json.dumps(body, indent=2) + "\n")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
